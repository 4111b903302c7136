"""Errors that repair themselves: what is required, what was given, what would do."""

from collections.abc import Iterable
from difflib import get_close_matches


class DataError(ValueError):
    """What is wrong with a file: the file, the place in it, the remedy."""


def require_choice(name: str, given: object, choices: Iterable[str]) -> None:
    """Raise a ValueError listing ``choices`` unless ``given`` is one of them."""
    known = sorted(choices)
    if given not in known:
        close = get_close_matches(str(given), known, n=1)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {known}, got {given!r}.{guess}")


def require_positive(name: str, given: int) -> None:
    """Raise a ValueError unless ``given`` is an integer of at least 1."""
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ValueError(f"{name} must be a positive integer, got {given!r}; 1 is the smallest.")


def require_divides(name: str, value: int, by_name: str, by: int) -> None:
    """Raise a ValueError naming the nearest valid values unless ``by`` divides ``value``."""
    require_positive(name, value)
    require_positive(by_name, by)
    if value % by:
        below, above = value // by * by, (value // by + 1) * by
        nearest = f"{below} and {above}" if below else f"{above}"
        raise ValueError(
            f"{name} must be a multiple of {by_name}, got {name}={value} and {by_name}={by}; "
            f"the nearest valid {name}: {nearest}."
        )
