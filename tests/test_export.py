"""What is compiled, or leaves Python, computes the same: torch.compile, torch.export, ONNX."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from primal.attention.base import Attention
from primal.attention.primal import PrimalAttention
from primal.attention.robust import RobustAttention, ScaledAttention
from primal.attention.softmax import SoftmaxAttention
from primal.functional import ksvd_objective
from primal.models.build import EncoderConfig, primal_plus
from primal.models.classifier import SequenceClassifier

WIDTH, HEADS, LONGEST = 16, 2, 150

PRIMAL: dict[str, dict[str, Any]] = {
    "anchors": {},
    "contextual": {"projection": "contextual"},
    "shared-causal": {"causal": True, "feature_map": "elu", "short_convolution": 3},
    "contextual-causal": {
        "projection": "contextual",
        "causal": True,
        "feature_map": "positive_random",
    },
}
MODELS: dict[str, Callable[[], Any]] = {
    **{name: partial(PrimalAttention, WIDTH, HEADS, 4, **PRIMAL[name]) for name in PRIMAL},
    "softmax-causal": partial(SoftmaxAttention, WIDTH, HEADS, causal=True),
    "robust": partial(RobustAttention, WIDTH, HEADS),
    "scaled": partial(ScaledAttention, WIDTH, HEADS),
    "encoder": partial(primal_plus, width=WIDTH, heads=HEADS, rank=4),
    "classifier": partial(
        SequenceClassifier, WIDTH, 3, LONGEST, EncoderConfig(width=WIDTH, heads=HEADS, rank=4)
    ),
}
SIZES = [(2, 11), (1, 1), (4, LONGEST)]  # batch and tokens, none of them the export's


def padded(batch: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Return tokens and a mask."""
    lengths = torch.randint(1, tokens + 1, (batch,))
    return torch.randn(batch, tokens, WIDTH), torch.arange(tokens) < lengths[:, None]


# --- compiled ------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_compiled_equals_eager(layer: Attention, backend: str) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for tokens in (70, 33):
        x, mask = padded(3, tokens)
        x.requires_grad_()
        measured = []
        for call in (layer, compiled):
            values, terms = call(x, mask=mask)
            loss = values.sin().sum() + ksvd_objective(terms)
            gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
            measured.append((values, terms, gradients))
        torch.testing.assert_close(*measured, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", [*PRIMAL][1:])
def test_one_graph_equals_eager(name):
    assert_compiled_equals_eager(MODELS[name](), backend="aot_eager")


# torch.utils.mkldnn, which inductor imports, still uses TorchScript.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "name", ["anchors", *(pytest.param(n, marks=pytest.mark.slow) for n in [*PRIMAL][1:])]
)
def test_generated_code_equals_eager(name):
    assert_compiled_equals_eager(MODELS[name](), backend="inductor")


# --- exported ------------------------------------------------------------------------------------

DYNAMIC = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}

# torch.export copies tree specifications, and its own copy warns of their class.
ignore_tree_specifications = pytest.mark.filterwarnings(
    r"ignore:.isinstance\(treespec, LeafSpec\). is deprecated:FutureWarning"
)


class Values(nn.Module):
    """A model as it is deployed: tokens and their mask in, values or logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        values: Tensor = self.model(x, mask=mask)[0]
        return values


def deployed(name: str) -> Values:
    return Values(MODELS[name]()).eval()


@ignore_tree_specifications
@pytest.mark.parametrize("name", MODELS)
def test_an_exported_program_takes_any_batch_and_length(name):
    model = deployed(name)
    shapes = {"x": DYNAMIC, "mask": DYNAMIC}
    program = torch.export.export(model, padded(3, 7), dynamic_shapes=shapes).module()
    for size in SIZES:
        x, mask = padded(*size)
        torch.testing.assert_close(program(x, mask), model(x, mask))


def to_onnx(
    model: nn.Module, inputs: tuple[Any, ...], shapes: Any, path: Path
) -> Callable[..., list[Tensor]]:
    """Write the model to a file, read it with onnxruntime, and return it as a function."""
    torch.onnx.export(model, inputs, path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [put.name for put in session.get_inputs()]

    def run(*tensors: Tensor) -> list[Tensor]:
        given = {name: t.detach().numpy() for name, t in zip(names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(None, given)]

    return run


@ignore_tree_specifications
@pytest.mark.parametrize("name", ["encoder", "classifier", "contextual", "contextual-causal"])
def test_onnx_takes_any_batch_and_length(name, tmp_path):
    model = deployed(name)
    shapes = {"x": DYNAMIC, "mask": DYNAMIC}
    run = to_onnx(model, padded(3, 7), shapes, tmp_path / "model.onnx")
    for size in SIZES:
        x, mask = padded(*size)
        torch.testing.assert_close(run(x, mask), [model(x, mask)], rtol=1e-5, atol=1e-5)


class Step(nn.Module):
    """One step of decoding, whose state goes in and comes out as plain tensors."""

    def __init__(self, layer: Attention) -> None:
        super().__init__()
        self.layer = layer
        self.empty = layer.init_state(1)
        self.used = [name for name in self.empty._fields if getattr(self.empty, name) is not None]

    def tensors(self, state: Any) -> list[Tensor]:
        return [getattr(state, name) for name in self.used]

    def forward(self, x: Tensor, mask: Tensor, state: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = self.empty._replace(**dict(zip(self.used, state, strict=True)))
        values, after = self.layer.step(x, given, mask=mask)
        return values, *self.tensors(after)


@ignore_tree_specifications
@pytest.mark.parametrize("name", ["shared-causal", "contextual-causal", "softmax-causal"])
def test_onnx_decodes(name, tmp_path):
    layer = MODELS[name]().eval().requires_grad_(False)
    step = Step(layer).eval()
    state = layer.init_state(3)
    for x in torch.randn(4, 3, WIDTH):
        state = layer.step(x, state).state
    # The batch may be any, and so may be how far back the cache of softmax attention reaches.
    past = {"key": [2], "value": [2], "mask": [1]} if name == "softmax-causal" else {}
    of_state = [dict.fromkeys([0, *past.get(part, [])], Dim.DYNAMIC) for part in step.used]
    shapes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}, of_state)
    example = (torch.randn(3, WIDTH), torch.tensor([True, False, True]), step.tensors(state))
    run = to_onnx(step, example, shapes, tmp_path / "step.onnx")
    for batch in (2, 5):
        x, mask = torch.randn(batch, 9, WIDTH), torch.arange(9) >= torch.arange(batch)[:, None]
        expected = layer(x, mask=mask).values
        tensors = step.tensors(layer.init_state(batch))
        for n in range(9):
            values, *tensors = run(x[:, n], mask[:, n], *tensors)
            torch.testing.assert_close(values, expected[:, n], rtol=1e-5, atol=1e-5)
