"""Checkpoints: tensors and a JSON state in one safetensors file, checksummed, written atomically.

Nothing is ever unpickled, so a file from a stranger can do no harm.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be trusted, does not fit, or could not be written."""


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write, or leave what was there before: a half-written file never has the name."""
    from safetensors import SafetensorError  # training without a folder needs no such package
    from safetensors.torch import save_file

    kept = {name: _own(tensor) for name, tensor in tensors.items()}
    text = json.dumps(state)
    temporary = path.with_name(path.name + ".part")
    try:
        save_file(kept, temporary, {"state": text, "sha256": _checksum(kept, text)})
        _flush(temporary)
        temporary.replace(path)
        if os.name == "posix":
            _flush(path.parent)  # the new name, too, outlives a loss of power
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # Path.exists raises where a folder may not be looked into.
        there = os.path.exists(path)
        kept_one = f"the last good one, {path}, is kept" if there else "there is none before it"
        raise CheckpointError(
            f"the checkpoint {path} could not be written ({error}); {kept_one}; make room or give "
            "another folder, then resume."
        ) from None


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what ``save`` wrote, or say what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            # Copies: what is read is the file's own memory, which changes when the file does.
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give the folder of a run.") from None
    except (OSError, SafetensorError) as error:
        raise _damaged(path, f"it cannot be read: {error}") from None
    if not metadata.keys() >= {"state", "sha256"}:
        raise CheckpointError(
            f"{path} was not written by this library, whose files hold a state and its checksum; "
            "give the folder of a run."
        )
    if _checksum(tensors, metadata["state"]) != metadata["sha256"]:
        raise _damaged(path, "its checksum does not fit its content")
    return tensors, json.loads(metadata["state"])


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, {why}; restore it from a copy, or delete it and run again."
    )


def _own(tensor: Tensor) -> Tensor:
    """Return a copy in host memory that shares it with no other, as the format wants."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def _flush(path: Path) -> None:
    """Wait until the disk has it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(tensors: Mapping[str, Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
