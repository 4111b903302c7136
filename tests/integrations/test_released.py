"""What the released code computed, ours computes: outputs, objectives and every gradient.

tests/data/released holds vectors that the papers' own code produced on random weights and inputs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from primal import KSVDTerms, from_released, ksvd_objective
from primal.functional import Reduction, Trace, ksvd_residual
from primal.integrations.released import ReleasedPadding

DATA = Path(__file__).parents[1] / "data" / "released"
CASES = sorted(DATA.glob("*.npz"))
ROUNDING = 1e-5  # of float32, relative to the largest entry


class Case:
    """One recorded run of the released code."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            self.arrays = {name: torch.from_numpy(np.asarray(arrays[name])) for name in arrays}
        self.weights = self.group("weight/")
        self.settings = {name: value.item() for name, value in self.group("config/").items()}
        self.reduction: Reduction = (
            "sample" if self.arrays.get("out/J", torch.empty(0)).ndim else "batch"
        )
        self.trace: Trace = "data" if "data_trace" in path.name else "weights"

    def group(self, prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): a for n, a in self.arrays.items() if n.startswith(prefix)}

    def residual(self, terms: KSVDTerms) -> Tensor:
        return ksvd_residual(terms, reduction=self.reduction, trace=self.trace)

    def objective(self, terms: KSVDTerms) -> Tensor:
        return ksvd_objective(terms, reduction=self.reduction, trace=self.trace)


def assert_close(ours: Tensor | None, theirs: Tensor) -> None:
    assert ours is not None
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= ROUNDING * theirs.abs().max()


@pytest.fixture(params=CASES, ids=lambda path: path.stem)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_all_recorded_runs_are_here():
    assert len(CASES) == 10


def test_outputs_objectives_and_gradients_are_the_released_ones(case):
    layer = from_released(case.weights, **case.settings)
    x = case.arrays["in/x"].requires_grad_()
    values, terms = layer(x, mask=case.arrays.get("in/mask"))
    assert_close(values, case.arrays["out/y"])
    loss = values.square().mean()
    if "out/J" in case.arrays:
        assert_close(case.residual(terms), case.arrays["out/J"])
        assert_close(case.objective(terms), case.arrays["out/J2"].mean())
        loss = loss + 0.3 * case.objective(terms)
        assert_close(loss, case.arrays["out/loss"])
    loss.backward()
    assert_close(x.grad, case.arrays["grad_in/x"])
    for name, gradient in case.group("grad/").items():
        # Ours are the released tensors under other names: found by value.
        ours = [p for p in layer.parameters() if torch.equal(p, case.weights[name])]
        assert len(ours) == 1, name
        assert_close(ours[0].grad, gradient)


def test_bool_and_float_masks_are_one_to_the_released_padding():
    case = Case(DATA / "lra_B2_N40_H2_D8_s4_m5_data_trace.npz")
    layer, mask = from_released(case.weights), case.arrays["in/mask"]
    by_float, by_bool = (layer(case.arrays["in/x"], mask=m).values for m in (mask, mask.bool()))
    torch.testing.assert_close(by_float, by_bool)


def test_a_released_layer_can_have_its_padding_excluded_instead():
    case = Case(DATA / "lra_B2_N40_H2_D8_s4_m5_data_trace.npz")
    layer, mask = from_released(case.weights), case.arrays["in/mask"].bool()
    assert isinstance(layer, ReleasedPadding)
    x = case.arrays["in/x"]
    length = int(mask[1].sum())
    excluded = layer.attention(x, mask=mask).values
    torch.testing.assert_close(
        excluded[1, :length], layer.attention(x[1:, :length]).values[0], rtol=1e-4, atol=1e-5
    )


def vision_weights(*, bias: bool) -> dict[str, Tensor]:
    """Name random weights as the released vision code does, for 12 tokens of width 16, 2 heads."""
    shapes = {
        "we": (2, 12, 3),
        "wr": (2, 12, 3),
        "Lambda": (2, 3),
        "qk.weight": (32, 16),
        "concate_weight.weight": (8, 6),
        "concate_weight.bias": (8,),
        "proj.weight": (16, 16),
        "proj.bias": (16,),
    }
    return {n: torch.randn(s) for n, s in (shapes | ({"qk.bias": (32,)} if bias else {})).items()}


