"""CUDA graphs: a training step is recorded once for each batch size, then replayed."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

EAGER_STEPS = 5  # of each size, before it is recorded: they set up what a recording needs


class Recorder:
    """Calls ``step(index, weight)``, or replays what it recorded of it on a GPU.

    What the step reads and changes besides its index must stay where it is in memory. Its random
    numbers are drawn anew at each replay, from the generator's seed at that moment.
    """

    def __init__(self, step: Callable[[Tensor, float], None], device: torch.device) -> None:
        self.step = step
        self.seen: Counter[int] = Counter()
        self.recorded: dict[int, tuple[Tensor, torch.cuda.CUDAGraph]] = {}
        # What is recorded, and what warms up for it, runs off the main stream.
        self.stream = torch.cuda.Stream(device)

    def __call__(self, index: Tensor, weight: float) -> None:
        size = len(index)
        if size not in self.recorded:
            self.seen[size] += 1
            if self.seen[size] <= EAGER_STEPS:
                self._warm_up(index, weight)
                return
            self.recorded[size] = self._record(index.clone(), weight)
        place, graph = self.recorded[size]
        place.copy_(index)
        graph.replay()

    def _warm_up(self, index: Tensor, weight: float) -> None:
        main = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            self.step(index, weight)
        main.wait_stream(self.stream)

    def _record(self, index: Tensor, weight: float) -> tuple[Tensor, torch.cuda.CUDAGraph]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.step(index, weight)
        return index, graph
