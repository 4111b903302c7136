"""A run's folder -> report.html: one page that needs nothing but itself."""

from importlib.resources import files
from pathlib import Path

from primal.report.curves import learning_curves
from primal.report.html import Html, join, tag
from primal.report.mistakes import mistakes
from primal.report.outcome import outcome
from primal.report.predictions import predictions
from primal.report.run import Run, read_run
from primal.report.settings import environment, recipe
from primal.report.spectra import spectra
from primal.training.run_folder import RunFolder

SECTIONS = (  # in reading order; a section is None where the run has nothing to say
    ("result", None, outcome),
    ("learning", "Learning curves", learning_curves),
    ("predictions", "Right and wrong", predictions),
    ("mistakes", "Most confident mistakes", mistakes),
    ("spectrum", "Spectrum of the kernels", spectra),
    ("settings", "Settings", recipe),
    ("environment", "Environment", environment),
)
TITLES = {"mistakes": "Largest errors", "predictions": "Predicted and true"}  # of a regression


def write_report(folder: Path) -> Path:
    """Write report.html from the other files of a run's folder, and return its path."""
    text = page(read_run(folder))
    # Names of characters instead of characters: the page reads alike in every encoding.
    plain = text.encode("ascii", "xmlcharrefreplace").decode("ascii")
    RunFolder(folder).write_text(RunFolder.REPORT, plain)
    return folder / RunFolder.REPORT


def page(run: Run) -> str:
    """Return the page of a run."""
    titles = {} if run.classifies else TITLES
    shown = [
        (name, titles.get(name, title), content)
        for name, title, make in SECTIONS
        if (content := make(run))
    ]
    links = [tag("a", title, href=f"#{name}") for name, title, _ in shown if title]
    sections = [
        tag("section", tag("h2", title) if title else None, content, id=name)
        for name, title, content in shown
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light"),
        tag("title", f"{run.name} · Primal"),
        tag("style", Html(files("primal.report").joinpath("style.css").read_text("ascii"))),
    )
    top = tag(
        "header",
        tag("h1", run.name),
        tag("nav", *links, aria_label="On this page") if len(links) > 1 else None,
    )
    body = tag("body", top, tag("main", *sections))
    return join(Html("<!doctype html>"), tag("html", head, body, lang="en"), Html("\n"))
