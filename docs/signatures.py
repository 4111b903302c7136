"""How the API page shows the source: signatures as written, for their comments say the shapes.

A Griffe extension, named in zensical.toml. It puts in front of a docstring the lines that define
the object (a function's header, a class's constructor, the fields of a tuple or dataclass), and
makes Markdown of what docstrings hold besides prose: doctests and sections in numpy's style.
"""

import ast
import inspect
import re
from textwrap import dedent
from typing import Any

from griffe import Class, Docstring, Extension, Function


class Signatures(Extension):
    """Puts signatures, with their comments, into the docstrings."""

    def on_function_instance(self, *, node: Any, func: Function, **_: Any) -> None:
        if func.name == "__init__":
            if func.docstring:
                func.docstring.value = inspect.cleandoc(func.docstring.value)
            return
        _prepend(func, _header(node, func.module.source.splitlines()))

    def on_class_members(self, *, node: Any, cls: Class, **_: Any) -> None:
        source = cls.module.source.splitlines()
        constructor = _constructor(node)
        if constructor is not None:
            _prepend(cls, _header(constructor, source, cls.name))
        elif _is_record(node):
            _prepend(cls, _record(node, source))
        else:
            _prepend(cls, None)


def _header(node: ast.FunctionDef, source: list[str], owner: str | None = None) -> str:
    """Return the lines from ``def`` to before the body; a constructor's as a call of its class."""
    first = node.body[0].lineno
    lines = source[node.lineno - 1 : max(first - 1, node.lineno)]
    text = dedent("\n".join(lines))
    if owner is not None:
        text = re.sub(r"def __init__\(\s*self,?\s*", f"{owner}(", text)
        text = re.sub(r"\) -> None:", ")", text)
        if "\n" in text:
            text = _unfold(text, owner)
    return re.sub(r":( *\.\.\.)?(?=\s*(#.*)?$)", "", text) if owner is None else text


def _unfold(text: str, owner: str) -> str:
    """Give the first parameter a line of its own again."""
    return text.replace(f"{owner}(", f"{owner}(\n    ", 1)


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    return next((function for function in functions if function.name == "__init__"), None)


def _is_record(node: ast.ClassDef) -> bool:
    parts = [ast.unparse(part) for part in (*node.bases, *node.decorator_list)]
    return any(part.startswith(("NamedTuple", "dataclass")) for part in parts)


def _record(node: ast.ClassDef, source: list[str]) -> str:
    """Return the class's first line and its fields, with their comments and documentation."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    fields = [part for part in body if isinstance(part, ast.AnnAssign | ast.Expr)]
    if not fields:  # a recipe that adds methods alone
        return source[node.lineno - 1]
    functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    decorators = (part.lineno for function in functions for part in function.decorator_list)
    end = min((*decorators, *(function.lineno for function in functions)), default=None)
    last = node.end_lineno if end is None else end - 1
    lines = source[fields[0].lineno - 1 : last]
    return "\n".join([source[node.lineno - 1], *lines]).rstrip()


def _prepend(target: Class | Function, signature: str | None) -> None:
    docstring = "" if target.docstring is None else inspect.cleandoc(target.docstring.value)
    block = "" if signature is None else f"```python\n{signature}\n```\n\n"
    target.docstring = Docstring(block + _markdown(docstring), parent=target)


def _markdown(docstring: str) -> str:
    """Fence the doctests and make lists of the sections in numpy's style."""
    paragraphs = re.split(r"\n\n+", docstring)
    return "\n\n".join(_section(_doctest(paragraph)) for paragraph in paragraphs)


def _doctest(paragraph: str) -> str:
    found = re.search(r"^>>> ", paragraph, flags=re.MULTILINE)
    if found is None:
        return paragraph
    before, example = paragraph[: found.start()], paragraph[found.start() :]
    return f"{before}\n```pycon\n{example.rstrip()}\n```"


def _section(paragraph: str) -> str:
    found = re.match(r"(\w+)\n-+\n", paragraph)
    if found is None:
        return paragraph
    items = re.sub(r"^([\w, ]+?) : ", r"- `\1`: ", paragraph[found.end() :], flags=re.MULTILINE)
    return f"**{found[1]}**\n\n{items}"
