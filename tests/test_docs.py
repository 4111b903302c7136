"""The documentation: its code runs, and what it names exists.

`make docs` fails on a broken link, anchor or API name. It lets pass what is tested here: images,
pages outside the navigation, members that do not exist, names of tests.
"""

import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

import primal

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]

# What leads to the errors in the guide's table, in its order.
MISTAKES = [
    lambda: primal.PrimalAttention(30, heads=4, rank=2),
    lambda: primal.PrimalAttention(8, heads=2, rank=5),
    lambda: primal.PrimalAttention(8, heads=2, rank=2, feature_map="polynomial"),
    lambda: primal.PrimalAttention(8, heads=2, rank=2, causal=True, projection="anchors"),
    lambda: layer()(tokens(), tokens()),
    lambda: layer()(tokens()[0]),
    lambda: layer()(tokens(), mask=torch.ones(2, 5)),
    lambda: layer()(tokens(), mask=torch.tensor([5, 0])),
    lambda: layer()(tokens(), mask=torch.tensor([6, 5])),
    lambda: layer(backend="blocked").bfloat16()(tokens().bfloat16()),
]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def layer(**settings: Any) -> primal.PrimalAttention:
    return primal.PrimalAttention(8, heads=2, rank=2, **settings)


def tokens() -> Tensor:
    return torch.randn(2, 5, 8)


def fenced(text: str, language: str) -> Iterator[tuple[int, str]]:
    """Yield each fenced block in the language, with the number of its first line."""
    pattern = rf"^```{language}\n(.*?)^```$"
    for block in re.finditer(pattern, text, flags=re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, block.start(1)), block[1]


def prose(page: Path) -> str:
    """Return the page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def documented(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every name that the API page shows, and the members it lists."""
    for block in re.finditer(r"^::: (\S+)\n((?:    .*\n)*)", text, flags=re.MULTILINE):
        members = re.search(r"members: \[(.*)\]", block[2])
        yield block[1], [name for name in members[1].split(", ") if name] if members else []


def resolve(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), attribute)


# --- the code ------------------------------------------------------------------------------------


# torch.onnx's own use of a name that torch has deprecated
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, monkeypatch, tmp_path):
    if not page.exists():
        pytest.skip(f"needs {page.name}, and there is none")
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in fenced(page.read_text(), "python"):
        if "torch.onnx" in code:
            pytest.importorskip("onnxscript")
        exec(compile("\n" * line + code, page, "exec"), namespace)


# --- what the pages name -------------------------------------------------------------------------


@every_page
def test_every_image_exists(page):
    found = re.findall(r"!\[[^]]*\]\(([^)#]+)(?:#(\w+))?\)", prose(page))
    for path, part in found:
        image = page.parent / path
        assert image.is_file(), f"{page.name} shows {path}, and there is none"
        if part:
            identifiers = {element.get("id") for element in ElementTree.parse(image).iter()}
            assert part in identifiers, f"{path} has no part #{part}"


def test_the_figure_says_in_words_what_it_shows():
    root = ElementTree.parse(DOCS / "assets" / "idea.svg").getroot()
    parts = {element.get("id"): element.text for element in root.iter()}
    named = root.attrib["aria-labelledby"].split()
    assert root.get("role") == "img"
    assert named
    assert all(parts[name] for name in named)


def test_every_page_is_in_the_navigation():
    listed = [DOCS / path for entry in SITE["nav"] for path in entry.values()]
    assert sorted(listed) == PAGES
    assets = [DOCS / path for path in SITE["extra_css"] + SITE["extra_javascript"]]
    assert all(path.is_file() for path in assets)


@every_page
def test_every_test_a_page_names_exists(page):
    for path, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", prose(page)):
        source = (ROOT / path).read_text()
        assert re.search(rf"^ *def {name}\(", source, flags=re.MULTILINE) or not name, (path, name)


def test_the_errors_of_the_guide_are_those_the_library_raises():
    table = (DOCS / "guide.md").read_text().split("| message begins with |")[1]
    beginnings = re.findall(r"^\| `([^`]+)` \|", table, flags=re.MULTILINE)
    assert len(beginnings) == len(MISTAKES)
    for beginning, mistake in zip(beginnings, MISTAKES, strict=True):
        with pytest.raises(ValueError, match=f"^{re.escape(beginning)}"):
            mistake()


# --- the API page --------------------------------------------------------------------------------


def test_every_public_name_is_on_the_api_page():
    shown = [resolve(name) for name, _ in documented((DOCS / "api.md").read_text())]
    assert not [name for name in primal.__all__ if getattr(primal, name) not in shown]


def test_every_member_on_the_api_page_exists():
    for name, members in documented((DOCS / "api.md").read_text()):
        missing = [member for member in members if not hasattr(resolve(name), member)]
        assert not missing, f"{name} has no {missing}"
