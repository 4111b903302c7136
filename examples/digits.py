"""Handwritten digits as sequences: a tiny PrimalFormer, a Primal.+ and a Transformer, side by side.

Each 8×8 image is read as 16 patches of 2×2 pixels. All three models share everything but their
attention and see the same batches, at settings tuned for none of them; the test images are used
once, at the end.

    python examples/digits.py            about a minute on two cores
    python examples/digits.py --epochs 5
"""

import argparse
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from primal import EncoderConfig, SequenceClassifier, with_ksvd

PATCHES, CHANNELS, CLASSES = 16, 4, 10
BATCH, LEARNING_RATE, OBJECTIVE_WEIGHT = 64, 2e-3, 0.1

PRIMALFORMER = EncoderConfig(width=64, heads=4, depth=2, rank=10, primal_layers="all", dropout=0.1)
MODELS = {
    "PrimalFormer": PRIMALFORMER,
    "Primal.+": replace(PRIMALFORMER, primal_layers=(-1,)),
    "Transformer": replace(PRIMALFORMER, primal_layers=()),
}


@dataclass
class Trained:
    """One model's result."""

    accuracy: float
    objective: float
    parameters: int
    seconds: float


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training and test images as patches (B, 16, 4), and their labels."""
    images, labels = load_digits(return_X_y=True)
    patches = images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, PATCHES, CHANNELS)
    patches = (patches / 8 - 1).astype(np.float32)
    parts = train_test_split(patches, labels, test_size=0.3, stratify=labels, random_state=0)
    train, test, train_labels, test_labels = (torch.from_numpy(part) for part in parts)
    return train, train_labels, test, test_labels


def fit(config: EncoderConfig, epochs: int, progress: Progress, name: str) -> Trained:
    """Train one model and measure it on the test images."""
    torch.manual_seed(0)
    train, train_labels, test, test_labels = digits()
    model = SequenceClassifier(CHANNELS, CLASSES, PATCHES, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    steps = epochs * -(-len(train) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    bar = progress.add_task(name, total=steps, loss=float("nan"), objective=float("nan"))
    start = time.perf_counter()
    for _ in range(epochs):
        for batch in torch.randperm(len(train)).split(BATCH):
            logits, terms = model(train[batch])
            task_loss = F.cross_entropy(logits, train_labels[batch])
            loss = with_ksvd(task_loss, terms, OBJECTIVE_WEIGHT)
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
            schedule.step()
            progress.update(bar, advance=1, loss=loss.task.item(), objective=loss.ksvd.item())
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        logits, terms = model(test)
        accuracy = (logits.argmax(-1) == test_labels).double().mean().item()
        objective = with_ksvd(logits.new_zeros(()), terms, 1.0).ksvd.item()
    parameters = sum(p.numel() for p in model.parameters())
    return Trained(accuracy, objective if terms else float("nan"), parameters, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    console = Console()
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  J² {task.fields[objective]:.1e}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        trained = {name: fit(config, epochs, progress, name) for name, config in MODELS.items()}
    table = Table(title="Handwritten digits, 540 test images", title_justify="left")
    for column in ("", "test accuracy", "J² on the test set", "parameters", "training"):
        table.add_column(column, justify="left" if not column else "right")
    for name, result in trained.items():
        objective = "-" if result.objective != result.objective else f"{result.objective:.1e}"
        table.add_row(
            name,
            f"{100 * result.accuracy:.1f} %",
            objective,
            f"{result.parameters:,}",
            f"{result.seconds:.1f} s",
        )
    console.print(table)
    console.print("J = 0 is the kernel SVD of the layer's own attention kernel: docs/theory.md")


if __name__ == "__main__":
    main()
