"""The loop: resumes to the same numbers, stops at once, says what is wrong, waits for nothing."""

import math
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from primal.training import checkpoint, loop
from primal.training.checkpoint import CheckpointError
from primal.training.loop import (
    Diverged,
    Interrupted,
    Problem,
    SampleLosses,
    Shown,
    TrainingConfig,
    train,
)
from primal.training.optimizers import Optimizer
from primal.training.run_folder import FolderError, RunFolder
from tests.training.toy import CONFIG, LONG, die_at, keep_running, run, toy

ROOT = Path(__file__).parents[2]
STEPS = 12  # of CONFIG on the toy: three epochs of four


@pytest.fixture(scope="module")
def uninterrupted() -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    rows, weights = run(None)
    sizes = [row["validation/small"] for row in rows]
    assert max(sizes) > sizes[-1]  # what is kept is not what came last
    return rows, weights


@pytest.fixture(scope="module")
def start() -> Callable[..., BaseProcess]:
    """Return what starts a process that has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.toy"])

    def begin(target: Callable[..., None], *arguments: object) -> BaseProcess:
        process = context.Process(target=target, args=arguments)
        process.start()
        return process

    return begin


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Bit by bit."""
    assert found[0] == expected[0]
    assert found[1].keys() == expected[1].keys()
    for name, tensor in expected[1].items():
        assert torch.equal(found[1][name], tensor), name


# --- kill -9, then --resume ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment",
    [
        "step:1",  # nothing is saved yet
        "step:7",
        f"step:{STEPS}",
        "evaluation:1",
        "evaluation:3",
        "half:4",
        "flush:1",
        "flush:10",
        "rename:2",
        "rename:9",
    ],
)
def test_a_killed_run_resumes_to_the_same_numbers(start, uninterrupted, tmp_path, moment):
    process = start(die_at, tmp_path, moment)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert_same(run(tmp_path, resume=True), uninterrupted)
    assert not list(tmp_path.glob("*.part"))


@pytest.fixture(scope="module")
def long_run() -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    return run(None, config=LONG)


@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_from_outside_resumes(start, long_run, tmp_path, seed):
    process = start(keep_running, tmp_path)
    while not (tmp_path / RunFolder.CHECKPOINT).exists():
        time.sleep(0.001)
        assert process.is_alive()
    time.sleep(random.Random(seed).uniform(0, 0.2))
    assert process.is_alive()
    process.kill()
    process.join()
    # How often a checkpoint is written is nothing a result depends on.
    config = replace(LONG, checkpoint_seconds=60.0)
    assert_same(run(tmp_path, config=config, resume=True), long_run)


def test_the_rows_of_a_lost_epoch_are_not_kept(start, tmp_path, uninterrupted):
    process = start(die_at, tmp_path, "flush:6")
    process.join()
    with (tmp_path / RunFolder.METRICS).open("a") as lines:
        lines.write('{"epoch": 2}\n{"epo')
    run(tmp_path, resume=True)
    rows = RunFolder(tmp_path).metrics()
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in rows] == uninterrupted[0]


def test_a_finished_run_resumes_to_its_result(tmp_path, uninterrupted):
    run(tmp_path)
    assert_same(run(tmp_path, resume=True), uninterrupted)


# --- Ctrl-C and SIGTERM --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", [1, 6, STEPS])
def test_a_signal_saves_and_stops(tmp_path, uninterrupted, number, step):
    def tell(now: int) -> None:
        if now == step:
            os.kill(os.getpid(), number)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match=signal.Signals(number).name) as caught:
        run(tmp_path, toy(before_step=tell), replace(CONFIG, checkpoint_seconds=1000.0))
    assert caught.value.number == number
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    counted: list[int] = []
    assert_same(run(tmp_path, toy(before_step=counted.append), resume=True), uninterrupted)
    assert len(counted) == STEPS - step


def test_a_second_interrupt_ends_at_once(tmp_path):
    def tell(now: int) -> None:
        if now == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, toy(before_step=tell))


def test_a_thread_can_train():
    """Only a process's main thread may listen to signals."""
    found = []
    thread = threading.Thread(target=lambda: found.append(run(None)))
    thread.start()
    thread.join()
    assert len(found) == 1


# --- a folder with a run in it -------------------------------------------------------------------


def test_a_second_run_needs_to_resume(tmp_path):
    run(tmp_path)
    with pytest.raises(FolderError, match=r"holds a run already; go on with --resume auto"):
        run(tmp_path)


