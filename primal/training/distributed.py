"""Data-parallel training under torchrun; a single process is the case of world size one."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn


@contextmanager
def world(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun started, if it did."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    return rank() == 0


def share(batch: Tensor) -> tuple[Tensor, Tensor]:  # (B,) -> (b,), (b,)
    """Return this process's part of a batch of indices, and each one's weight in the batch's mean.

    A process left without any, in a short last batch, takes one at weight zero: all keep step.
    """
    mine = batch[rank() :: size()]
    weight = 1.0 / len(batch) if len(mine) else 0.0
    mine = mine if len(mine) else batch[:1]
    return mine, torch.full((len(mine),), weight, device=batch.device)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add the gradients of all processes, which weigh their samples in the global mean."""
    if size() == 1:
        return
    parameters = [p for p in parameters if p.requires_grad]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for p, part in zip(parameters, flat.split([g.numel() for g in gradients]), strict=True):
        p.grad = part.view_as(p)


def total(x: Tensor) -> Tensor:
    """Return the sum over all processes."""
    if size() > 1:
        x = x.clone()
        dist.all_reduce(x)
    return x


def barrier() -> None:
    if size() > 1:
        dist.barrier()
