"""A small problem, deterministic on a CPU, and ways to train on it in another process.

python -m tests.training.toy FOLDER EXAMPLES BATCH_SIZE
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from primal.functional import ksvd_residual
from primal.models.build import EncoderConfig
from primal.models.classifier import SequenceClassifier
from primal.training import checkpoint, distributed
from primal.training.loop import Problem, SampleLosses, TrainingConfig, train
from primal.training.run_folder import RunFolder

# An uneven last batch, an average, dropout, a best epoch before the last: all that a checkpoint
# must hold.
CONFIG = TrainingConfig(
    epochs=3,
    batch_size=4,
    learning_rate=0.01,
    average=0.9,
    select="validation/small",
    checkpoint_seconds=0.0,
)

LONG = replace(CONFIG, epochs=40)


def toy(
    examples: int = 14,
    *,
    dropout: float = 0.2,
    device: str = "cpu",
    before_step: Callable[[int], None] = lambda _: None,
    before_evaluation: Callable[[], None] = lambda: None,
) -> Problem:
    """Return a problem; ``before_step`` is told the number of each step, from 1."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, 9, 3, generator=generator).to(device)
    target = torch.randint(3, (examples,), generator=generator).to(device)
    torch.manual_seed(2)
    config = EncoderConfig(width=16, heads=2, depth=2, rank=3, dropout=dropout)
    model = SequenceClassifier(3, 3, 9, config).to(device)
    steps = 0

    def losses(model: Any, batch: tuple[Tensor, Tensor]) -> SampleLosses:
        nonlocal steps
        steps += 1
        before_step(steps)
        logits, terms = model(batch[0])
        task = F.cross_entropy(logits.float(), batch[1], reduction="none")
        ksvd = torch.stack([ksvd_residual(layer).square() for layer in terms], dim=1)
        return SampleLosses(task, ksvd, (logits.argmax(-1) == batch[1]).float())

    def evaluate(model: Any) -> dict[str, float]:
        before_evaluation()
        logits = model(x).logits
        return {
            "validation/accuracy": (logits.argmax(-1) == target).double().mean().item(),
            "validation/loss": F.cross_entropy(logits, target).item(),
            # Weights grow from epoch to epoch, so that the first is the best by this one.
            "validation/small": -sum(p.square().sum().item() for p in model.parameters()),
        }

    return Problem(
        model, examples, lambda i: (x[i], target[i]), losses, evaluate, lambda i: f"case {i}"
    )


def run(
    folder: Path | None,
    problem: Problem | None = None,
    config: TrainingConfig = CONFIG,
    *,
    resume: bool = False,
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Train; return the metrics but the clock's, and the weights."""
    problem = toy() if problem is None else problem
    if folder is None:
        rows = train(problem, config)
    else:
        with RunFolder(folder) as opened:
            rows = train(problem, config, opened, resume=resume)
    timeless = [{k: v for k, v in row.items() if k != "seconds"} for row in rows]
    return timeless, problem.model.state_dict()


# --- in another process --------------------------------------------------------------------------


def die() -> None:
    """End as by kill -9: no handler, no finally, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(folder: Path, moment: str) -> None:
    """Train, and die at a moment: step:3, evaluation:1, flush:5 (in a checkpoint), write:9, ..."""
    where, _, count = moment.partition(":")
    left = int(count)

    def count_down(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    if where == "flush":  # written under a temporary name, neither on disk nor renamed
        checkpoint._flush = count_down  # type: ignore[assignment]
    elif where == "rename":  # the new name is there, metrics are not
        renamed = Path.replace

        def rename(path: Path, target: Path) -> Path:
            renamed(path, target)
            count_down()
            return target

        Path.replace = rename  # type: ignore[method-assign,assignment]
    elif where == "half":  # a file cut anywhere
        saved = checkpoint._checksum

        def save(tensors: Any, text: str) -> str:
            (folder / (RunFolder.CHECKPOINT + ".part")).write_bytes(b"\x40\x00\x00\x00{")
            count_down()
            return saved(tensors, text)

        checkpoint._checksum = save
    problem = toy(
        before_step=count_down if where == "step" else lambda _: None,
        before_evaluation=count_down if where == "evaluation" else lambda: None,
    )
    run(folder, problem)


def keep_running(folder: Path) -> None:
    """Train for some seconds, a checkpoint after each step."""
    run(folder, config=LONG)


if __name__ == "__main__":
    torch.set_num_threads(1)
    place, examples, batch_size = sys.argv[1:]
    with distributed.world(torch.device("cpu")):
        settings = replace(CONFIG, batch_size=int(batch_size))
        found = run(Path(place), toy(int(examples), dropout=0.0), settings)
        checkpoint.save(Path(place) / f"rank{distributed.rank()}", found[1], {"rows": found[0]})