@pytest.mark.parametrize(
    ("config", "examples", "message"),
    [
        (replace(CONFIG, learning_rate=0.02), 14, "learning_rate 0.01, not 0.02; resume with"),
        (replace(CONFIG, epochs=4), 14, "epochs 3, not 4"),
        (CONFIG, 15, "examples 14, not 15"),
    ],
)
def test_another_runs_checkpoint_is_refused(tmp_path, config, examples, message):
    run(tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        run(tmp_path, toy(examples), config, resume=True)
    assert str(tmp_path / RunFolder.CHECKPOINT) in str(caught.value)


def test_another_models_checkpoint_is_refused(tmp_path):
    run(tmp_path)
    other = toy()
    assert isinstance(other.model.head, nn.Linear)
    other.model.head = nn.Linear(16, 3, bias=False)
    with pytest.raises(CheckpointError, match=r"another model, which differs in head.bias"):
        run(tmp_path, other, resume=True)


# --- numbers that are none -----------------------------------------------------------------------


def spoilt(at: int, *, gradient: bool = False) -> Problem:
    """Return the toy whose example 5 costs NaN, or has such a gradient, from step ``at`` on."""
    problem, steps = toy(), 0

    def losses(model: Any, batch: Any) -> SampleLosses:
        nonlocal steps
        steps += 1
        found = problem.losses(model, (batch[0], batch[1]))
        if steps < at:
            return found
        bad = batch[2] == 5
        if gradient:  # the square root's, of zero
            task = found.task + torch.where(bad, (found.task * 0).sqrt(), 0.0)
        else:
            task = torch.where(bad, math.nan, found.task)
        return found._replace(task=task)

    return problem._replace(batch=lambda i: (*problem.batch(i), i), losses=losses)


@pytest.mark.parametrize(("wait", "seconds"), [(False, 0.0), (True, 0.0), (True, 1000.0)])
def test_a_loss_that_is_no_number_names_batch_and_step(tmp_path, monkeypatch, wait, seconds):
    """Also where the loop looks at its device now and then only, as at a GPU."""
    if wait:
        monkeypatch.setattr(loop, "SYNCHRONOUS", ())
    order = loop._Loop(toy(), CONFIG, None, None)
    order.epoch = 2
    batch = next(i for i, b in enumerate(order._order().split(4), start=1) if 5 in b.tolist())
    with pytest.raises(
        Diverged,
        match=rf"at step {4 + batch}, batch {batch} of epoch 2, cases case 5; look at their values",
    ):
        run(tmp_path, spoilt(at=5), replace(CONFIG, checkpoint_seconds=seconds))
    if not seconds:  # what is saved is from before
        tensors, state = checkpoint.load(tmp_path / RunFolder.CHECKPOINT)
        assert all(tensor.isfinite().all() for tensor in tensors.values())
        assert (state["epoch"], state["position"]) == (2, batch - 1)


def test_a_gradient_that_is_no_number_names_its_batch():
    with pytest.raises(Diverged, match=r"at step \d, batch \d of epoch 1, cases case \d"):
        train(spoilt(at=1, gradient=True), CONFIG)


# --- what the loop computes ----------------------------------------------------------------------


def test_a_plain_loop_gives_the_same_weights():
    """Written out with torch.optim, torch's clipping, and the loss's mean over a batch."""
    config = TrainingConfig(
        epochs=2, batch_size=4, optimizer="adam", clip=0.5, objective_weight=0.3, warmup=0.5
    )
    _, found = run(None, toy(dropout=0.0), config)
    problem = toy(dropout=0.0)
    parameters = list(problem.model.parameters())
    optimizer = torch.optim.Adam(parameters)
    clipped = 0
    for step in range(8):
        order = loop._Loop(problem, config, None, None)
        order.epoch = 1 + step // 4
        index = order._order().split(4)[step % 4]
        task, ksvd, _ = problem.losses(problem.model, problem.batch(index))
        optimizer.zero_grad()
        (task.mean() + 0.3 * ksvd.mean()).backward()
        clipped += float(nn.utils.clip_grad_norm_(parameters, 0.5)) > 0.5
        rising = min(1.0, (step + 1) / 4)
        falling = 0.5 * (1 + math.cos(math.pi * max(0, step - 4) / 4))
        optimizer.param_groups[0]["lr"] = 1e-3 * rising * falling
        optimizer.step()
    assert clipped
    for name, tensor in problem.model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)


def test_every_epoch_sees_every_example_once_in_its_own_order():
    state = loop._Loop(toy(), CONFIG, None, None)
    orders = []
    for state.epoch in (1, 2):
        orders.append(state._order().tolist())
        assert sorted(orders[-1]) == list(range(14))
    assert orders[0] != orders[1]