@pytest.mark.parametrize("bias", [True, False])
def test_the_vision_layout_is_what_its_code_computes(bias):
    weights, x = vision_weights(bias=bias), torch.randn(2, 12, 16)
    query_key = torch.nn.functional.linear(x, weights["qk.weight"], weights.get("qk.bias"))
    query, key = query_key.unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)  # (B, H, N, D) each
    tokens = x.unflatten(-1, (2, 8)).permute(0, 2, 3, 1)  # all 12 are anchors, (B, H, D, N)
    scores = [
        torch.nn.functional.normalize(side, dim=-1) @ (tokens @ weights[name])
        for side, name in ((query, "we"), (key, "wr"))
    ]
    mixed = torch.cat(scores, -1) @ weights["concate_weight.weight"].mT
    heads = (mixed + weights["concate_weight.bias"]).transpose(1, 2).flatten(2)
    expected = heads @ weights["proj.weight"].mT + weights["proj.bias"]
    torch.testing.assert_close(from_released(weights)(x).values, expected, rtol=1e-4, atol=1e-4)


def test_the_language_layout_is_the_decision_transformer_s_under_other_names():
    case = Case(DATA / "causal_B2_N20_H2_D8_s5.npz")
    names = {"query_projection": "q_proj", "key_projection": "k_proj", "out_projection": "out_proj"}
    renamed = {
        ".".join(names.get(part, part) for part in name.split(".")): weight
        for name, weight in case.weights.items()
    }
    values = from_released(renamed)(case.arrays["in/x"]).values
    assert_close(values, case.arrays["out/y"])


def test_a_layer_is_found_in_a_model():
    weights = Case(DATA / "timeseries_B2_N29_H4_D8_s5_m3.npz").weights
    model = {f"layers.0.attention.{name}": weight for name, weight in weights.items()}
    model |= {"head.weight": torch.zeros(3, 4)}
    x = torch.randn(2, 29, 32)
    assert torch.equal(from_released(model)(x).values, from_released(weights)(x).values)
    two = model | {f"layers.1.attention.{name}": weight for name, weight in weights.items()}
    with pytest.raises(ValueError, match=r"got 2; choose prefix= from .*layers\.1\.attention"):
        from_released(two)
    chosen = from_released(two, prefix="layers.1.attention")
    assert torch.equal(chosen(x).values, from_released(weights)(x).values)


def test_published_ranks_above_the_head_width_load():
    weights = {
        "We": torch.randn(2, 8, 12),
        "Wr": torch.randn(2, 8, 12),
        "Lambda": torch.randn(2, 12),
        "concate_weight.weight": torch.randn(8, 24),
        "concate_weight.bias": torch.randn(8),
        **{f"{n}_projection.weight": torch.randn(16, 16) for n in ("query", "key", "out")},
        **{f"{n}_projection.bias": torch.randn(16) for n in ("query", "key", "out")},
    }
    assert from_released(weights)(torch.randn(1, 5, 16)).values.shape == (1, 5, 16)


def test_errors_name_what_is_missing():
    robust = Case(DATA / "rpc_B2_N17_C24_H3_n1_lam4.0.npz").weights
    with pytest.raises(ValueError, match=r"heads is required.*pass heads="):
        from_released(robust)
    with pytest.raises(ValueError, match=r"iterations.*got 'iteration'. Did you mean 'iterations'"):
        from_released(robust, heads=3, iteration=4)
    series = Case(DATA / "timeseries_B2_N29_H4_D8_s5_m3.npz").weights
    with pytest.raises(ValueError, match="heads is told by the weights, 4, got 2"):
        from_released(series, heads=2)
    with pytest.raises(ValueError, match=r"must hold the parameters of one released layer.*Wq"):
        from_released({"Wq": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="no parameter starts with prefix='encoder'"):
        from_released(series, prefix="encoder")
