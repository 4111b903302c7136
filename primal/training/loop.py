"""The one training loop: any model, any examples; resumable to the same numbers.

An epoch is a fixed permutation of the examples, drawn from the seed and the epoch's number alone. On
a GPU, a step is captured once as a CUDA graph and replayed; nothing waits for the device in between.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from primal.training import checkpoint, distributed
from primal.training.run_folder import RunFolder

Optimizer = Literal["adamw", "adam", "radam"]
Schedule = Literal["cosine", "constant"]
EAGER_STEPS = 3  # of each batch size, before its graph is captured: they initialise what it needs


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained."""

    epochs: int = 100
    batch_size: int = 16
    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: Schedule = "cosine"
    """Cosine falls to zero at the last step."""
    warmup: float = 0.05
    """Part of the steps over which the learning rate rises."""
    objective_weight: float = 0.1
    """η: what the KSVD objective J² weighs beside the task's loss."""
    clip: float | None = 4.0
    """Largest norm of the gradient."""
    average: float = 0.0
    """Decay of a running average of the weights, which is what is evaluated and kept; 0 is none."""
    select: str | None = None
    """Metric whose best epoch is kept, for instance validation/accuracy; None keeps the last."""
    seed: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    checkpoint_seconds: float = 10.0
    """Least time between checkpoints, which are written when an epoch ends."""


class SampleLosses(NamedTuple):
    """What a batch costs, per sample."""

    task: Tensor  # (B,)
    ksvd: Tensor  # (B,), mean over the layers of J²; zero without primal layers
    score: Tensor  # (B,), what to show: 1 where right, or the error


class Problem(NamedTuple):
    """What to train, and on what. Indices and batches live on the model's device."""

    model: nn.Module
    examples: int
    batch: Callable[[Tensor], Any]  # indices (B,) -> what losses reads
    losses: Callable[[nn.Module, Any], SampleLosses]
    evaluate: Callable[[nn.Module], dict[str, float]]  # after each epoch
    name: Callable[[int], str]  # of an example, for messages


class Watcher(Protocol):
    """Who looks on."""

    def step(self, epoch: int, step: int, steps: int, shown: "Shown") -> None: ...

    def epoch(self, row: dict[str, Any]) -> None: ...


class Shown(NamedTuple):
    """Means over the epoch so far."""

    loss: float
    ksvd: float
    score: float
    samples_per_second: float
    seconds_left: float


