"""Markup from values: what is not markup already is escaped, so no name can break a page."""

from html import escape


class Html(str):
    """Text that is markup. Everything else is content, and is escaped."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Html:
    """Return an element. ``class_`` is class, ``_`` in a name is ``-``; None and False leave out.

    >>> tag("p", "1 < 2", tag("br"), class_="note", hidden=True, title=None)
    '<p class="note" hidden>1 &lt; 2<br></p>'
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        spelt = key.rstrip("_").replace("_", "-")
        opening += f" {spelt}" if value is True else f' {spelt}="{escape(str(value))}"'
    if name in ("br", "col", "meta"):
        return Html(f"<{opening}>")
    return Html(f"<{opening}>{join(*children)}</{name}>")


def join(*children: object) -> Html:
    """Put pieces one after the other; None is no piece."""
    return Html("".join(_markup(child) for child in children if child is not None))


def _markup(child: object) -> str:
    return child if isinstance(child, Html) else escape(str(child))
