"""Every kind of run gives a whole page, with the sections it has something for and no others."""

import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from primal.errors import DataError
from primal.report import write_report

VOID = {"meta", "br", "col"}
ALL = ["result", "learning", "predictions", "mistakes", "spectrum", "settings", "environment"]


class Reader(HTMLParser):
    """Checks that tags nest, and keeps what a reader gets: texts, tags, links, titles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def sections(self) -> list[str]:
        return [attributes["id"] for tag, attributes in self.tags if tag == "section"]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


@pytest.fixture
def page(run: Path) -> Reader:
    return Reader((run / "report.html").read_text(encoding="ascii"))


def test_nothing_comes_from_elsewhere(page):
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "iframe", "link", "object", "image", "use"}
    links = [a["href"] for _, a in page.tags if "href" in a]
    assert all(link.startswith("#") for link in links)
    assert not any(name.startswith("on") for _, a in page.tags for name in a)
    style = files("primal.report").joinpath("style.css").read_text()
    assert not re.search(r"url\(|@import|http", style)


@pytest.mark.parametrize(
    ("run", "missing"),
    [
        ("everything", set()),
        ("60 classes", set()),
        ("regression", {"spectrum"}),
        ("closed form", {"learning", "mistakes", "spectrum"}),
        ("events", {"predictions", "mistakes", "spectrum"}),
        ("no test set", {"predictions", "mistakes", "spectrum"}),
        ("no mistakes", {"mistakes"}),
        ("interrupted", {"predictions", "mistakes", "spectrum"}),
    ],
    indirect=["run"],
)
def test_a_section_stands_where_there_is_something_to_say(page, missing):
    assert page.sections == [name for name in ALL if name not in missing]
    linked = {a["href"] for tag, a in page.tags if tag == "a"}
    assert linked == {f"#{name}" for name in page.sections if name != "result"}


@pytest.mark.parametrize("run", ["hostile"], indirect=True)
def test_names_are_text_and_never_markup(page):
    hostile = "</script><script>throw 1</script><img src='http://example.com/x.png' onerror"
    assert page.texts.count('"><a href="http://example.com">') >= 4  # class, mistake, setting
    assert sum(hostile in text for text in page.texts) >= 8
    assert any(a.get("aria-label", "").startswith("case </script><script>") for _, a in page.tags)


@pytest.mark.parametrize(
    ("run", "told"),
    [
        ("everything", "the test set was used once, after training"),
        ("everything", "Trained for 9 epochs in 1 min 15 s."),
        ("one epoch", "Trained for 1 epoch in"),
        ("closed form", "Fitted in 1 min 15 s."),
        ("no test set", "nothing to measure on, so there is no result"),
        ("interrupted", "has not finished. It stands after epoch 3 of 9. Go on with --resume auto"),
        ("no mistakes", "Every test case was predicted right."),
        ("regression", "Largest errors"),
        ("everything", "Most confident mistakes"),
        ("long", "the first 12 of 14 channels"),
        ("deep", "6 of 24 layers are drawn"),
        ("everything", "Gaps are missing values."),
        ("everything", "are the times of its observations."),
    ],
    indirect=["run"],
)
def test_the_page_says(page, told):
    assert told in page.text


def test_a_protocol_that_chose_by_the_test_set_says_so(tmp_path, written, parts):
    content = parts.everything()
    content["result"]["protocol"] = "paper"
    page = Reader(write_report(written(tmp_path, content)).read_text())
    assert "an optimistic number, since the test set chose the epoch" in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"with neither result.json nor recipe.json; give the"):
        write_report(tmp_path)


@pytest.mark.parametrize("broken", ["{", "[1]"])
def test_a_damaged_file_is_named(tmp_path, written, parts, broken):
    folder = written(tmp_path, parts.everything())
    (folder / "spectrum.json").write_text(broken)
    with pytest.raises(DataError, match=r"spectrum.json must (be JSON|hold a JSON object)"):
        write_report(folder)


def test_what_a_killed_run_left_unfinished_is_passed_over(tmp_path, written, parts):
    folder = written(tmp_path, parts.everything())
    for name in ("metrics.jsonl", "predictions.csv"):
        path = folder / name
        path.write_text(path.read_text()[:-9])
    page = Reader(write_report(folder).read_text())
    assert "Trained for 8 epochs" in page.text
    assert "32 test cases" in page.text


def test_a_page_is_written_anew_over_the_old_one(tmp_path, written, parts):
    folder = written(tmp_path, parts.everything())
    first = write_report(folder).read_text()
    assert write_report(folder).read_text() == first
    assert {p.name for p in folder.iterdir()} == {
        *("recipe.json", "environment.json", "result.json", "metrics.jsonl", "predictions.csv"),
        *("mistakes.json", "spectrum.json", "report.html"),
    }
