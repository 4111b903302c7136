from dataclasses import dataclass
from torch import nn
@dataclass(frozen=True, kw_only=True)
class ClosedFormConfig:
    pass
class ClosedFormModel(nn.Module):
    pass
