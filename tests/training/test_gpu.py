"""On a GPU: a recorded step is the step itself, and nothing waits for the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from primal.training import loop
from primal.training.graphs import EAGER_STEPS
from primal.training.loop import Diverged, Problem, SampleLosses, TrainingConfig
from tests.training.toy import CONFIG, run, toy

pytestmark = pytest.mark.gpu

# Enough epochs that batches of both sizes, 4 and 2, are recorded and replayed.
LONG = replace(CONFIG, epochs=3 * EAGER_STEPS, learning_rate=1e-3, checkpoint_seconds=1000.0)


def train(config: TrainingConfig, **settings: Any) -> tuple[Any, Any]:
    return run(None, toy(device="cuda", **settings), config)


def assert_near(found: tuple[Any, Any], expected: tuple[Any, Any], tolerance: float) -> None:
    for mine, other in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(other, rel=tolerance, abs=tolerance)
    torch.testing.assert_close(
        found[1], expected[1], rtol=tolerance, atol=tolerance, check_device=False
    )


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "radam"])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_recorded_steps_are_plain_steps(optimizer, precision):
    """Dropout, average, rates and two batch sizes among them; atomic sums differ in their order."""
    config = replace(LONG, optimizer=optimizer, precision=precision, select=None)
    recorded, plain = train(config), train(replace(config, graphs=False))
    assert_near(recorded, plain, 1e-2 if precision == "bfloat16" else 1e-3)


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[object]:
    """Return a list that grows by the object each time its method is called."""
    calls: list[object] = []
    method = getattr(owner, name)

    def call(self: object) -> None:
        calls.append(self)
        method(self)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_steps_are_recorded_at_all(monkeypatch):
    replayed = counted(monkeypatch, torch.cuda.CUDAGraph, "replay")
    train(LONG)
    assert len(set(map(id, replayed))) == 2  # a graph for each batch size
    assert len(replayed) == 4 * LONG.epochs - 2 * EAGER_STEPS


def test_a_gpu_trains_as_a_cpu():
    config = replace(CONFIG, select=None, learning_rate=1e-3)
    assert_near(train(config, dropout=0.0), run(None, toy(dropout=0.0), config), tolerance=1e-3)


@pytest.mark.parametrize("graphs", [True, False])
def test_no_step_waits_for_the_device(monkeypatch, graphs):
    """CUDA raises where the host would wait; looking at the losses is let through."""

    def strictly(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    if graphs:
        # What is recorded cannot wait, or recording fails; a replay is what runs from then on.
        monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", strictly(torch.cuda.CUDAGraph.replay))
    else:
        monkeypatch.setattr(loop._Loop, "compute", strictly(loop._Loop.compute))
    train(replace(LONG, graphs=graphs))


def test_losses_are_looked_at_when_an_epoch_ends(monkeypatch):
    looks = counted(monkeypatch, loop._Loop, "_check_loss")
    train(LONG)
    assert len(looks) == LONG.epochs + 1  # and before the last checkpoint


@pytest.mark.parametrize("graphs", [True, False])
def test_a_loss_that_is_no_number_names_batch_and_step(graphs):
    problem, at = toy(device="cuda"), 4 * (EAGER_STEPS + 2)
    steps = torch.zeros((), device="cuda")

    def losses(model: Any, batch: Any) -> SampleLosses:
        steps.add_(1)
        found = problem.losses(model, batch[:2])
        bad = (batch[2] == 5) & (steps > at)
        return found._replace(task=torch.where(bad, torch.nan, found.task))

    spoilt: Problem = problem._replace(batch=lambda i: (*problem.batch(i), i), losses=losses)
    with pytest.raises(
        Diverged, match=rf"at step \d+, batch \d of epoch {EAGER_STEPS + 3}, cases case 5;"
    ):
        run(None, spoilt, replace(LONG, graphs=graphs))


def test_a_stopped_run_goes_on(tmp_path):
    def refuse(now: int) -> None:
        if now == 30:
            raise KeyboardInterrupt

    config = replace(LONG, graphs=False, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy(device="cuda", before_step=refuse), config)
    found = run(tmp_path, toy(device="cuda"), config, resume=True)
    assert_near(found, train(config), tolerance=1e-3)


def test_the_callers_precision_is_left_alone():
    before = torch.backends.cuda.matmul.fp32_precision
    train(replace(CONFIG, precision="tf32"))
    assert torch.backends.cuda.matmul.fp32_precision == before
