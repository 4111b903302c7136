"""Text files line by line, packed or not; a damaged one is told by its name and row."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from primal.errors import DataError

OPENERS: dict[str, Callable[[Path], Any]] = {".gz": gzip.open, ".xz": lzma.open}


def read_lines(path: Path) -> Iterator[str]:
    """Return each line with its end, as UTF-8."""
    row = 0
    try:
        # Decoded line by line, so that the row of a bad letter is known.
        with io.BufferedReader(OPENERS.get(path.suffix.lower(), io.FileIO)(path)) as lines:
            for row, line in enumerate(lines, 1):
                yield line.decode("utf-8-sig" if row == 1 else "utf-8")
    except UnicodeDecodeError:
        raise DataError(
            f"{path}, row {row}: UTF-8 text is required, got other bytes; save the file as UTF-8."
        ) from None
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise DataError(
            f"{path} cannot be read after row {row}: {error}; copy or download it again."
        ) from None