class Interrupted(Exception):
    """Ctrl-C or SIGTERM came; the state is saved."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Diverged(ValueError):
    """The loss is no longer a number."""


def train(
    problem: Problem,
    config: TrainingConfig,
    folder: RunFolder | None = None,
    *,
    resume: bool = False,
    watch: Watcher | None = None,
) -> list[dict[str, Any]]:
    """Train, and leave in the model what to keep: the best epoch, the average, or the last weights.

    Returns a row of metrics for each epoch.
    """
    loop = _Loop(problem, config, folder, watch)
    if resume:
        loop.restore()
    with loop.listening():
        loop.run()
    return loop.rows


class _Loop:
    def __init__(
        self,
        problem: Problem,
        config: TrainingConfig,
        folder: RunFolder | None,
        watch: Watcher | None,
    ) -> None:
        self.problem, self.config, self.folder, self.watch = problem, config, folder, watch
        self.model = problem.model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.device = self.parameters[0].device
        self.rate = torch.tensor(config.learning_rate, device=self.device)
        self.optimizer = _optimizer(self.parameters, config, self.rate, self.device)
        self.averaged = [p.detach().clone() for p in self.parameters] if config.average else None
        self.best: list[Tensor] | None = None
        self.best_value = -math.inf
        self.totals = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.bad_step = torch.full((), -1, device=self.device)
        self.steps = torch.zeros((), dtype=torch.int64, device=self.device)
        self.epoch, self.position, self.seconds = 1, 0, 0.0
        self.rows: list[dict[str, Any]] = []
        self.graphs: dict[int, _Graph] = {}
        self.seen_sizes: dict[int, int] = {}
        self.signal: int | None = None
        self.per_epoch = -(-problem.examples // config.batch_size)
        self.saved = time.monotonic()

    def run(self) -> None:
        started = time.monotonic() - self.seconds
        while self.epoch <= self.config.epochs:
            self._train_epoch(started)
            row = self._close_epoch(started)
            self.rows.append(row)
            if distributed.is_first():
                if self.folder is not None:
                    self.folder.append_metrics(row)
                if self.watch is not None:
                    self.watch.epoch(row)
            self.epoch, self.position = self.epoch + 1, 0
            self.seconds = time.monotonic() - started
            last = self.epoch > self.config.epochs
            if last or time.monotonic() - self.saved >= self.config.checkpoint_seconds:
                self.save()
        self._put_back(self._kept())

    def _train_epoch(self, started: float) -> None:
        self.model.train()
        batches = self._order().split(self.config.batch_size)
        shown_at = begun = time.monotonic()
        begun_at = self.position
        while self.position < len(batches):
            self._set_rate()
            self._step(*distributed.share(batches[self.position]))
            self.position += 1
            now = time.monotonic()
            if self.device.type == "cpu":
                self._check_loss()
            if self.watch is not None and now - shown_at > 0.2:
                shown_at = now
                done = self.position - begun_at
                rate = done / (now - begun)
                left = (self.config.epochs - self.epoch + 1) * self.per_epoch - self.position
                self.watch.step(
                    self.epoch,
                    self.position,
                    self.per_epoch,
                    Shown(*self._means(), rate * self.config.batch_size, left / rate),
                )
            if self.signal is not None:
                self.seconds = now - started
                self.save()
                raise Interrupted(self.signal)

    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.problem.examples, generator=generator).to(self.device)

    def _set_rate(self) -> None:
        step = (self.epoch - 1) * self.per_epoch + self.position
        steps = self.config.epochs * self.per_epoch
        rising = max(1, round(self.config.warmup * steps))
        factor = min(1.0, (step + 1) / rising)
        if self.config.schedule == "cosine":
            part = max(0.0, (step - rising) / max(1, steps - rising))
            factor *= 0.5 * (1 + math.cos(math.pi * part))
        if self.device.type == "cuda":
            self.rate.fill_(self.config.learning_rate * factor)  # captured graphs read it there
        else:
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.learning_rate * factor

    # --- one step ------------------------------------------------------------------------------

    def _step(self, index: Tensor, weight: Tensor) -> None:
        if self.device.type != "cuda" or distributed.size() > 1:
            self._compute(index, weight)
            return
        size = len(index)
        if size in self.graphs:
            self.graphs[size].replay(index, weight)
            return
        self.seen_sizes[size] = self.seen_sizes.get(size, 0) + 1
        if self.seen_sizes[size] > EAGER_STEPS:
            self.graphs[size] = _Graph(self._compute, index, weight)
            self.graphs[size].replay(index, weight)
            return
        # Off the main stream, as what is captured later must be.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._compute(index, weight)
        torch.cuda.current_stream().wait_stream(stream)

    def _compute(self, index: Tensor, weight: Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        batch = self.problem.batch(index)
        low = self.config.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16) if low else nullcontext():
            losses = self.problem.losses(self.model, batch)
        loss = (weight * (losses.task + self.config.objective_weight * losses.ksvd)).sum()
        loss.backward()
        distributed.sum_gradients(self.parameters)
        if self.config.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step()
        with torch.no_grad():
            self._average()
            counted = (weight > 0).double()
            parts = (losses.task, losses.ksvd, losses.score, torch.ones_like(losses.task))
            self.totals += torch.stack([(counted * part.detach()).sum() for part in parts])
            bad = ~torch.isfinite(loss) & (self.bad_step < 0)
            self.bad_step.copy_(torch.where(bad, self.steps, self.bad_step))
            self.steps += 1

    def _average(self) -> None:
        if self.averaged is None:
            return
        # At first a plain mean: what was there before training fades as soon as it can.
        decay = torch.clamp((1.0 + self.steps) / (10.0 + self.steps), max=self.config.average)
        kept = torch._foreach_sub(self.averaged, self.parameters)
        torch._foreach_mul_(kept, decay.float())
        torch._foreach_copy_(self.averaged, torch._foreach_add(self.parameters, kept))

    def _means(self) -> list[float]:
        loss, ksvd, score, count = distributed.total(self.totals).tolist()
        return [value / max(count, 1.0) for value in (loss, ksvd, score)]

    def _check_loss(self) -> None:
        bad = int(self.bad_step)
        if bad < 0:
            return
        epoch, position = bad // self.per_epoch + 1, bad % self.per_epoch
        names = []
        if epoch == self.epoch:
            batch = self._order().split(self.config.batch_size)[position].tolist()
            names = [self.problem.name(i) for i in batch]
        raise Diverged(
            f"the loss is not a number at step {bad + 1}, batch {position + 1} of epoch {epoch} "
            f"(cases {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}); look at these "
            "cases, lower --training.learning-rate, or --training.objective-weight."
        )

    # --- the end of an epoch ---------------------------------------------------------------------

    def _close_epoch(self, started: float) -> dict[str, Any]:
        loss, ksvd, score = self._means()
        self._check_loss()
        self.totals.zero_()
        with self._evaluated():
            measured = self.problem.evaluate(self.model)
        if self.config.select is not None:
            if self.config.select not in measured:
                raise ValueError(
                    f"select must be one of {sorted(measured)}, got {self.config.select!r}."
                )
            value = measured[self.config.select]
            value = -value if self.config.select.endswith(("loss", "error")) else value
            if value > self.best_value:
                self.best_value = value
                source = self.parameters if self.averaged is None else self.averaged
                self.best = [p.detach().clone() for p in source]
        return {
            "epoch": self.epoch,
            "train/loss": loss,
            "train/ksvd": ksvd,
            "train/score": score,
            **measured,
            "seconds": round(time.monotonic() - started, 3),
        }

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        """Put the averaged weights in, for a while."""
        self.model.eval()
        with torch.no_grad():
            if self.averaged is None:
                yield
                return
            current = [p.detach().clone() for p in self.parameters]
            self._put_back(self.averaged)
            yield
            self._put_back(current)

    def _kept(self) -> list[Tensor]:
        if self.best is not None:
            return self.best
        return [p.detach() for p in self.parameters] if self.averaged is None else self.averaged

    def _put_back(self, weights: list[Tensor]) -> None:
        with torch.no_grad():
            for p, weight in zip(self.parameters, weights, strict=True):
                p.copy_(weight)

    # --- what a killed run resumes from ----------------------------------------------------------

    def save(self) -> None:
        self.saved = time.monotonic()
        if self.folder is None or not distributed.is_first():
            return
        tensors = {f"model/{n}": t for n, t in self.model.state_dict().items()}
        for i, p in enumerate(self.parameters):
            for name, value in self.optimizer.state.get(p, {}).items():
                tensors[f"optimizer/{i}/{name}"] = torch.as_tensor(value)
        for group, weights in (("average", self.averaged), ("best", self.best)):
            for i, weight in enumerate(weights or ()):
                tensors[f"{group}/{i}"] = weight
        tensors["random/cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.device)
        tensors["totals"], tensors["steps"] = self.totals, self.steps
        state = {
            "epoch": self.epoch,
            "position": self.position,
            "seconds": self.seconds,
            "best_value": self.best_value if self.best is not None else None,
            "rows": self.rows,
        }
        checkpoint.save(self.folder / RunFolder.CHECKPOINT, tensors, state)

    def restore(self) -> None:
        """Go on from the folder's checkpoint; without one, from the start."""
        if self.folder is None or not (self.folder / RunFolder.CHECKPOINT).exists():
            return
        tensors, state = checkpoint.load(self.folder / RunFolder.CHECKPOINT)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = tensor
        self.model.load_state_dict(groups["model"])
        for name, value in groups.get("optimizer", {}).items():
            number, _, what = name.partition("/")
            p = self.parameters[int(number)]
            on_host = what == "step" and self.device.type == "cpu"
            self.optimizer.state[p][what] = value if on_host else value.to(self.device)
        if self.averaged is not None:
            self.averaged = self._listed(groups["average"])
        if "best" in groups:
            self.best, self.best_value = self._listed(groups["best"]), state["best_value"]
        torch.set_rng_state(groups["random"]["cpu"])
        if "cuda" in groups["random"]:
            torch.cuda.set_rng_state(groups["random"]["cuda"], self.device)
        self.totals.copy_(groups["totals"][""])
        self.steps.copy_(groups["steps"][""])
        self.epoch, self.position = state["epoch"], state["position"]
        self.seconds, self.rows = state["seconds"], state["rows"]
        if distributed.is_first():
            self.folder.keep_metrics(self.epoch - 1)

    def _listed(self, group: dict[str, Tensor]) -> list[Tensor]:
        return [group[str(i)].to(self.device) for i in range(len(self.parameters))]

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the run after its step, saved."""

        def note(number: int, frame: FrameType | None) -> None:
            self.signal = number

        try:
            before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # only the main thread may listen
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class _Graph:
    """A captured step: replayed for batches of one size."""

    def __init__(
        self, compute: Callable[[Tensor, Tensor], None], index: Tensor, weight: Tensor
    ) -> None:
        self.index, self.weight = index.clone(), weight.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            compute(self.index, self.weight)

    def replay(self, index: Tensor, weight: Tensor) -> None:
        self.index.copy_(index)
        self.weight.copy_(weight)
        self.graph.replay()


def _optimizer(
    parameters: list[nn.Parameter], config: TrainingConfig, rate: Tensor, device: torch.device
) -> torch.optim.Optimizer:
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "radam": torch.optim.RAdam}
    # Vectors (biases, norms, Λ) are scales and offsets: nothing draws them to zero.
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    captured = device.type == "cuda"
    return kinds[config.optimizer](
        [group for group in groups if group["params"]],
        lr=rate if captured else config.learning_rate,
        foreach=True,
        capturable=captured,
    )
