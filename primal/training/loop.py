"""The one training loop: any model, any examples; resumable to the same numbers.

The order of an epoch's examples and the randomness of a step are drawn from the seed and their
number alone, so that what a killed run must save is small. On a GPU a step is recorded once as a
CUDA graph and replayed; nothing waits for the device in between.
"""

import hashlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from primal.errors import require_choice, require_positive
from primal.training import checkpoint, distributed, optimizers
from primal.training.checkpoint import CheckpointError
from primal.training.graphs import Recorder
from primal.training.optimizers import Average, Optimizer
from primal.training.run_folder import FolderError, RunFolder
from primal.training.signals import Interrupted, Signals
from primal.training.tally import SampleLosses, Tally

__all__ = ["Diverged", "Interrupted", "Problem", "SampleLosses", "Shown", "TrainingConfig", "train"]

SHOW_SECONDS = 0.2  # between two looks at the losses, for each of which a GPU must be waited for
SYNCHRONOUS = ("cpu",)  # devices whose numbers can be read without waiting
AGREE_STEPS = 16  # between two exchanges of wishes, where each makes the host wait for its GPU


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained."""

    epochs: int = 100
    batch_size: int = 16
    optimizer: optimizers.Name = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    schedule: Literal["cosine", "constant"] = "cosine"
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
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """tf32 rounds what a GPU multiplies to 10 bits, bfloat16 what it stores between layers, too."""
    graphs: bool = True
    """On a GPU, record a step once and replay it; the model must not wait for the GPU in it."""
    checkpoint_seconds: float = 10.0
    """Time between checkpoints; one more is written when the run ends or is told to stop."""

    def __post_init__(self) -> None:
        require_positive("epochs", self.epochs)
        require_positive("batch_size", self.batch_size)
        for name, given, valid, remedy in (
            ("learning_rate", self.learning_rate, self.learning_rate > 0, "above 0"),
            ("weight_decay", self.weight_decay, self.weight_decay >= 0, "0 or more"),
            ("warmup", self.warmup, 0 <= self.warmup <= 1, "a part, from 0 to 1"),
            ("objective_weight", self.objective_weight, self.objective_weight >= 0, "0 or more"),
            (
                "clip",
                self.clip,
                self.clip is None or self.clip > 0,
                "above 0, or None for no limit",
            ),
            ("average", self.average, 0 <= self.average < 1, "a decay, from 0 to below 1"),
        ):
            if not valid:
                raise ValueError(f"{name} must be {remedy}, got {given}.")
        require_choice("optimizer", self.optimizer, ("adamw", "adam", "radam"))
        require_choice("schedule", self.schedule, ("cosine", "constant"))
        require_choice("precision", self.precision, ("float32", "tf32", "bfloat16"))

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rising = max(1, round(self.warmup * steps))
        factor = min(1.0, (step + 1) / rising)
        if self.schedule == "cosine":
            part = max(0.0, (step - rising) / max(1, steps - rising))
            factor *= 0.5 * (1 + math.cos(math.pi * part))
        return self.learning_rate * factor


class Problem(NamedTuple):
    """What to train, and on what. Indices and batches live on the model's device."""

    model: nn.Module
    examples: int
    batch: Callable[[Tensor], Any]  # indices (B,) -> what losses reads
    losses: Callable[[nn.Module, Any], SampleLosses]
    evaluate: Callable[[nn.Module], dict[str, float]]  # after each epoch
    name: Callable[[int], str]  # of an example, for messages


class Shown(NamedTuple):
    """Means over the epoch so far."""

    loss: float
    ksvd: float
    score: float
    samples_per_second: float
    seconds_left: float


