"""Settings, which are frozen dataclasses, as JSON and back."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(settings: Any) -> dict[str, Any]:
    """Return what json.dumps takes.

    >>> from primal import EncoderConfig
    >>> settings = EncoderConfig(width=64, primal_layers=(-1,))
    >>> from_json(EncoderConfig, to_json(settings)) == settings
    True
    """
    return {name: _plain(value) for name, value in asdict(settings).items()}


def from_json(kind: type[T], content: Mapping[str, Any]) -> T:
    """Rebuild settings, also after a round through a file, and refuse what they do not know."""
    unknown = content.keys() - {field.name for field in fields(kind)}  # type: ignore[arg-type]
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no {', '.join(sorted(unknown))}; it was written by another "
            "version of primal: use that one."
        )
    hints = get_type_hints(kind)
    return kind(**{name: _typed(hints[name], value) for name, value in content.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _typed(kind: Any, value: Any) -> Any:
    """Make of a JSON value what the annotation says: dataclasses, tuples, paths."""
    if value is None:
        return None
    if get_origin(kind) in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not type(None)]
        kind = next((o for o in options if _takes(o, value)), options[0])
    if isinstance(value, list):
        (inner, *_) = get_args(kind) or (Any,)
        return tuple(_typed(inner, part) for part in value)
    if is_dataclass(kind):
        return from_json(cast(type, kind), value)
    return Path(value) if kind is Path else value


def _takes(kind: Any, value: Any) -> bool:
    if isinstance(value, list):
        return get_origin(kind) is tuple
    return is_dataclass(kind) == isinstance(value, Mapping)
