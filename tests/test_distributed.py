"""Data-parallel training on two processes takes the same steps as one process."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from primal import EncoderConfig, SequenceClassifier, with_ksvd

Batch = tuple[Tensor, Tensor, Tensor]  # series, lengths, labels

STEPS, BATCH, PROCESSES = 3, 4, 2
CONFIGS = {
    "primal_plus": EncoderConfig(
        width=16, heads=2, depth=2, rank=3, anchors=5, primal_layers=(-1,), dropout=0.0
    ),
    "primalformer-contextual": EncoderConfig(
        width=16, heads=2, depth=2, rank=3, projection="contextual", dropout=0.0
    ),
}


def model_and_batches(name: str) -> tuple[SequenceClassifier, list[Batch]]:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = SequenceClassifier(3, 4, 9, CONFIGS[name]).double()
    batches = [
        (
            torch.randn(BATCH, 9, 3, generator=generator, dtype=torch.float64),
            torch.randint(1, 10, (BATCH,), generator=generator),
            torch.randint(4, (BATCH,), generator=generator),
        )
        for _ in range(STEPS)
    ]
    return model, batches


def train(model: torch.nn.Module, batches: list[Batch], part: slice) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, lengths, labels in batches:
        logits, terms = model(x[part], mask=lengths[part])
        task = torch.nn.functional.cross_entropy(logits, labels[part])
        loss = with_ksvd(task, terms, 0.5)  # each a mean over samples: means of halves agree
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()


def one_of_two(rank: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    model, batches = model_and_batches(name)
    half = BATCH // PROCESSES
    train(DistributedDataParallel(model), batches, slice(rank * half, (rank + 1) * half))
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("name", CONFIGS)
def test_two_processes_train_as_one(name: str, tmp_path: Path) -> None:
    spawn(one_of_two, (name, str(tmp_path)), nprocs=PROCESSES)
    model, batches = model_and_batches(name)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    train(model, batches, slice(None))
    for rank in range(PROCESSES):
        found = torch.load(tmp_path / f"{rank}.pt")
        for parameter, expected in model.state_dict().items():
            torch.testing.assert_close(found[parameter], expected, rtol=1e-9, atol=1e-10)
    assert any(not torch.equal(before[n], p) for n, p in model.state_dict().items())