class Watcher(Protocol):
    """Who looks on."""

    def step(self, epoch: int, step: int, steps: int, shown: Shown) -> None: ...

    def epoch(self, row: dict[str, Any]) -> None: ...


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

    Returns a row of metrics for each epoch. The caller's random numbers are left as they were.
    """
    loop = _Loop(problem, config, folder, watch)
    devices = [loop.device] if loop.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _products(config.precision), loop.signals.noted():
        loop.begin(resume=resume)
        loop.run()
    return loop.rows


class _Loop:
    """A run: its state is the model, the optimizer, the average, the best epoch, and counts."""

    def __init__(
        self,
        problem: Problem,
        config: TrainingConfig,
        folder: RunFolder | None,
        watch: Watcher | None,
    ) -> None:
        self.problem, self.config, self.folder = problem, config, folder
        self.watch = watch if distributed.is_first() else None
        self.model = problem.model
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.buffers = list(self.model.buffers())
        self.device = self.parameters[0].device
        self.optimizer = Optimizer(self.parameters, config.optimizer, config.weight_decay)
        self.average = Average(self.parameters, config.average) if config.average else None
        self.best: list[Tensor] | None = None
        self.best_value = -math.inf
        self.tally = Tally(problem.examples, self.device)
        self.per_epoch = -(-problem.examples // config.batch_size)
        self.epoch, self.position = 1, 0
        self.rows: list[dict[str, Any]] = []
        self.signals = Signals()
        self.started = self.saved = time.monotonic()
        self.step = self.compute
        if self.device.type == "cuda" and config.graphs and distributed.size() == 1:
            self.step = Recorder(self.compute, self.device)

    def begin(self, *, resume: bool) -> None:
        """Go on from the folder's checkpoint, or from the start where there is none."""
        folder = self.folder
        if folder is not None:
            path = folder / RunFolder.CHECKPOINT
            if path.exists() and not resume:
                raise FolderError(
                    f"{folder.path} holds a run already; go on with --resume auto, or give another "
                    "--folder."
                )
            if path.exists():
                self._restore(path)
            distributed.by_first(lambda: folder.write_metrics(self.rows))
        distributed.copy_first([*self.parameters, *self.buffers])

    def run(self) -> None:
        while self.epoch <= self.config.epochs:
            self._train_epoch()
            self._close_epoch()
            self.epoch, self.position = self.epoch + 1, 0
            self._save_if_wished(last=self.epoch > self.config.epochs)
        self._put_in(self._kept() if self.best is None else self.best)

    def _train_epoch(self) -> None:
        self.model.train()
        batches = self._order().split(self.config.batch_size)
        begun_at = self.position
        begun = shown = time.monotonic()
        # Under torchrun the processes must agree first, for which a GPU must be waited for.
        often = AGREE_STEPS if self.device.type == "cuda" and distributed.size() > 1 else 1
        while self.position < len(batches):
            self._prepare()
            self.step(*distributed.share(batches[self.position]))
            self.position += 1
            if self.device.type in SYNCHRONOUS:
                self._check_loss()
            now = time.monotonic()
            if self.watch is not None and now - shown > SHOW_SECONDS:
                self._show(self.watch, (self.position - begun_at) / (now - begun))
                shown = now
            if self.position % often == 0:
                self._save_if_wished()

    def _order(self) -> Tensor:
        generator = torch.Generator().manual_seed(_seed("order", self.config.seed, self.epoch))
        return torch.randperm(self.problem.examples, generator=generator).to(self.device)

    @property
    def _done(self) -> int:
        """How many steps were taken."""
        return (self.epoch - 1) * self.per_epoch + self.position

    # --- one step ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Set what a recorded step finds: its learning rate and its random numbers."""
        done = self._done
        self.optimizer.prepare(
            self.config.rate(done, self.config.epochs * self.per_epoch), done + 1
        )
        seed = _seed("step", self.config.seed, done, distributed.rank())
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def compute(self, index: Tensor, weight: float) -> None:
        """Take a step on a batch, of whose mean each sample here weighs ``weight``."""
        self.optimizer.zero_grad()
        batch = self.problem.batch(index)
        low = self.config.precision == "bfloat16"
        precision = torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)
        with precision if low else nullcontext():
            found = self.problem.losses(self.model, batch)
        losses = found.task
        if found.ksvd.shape[1]:
            losses = losses + self.config.objective_weight * found.ksvd.mean(1)
        (weight * losses.sum()).backward()
        with torch.no_grad():
            sums = found.sums() if weight else torch.zeros_like(found.sums())
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            distributed.add_up([*gradients, sums])
            clip, norm = self.config.clip, None
            if clip is not None:
                norm = nn.utils.clip_grad_norm_(self.parameters, clip)
            self.optimizer.step()
            if self.average is not None:
                self.average.update(self.tally.steps)
            self.tally.add(index, losses, sums, norm)

    def _check_loss(self) -> None:
        bad = int(self.tally.bad_step)
        if bad < 0:
            return
        position = bad % self.per_epoch
        batch = self._order().split(self.config.batch_size)[position]
        found = self.tally.bad_examples[batch]
        names = [self.problem.name(i) for i in (batch[found] if found.any() else batch).tolist()]
        raise Diverged(
            f"the loss or its gradient is not a finite number at step {bad + 1}, batch "
            f"{position + 1} of epoch {self.epoch}, cases {', '.join(names[:8])}"
            f"{', ...' if len(names) > 8 else ''}; look at their values, lower "
            "--training.learning-rate, or --training.objective-weight."
        )

    def _show(self, watch: Watcher, rate: float) -> None:
        means = self.tally.means()
        shown = Shown(
            loss=means.loss,
            ksvd=means.objective,
            score=means.score,
            samples_per_second=rate * self.config.batch_size,
            seconds_left=(self.config.epochs * self.per_epoch - self._done) / rate,
        )
        watch.step(self.epoch, self.position, self.per_epoch, shown)

    # --- the end of an epoch ---------------------------------------------------------------------

    def _close_epoch(self) -> None:
        self._check_loss()
        means = self.tally.means()
        self.tally.begin_epoch()
        distributed.copy_first(self.buffers)
        with self._evaluated():
            measured = self.problem.evaluate(self.model)
        self._select(measured)
        row = {
            "epoch": self.epoch,
            "train/loss": means.loss,
            "train/ksvd": means.objective,
            **{f"train/ksvd/{layer}": value for layer, value in enumerate(means.ksvd, start=1)},
            "train/score": means.score,
            **measured,
            "seconds": round(time.monotonic() - self.started, 3),
        }
        self.rows.append(row)
        if (folder := self.folder) is not None:
            distributed.by_first(lambda: folder.append_metrics(row))
        if self.watch is not None:
            self.watch.epoch(row)

    def _select(self, measured: dict[str, float]) -> None:
        """Keep the weights if no epoch before was better."""
        name = self.config.select
        if name is None:
            return
        require_choice("select", name, measured)
        value = -measured[name] if name.endswith(("loss", "error")) else measured[name]
        if value > self.best_value:
            self.best_value = value
            self.best = [tensor.detach().clone() for tensor in self._kept()]

    @contextmanager
    def _evaluated(self) -> Iterator[None]:
        """Put in the weights that would be kept, for a while."""
        self.model.eval()
        current = [tensor.detach().clone() for tensor in (*self.parameters, *self.buffers)]
        with torch.no_grad():
            self._put_in(self._kept())
            yield
            self._put_in(current)

    def _kept(self) -> list[Tensor]:
        """Return what this epoch has to offer: weights, then buffers."""
        weights = self.parameters if self.average is None else self.average.weights
        return [*weights, *self.buffers]

    @torch.no_grad()
    def _put_in(self, tensors: list[Tensor]) -> None:
        for place, tensor in zip((*self.parameters, *self.buffers), tensors, strict=True):
            place.copy_(tensor)

    # --- what a killed run resumes from ----------------------------------------------------------

    def _save_if_wished(self, *, last: bool = False) -> None:
        """Save when it is time, or to stop; all processes decide alike."""
        due = last or time.monotonic() - self.saved >= self.config.checkpoint_seconds
        due, stop = distributed.any_of(due, self.signals.received is not None)
        if due or stop:
            self._check_loss()
            if self.folder is not None:
                distributed.by_first(self._save)
            self.saved = time.monotonic()
        if stop:
            raise Interrupted(self.signals.received or signal.SIGTERM)

    def _save(self) -> None:
        assert self.folder is not None
        tensors = {f"model/{name}": tensor for name, tensor in self.model.state_dict().items()}
        tensors |= {f"optimizer/{name}": t for name, t in self.optimizer.state().items()}
        lists = {"average": self.average.weights if self.average else [], "best": self.best or []}
        tensors |= {f"{key}/{i}": t for key, listed in lists.items() for i, t in enumerate(listed)}
        if self.tally.sums is not None:
            tensors["tally/"] = self.tally.sums
        state = {
            "settings": self._settings(),
            "epoch": self.epoch,
            "position": self.position,
            "seconds": time.monotonic() - self.started,
            "best_value": self.best_value if self.best is not None else None,
            "rows": self.rows,
        }
        checkpoint.save(self.folder / RunFolder.CHECKPOINT, tensors, state)

    def _restore(self, path: Path) -> None:
        tensors, state = checkpoint.load(path)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, rest = name.partition("/")
            groups.setdefault(group, {})[rest] = tensor
        self._require_same(path, groups.get("model", {}), state.get("settings", {}))
        self.model.load_state_dict(groups["model"])
        self.optimizer.load_state(groups.get("optimizer", {}))
        if self.average is not None:
            self.average.weights = self._listed(groups["average"])
        if "best" in groups:
            self.best, self.best_value = self._listed(groups["best"]), state["best_value"]
        if "tally" in groups:
            self.tally.sums = groups["tally"][""].to(self.device)
        self.epoch, self.position = state["epoch"], state["position"]
        self.tally.steps.fill_(self._done)
        self.rows = state["rows"]
        self.started = time.monotonic() - state["seconds"]

    def _require_same(self, path: Path, model: dict[str, Tensor], settings: dict[str, Any]) -> None:
        """Raise unless the checkpoint is of this model, these settings, as many examples."""
        different = [
            f"{name} {settings.get(name)}, not {value}"
            for name, value in self._settings().items()
            if settings.get(name) != value
        ]
        mine = {name: tensor.shape for name, tensor in self.model.state_dict().items()}
        theirs = {name: tensor.shape for name, tensor in model.items()}
        if mine != theirs:
            names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            different.append(f"another model, which differs in {', '.join(names[:3])}")
        if different:
            raise CheckpointError(
                f"{path} is of another run: {'; '.join(different)}; resume with the settings it "
                "was made with, or give another --folder."
            )

    def _settings(self) -> dict[str, Any]:
        """Return what must be as it was for a run to go on to the same numbers."""
        settings = {**asdict(self.config), "examples": self.problem.examples}
        return {n: v for n, v in settings.items() if n not in ("checkpoint_seconds", "graphs")}

    def _listed(self, group: dict[str, Tensor]) -> list[Tensor]:
        return [group[str(i)].to(self.device) for i in range(len(group))]


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Let GPUs round what they multiply, if that is wished."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if precision == "tf32" else before
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _seed(*parts: object) -> int:
    """Return a number that any change of the parts changes beyond recognition."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest())
