"""Data-parallel training under torchrun; a single process is the case of world size one."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


class FirstFailed(ValueError):
    """The process that writes for all could not; its own message says why."""


@contextmanager
def world(device: torch.device) -> Iterator[None]:
    """Join the processes that torchrun started, if it did; on GPUs, each takes its own."""
    if "WORLD_SIZE" not in os.environ or dist.is_initialized():
        yield
        return
    if device.type == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"each process needs a GPU of its own: process {local} of this machine found "
                f"{torch.cuda.device_count()}; lower --nproc-per-node, or use the cpu."
            )
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def is_first() -> bool:
    """Say whether this process writes; what torchrun said holds before the processes are joined."""
    return rank() == 0 if dist.is_initialized() else int(os.environ.get("RANK", "0")) == 0


def share(batch: Tensor) -> tuple[Tensor, float]:  # (B,) -> (b,)
    """Return this process's part of a batch of indices, and what a sample weighs in its mean.

    A process left without any, in a short last batch, takes one at weight zero: all keep step.
    """
    mine = batch[rank() :: size()]
    return (mine, 1.0 / len(batch)) if len(mine) else (batch[:1], 0.0)


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes, in one exchange."""
    if size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, summed in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(summed.view_as(tensor))


def copy_first(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by the first process's."""
    if size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)


def any_of(*wishes: bool) -> tuple[bool, ...]:
    """Return which wishes any process has: all processes read the same answer."""
    if size() == 1:
        return wishes
    counted = torch.tensor(wishes, dtype=torch.float32, device=_meeting_place())
    dist.all_reduce(counted)
    return tuple(count > 0 for count in counted.tolist())


def by_first(action: Callable[[], None]) -> None:
    """Let the first process act while the others wait; if it fails, all of them stop."""
    failure: Exception | None = None
    if is_first():
        try:
            action()
        except Exception as error:
            failure = error
    (failed,) = any_of(failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise FirstFailed("the first process could not write and stopped; see its message.")


def _meeting_place() -> torch.device:
    """Return where the processes exchange tensors."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