def test_the_rate_rises_then_falls_to_zero():
    config = TrainingConfig(learning_rate=1.0, warmup=0.1)
    rates = [config.rate(step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == 0.0
    constant = replace(config, schedule="constant")
    assert {constant.rate(step, 100) for step in range(10, 100)} == {1.0}


def test_the_best_epoch_is_kept():
    scores = iter([0.1, 0.9, 0.5])
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append({n: t.clone() for n, t in model.state_dict().items()})
        return {"validation/accuracy": next(scores)}

    config = replace(CONFIG, select="validation/accuracy")
    _, weights = run(None, toy()._replace(evaluate=evaluate), config)
    assert_same(([], weights), ([], seen[1]))


def test_a_smaller_loss_is_better():
    scores = iter([0.9, 0.1, 0.5])
    seen = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        seen.append({n: t.clone() for n, t in model.state_dict().items()})
        return {"validation/loss": next(scores)}

    config = replace(CONFIG, select="validation/loss")
    _, weights = run(None, toy()._replace(evaluate=evaluate), config)
    assert_same(([], weights), ([], seen[1]))


def test_the_average_is_evaluated_and_kept():
    trained = []

    def evaluate(model: nn.Module) -> dict[str, float]:
        trained.append(next(model.parameters()).detach().clone())
        return {}

    config = replace(CONFIG, select=None, average=0.5)
    _, averaged = run(None, toy()._replace(evaluate=evaluate), config)
    _, last = run(None, toy(), replace(config, average=0.0))
    name = next(iter(averaged))
    assert torch.equal(averaged[name], trained[-1])
    assert not torch.equal(averaged[name], last[name])


def test_an_unknown_metric_to_select_by_lists_those_there_are():
    with pytest.raises(ValueError, match=r"Did you mean 'validation/accuracy'"):
        train(toy(), replace(CONFIG, select="validation/acuracy"))


def test_the_callers_random_numbers_are_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    problem = toy()
    torch.manual_seed(3)
    train(problem, CONFIG)
    assert torch.equal(torch.rand(2), expected)


def test_a_watcher_sees_every_epoch_and_where_it_stands(monkeypatch):
    monkeypatch.setattr(loop, "SHOW_SECONDS", 0.0)

    class Watcher:
        def __init__(self) -> None:
            self.steps: list[tuple[int, int, int]] = []
            self.rows: list[dict[str, Any]] = []

        def step(self, epoch: int, step: int, steps: int, shown: Shown) -> None:
            assert math.isfinite(shown.loss)
            assert shown.seconds_left >= 0
            self.steps.append((epoch, step, steps))

        def epoch(self, row: dict[str, Any]) -> None:
            self.rows.append(row)

    watcher = Watcher()
    rows = train(toy(), CONFIG, watch=watcher)
    assert watcher.steps == [(e, s, 4) for e in (1, 2, 3) for s in (1, 2, 3, 4)]
    assert watcher.rows == rows


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("epochs", 0, "positive integer, got 0"),
        ("learning_rate", 0.0, "above 0, got 0.0"),
        ("clip", 0.0, "above 0, or None"),
        ("average", 1.0, "from 0 to below 1, got 1.0"),
        ("warmup", 1.5, "from 0 to 1, got 1.5"),
        ("optimizer", "adamW", "must be one of"),
        ("precision", "float16", "must be one of"),
    ],
)
def test_bad_settings_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message) as caught:
        TrainingConfig(**{field: value})
    assert field in str(caught.value)


# --- nothing waits -------------------------------------------------------------------------------


class Reads(TorchDispatchMode):
    """Count the times that a value is read from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_step_reads_from_its_device(monkeypatch):
    """A GPU's step would wait there; tests/training/test_gpu.py lets CUDA itself say so."""
    monkeypatch.setattr(loop, "SYNCHRONOUS", ())
    # On a CPU, the fused optimizer and the blocked attention read: neither runs on a GPU.
    monkeypatch.setattr(Optimizer, "step", lambda _: None)

    def reads(steps: int) -> int:
        model, x = nn.Linear(3, 2), torch.randn(steps, 3)

        def losses(model: nn.Module, batch: Tensor) -> SampleLosses:
            task = model(batch).square().sum(1)
            return SampleLosses(task, task[:, None], task)

        problem = Problem(model, steps, lambda i: x[i], losses, lambda _: {}, str)
        with Reads() as counted:
            train(problem, TrainingConfig(epochs=1, batch_size=1, average=0.9))
        return counted.count

    assert reads(3) == reads(30)


# --- without extras -----------------------------------------------------------------------------


def test_training_needs_torch_and_numpy_alone():
    script = """
import sys
for name in ("aeon", "pandas", "pyarrow", "rich", "safetensors", "scipy", "sklearn", "tyro"):
    sys.modules[name] = None
import numpy as np
from primal.data.series import SeriesSet
from primal.recipes import uea
from primal.training.loop import TrainingConfig
from primal.training.series import SeriesModelConfig, fit_series
data = SeriesSet((np.ones((4, 2)), np.zeros((7, 2))), np.array(["a", "b"]), ("0", "1"))
model = uea.paper("JapaneseVowels", "primalformer").model
_, rows = fit_series(model, data, TrainingConfig(epochs=1), device="cpu")
assert rows[0]["train/loss"] > 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


# --- torchrun ------------------------------------------------------------------------------------


def test_two_processes_train_as_one(tmp_path):
    """The last batch holds one example: the second process has none of its own."""
    sizes = examples, batch_size = 13, 6
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc-per-node=2", "-m", "tests.training.toy", tmp_path, *map(str, sizes)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    config = replace(CONFIG, batch_size=batch_size)
    rows, weights = run(None, toy(examples, dropout=0.0), config)
    for rank in (0, 1):
        found, state = checkpoint.load(tmp_path / f"rank{rank}")
        torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-5)
        for mine, one in zip(state["rows"], rows, strict=True):
            assert mine == pytest.approx(one, rel=1e-4, abs=1e-5)
