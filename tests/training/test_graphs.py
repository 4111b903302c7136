"""When a step is recorded and when replayed; that a replay is the step, test_gpu.py says."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import Tensor

from primal.training.graphs import EAGER_STEPS, Recorder


class Stream:
    """Stands for a CUDA stream."""

    device = torch.device("cpu")

    def __init__(self, *_: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class Graph:
    """Stands for a CUDA graph: recording runs nothing, a replay runs the step on its place."""

    recording: "Graph | None" = None

    def __init__(self) -> None:
        self.step: tuple[Tensor, float] | None = None

    def replay(self) -> None:
        ran.append(("replay", self.step[0].tolist(), self.step[1]))


ran: list[tuple[str, list[int], float]] = []


@contextmanager
def record(graph: Graph, **_: object):
    Graph.recording = graph
    yield
    Graph.recording = None


def step(index: Tensor, weight: float) -> None:
    if Graph.recording is not None:
        Graph.recording.step = index, weight
    else:
        ran.append(("eager", index.tolist(), weight))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    ran.clear()
    for name, stand_in in (
        ("Stream", Stream),
        ("CUDAGraph", Graph),
        ("graph", record),
        ("stream", nullcontext),
        ("current_stream", Stream),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return Recorder(step, torch.device("cpu"))


def test_each_size_is_recorded_once_and_every_step_is_taken(recorder):
    indices = [torch.arange(size) + 10 * i for i in range(9) for size in (3, 2)]
    for index in indices:
        recorder(index, 1 / len(index))
    assert [(found, weight) for _, found, weight in ran] == [
        (index.tolist(), 1 / len(index)) for index in indices
    ]
    assert [how for how, *_ in ran] == ["eager"] * 2 * EAGER_STEPS + ["replay"] * 8
    assert set(recorder.recorded) == {2, 3}


def test_the_batch_recorded_with_is_not_written_over(recorder):
    first = torch.tensor([1, 2])
    for _ in range(EAGER_STEPS + 1):
        recorder(first, 0.5)
    recorder(torch.tensor([3, 4]), 0.5)
    assert first.tolist() == [1, 2]
    assert ran[-1] == ("replay", [3, 4], 0.5)
