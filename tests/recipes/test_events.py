"""The recipes of events: they run, resume, tell the test apart, and stand in a table."""

import json
import signal
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from primal.recipes import events as recipes
from primal.recipes.base import Recipe, execute, from_json, to_json
from primal.recipes.events import TASKS, VARIANTS, EventRecipe, Phase, StackOverflow
from primal.training.loop import Interrupted
from primal.training.run_folder import RunFolder

every_variant = pytest.mark.parametrize("variant", VARIANTS)


def tiny(recipe: EventRecipe) -> EventRecipe:
    training = replace(recipe.training, epochs=2, batch_size=16, checkpoint_seconds=0.0)
    encoder = replace(recipe.model.encoder, width=16, heads=2, feedforward=16)
    encoder = replace(encoder, rank=min(encoder.rank, 4))
    recipe = replace(recipe, model=replace(recipe.model, encoder=encoder), training=training)
    if isinstance(recipe, Phase):
        sizes = replace(recipe.data, train=48, validation=24, test=40)
        return replace(recipe, data=sizes, window=5)
    return replace(recipe, window=8)


@pytest.fixture
def badges(tmp_path: Path) -> Path:
    """A small set in the format of Stack Overflow's files."""
    folder = tmp_path / "data" / "events" / "stackoverflow"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, users in (("train", 30), ("test", 12)):
        lengths = random.integers(5, 20, users)
        kinds = [" ".join(map(str, random.integers(1, 23, n))) for n in lengths]
        times = [" ".join(map(str, random.exponential(9e5, n).cumsum())) for n in lengths]
        (folder / f"event-{part}.txt").write_text("\n".join(kinds) + "\n")
        (folder / f"time-{part}.txt").write_text("\n".join(times) + "\n")
    return tmp_path / "data"


def at(root: Path, variant: str = "bochner") -> StackOverflow:
    recipe = recipes.stackoverflow(variant)
    return replace(recipe, data=replace(recipe.data, root=root))


def run(name: str, recipe: Recipe, path: Path, **settings) -> dict:
    with RunFolder(path) as folder:
        execute(name, recipe, folder, device="cpu", **settings)
    return json.loads((path / RunFolder.RESULT).read_text())


@every_variant
def test_every_variant_runs_on_the_phase_task(variant, tmp_path):
    result = run("events/phase", tiny(recipes.phase(variant)), tmp_path)
    assert result["metric"] == "test/accuracy"
    assert [c["who"] for c in result["comparisons"]] == [
        "Most frequent kind",
        "Markov-1",
        "Vote, period known",
    ]
    rows = (tmp_path / RunFolder.PREDICTIONS).read_text().splitlines()
    assert rows[0] == "case,label,predicted,0,1"
    assert len(rows) == 1 + 40
    labels, predicted = zip(*(row.split(",")[1:3] for row in rows[1:]), strict=True)
    right = np.mean([a == b for a, b in zip(labels, predicted, strict=True)])
    assert right == pytest.approx(result["value"])
    assert (tmp_path / RunFolder.REPORT).exists()


def test_the_badges_run(badges, tmp_path):
    recipe = tiny(at(badges, "mercer"))
    result = run("events/stackoverflow", recipe, tmp_path / "run")
    data = recipe.load()
    rows = (tmp_path / "run" / RunFolder.PREDICTIONS).read_text().splitlines()[1:]
    cases = [row.split(",")[:2] for row in rows]
    wanted = [
        [f"{name}:{n + 1}", str(kinds[n])]
        for name, kinds in zip(data.test.names, data.test.kinds, strict=True)
        for n in range(1, len(kinds))
    ]
    assert cases == wanted
    assert 0 <= result["value"] <= 1


def test_no_user_is_in_two_parts(badges):
    recipe = at(badges)
    for seed in range(3):
        parts = [set(part.names) for part in recipe.seeded(seed).load()]
        assert sum(map(len, parts)) == len(set.union(*parts)) == 42


def test_the_rules_by_hand(badges):
    recipe = replace(at(badges), window=4)
    data = recipe.load()
    pairs = [
        pair for kinds in (*data.train.kinds, *data.validation.kinds) for pair in pairwise(kinds)
    ]
    follows, seen = np.zeros((22, 22)), np.ones(22)
    for before, after in pairs:
        follows[before, after] += 1
        seen[after] += 1
    follows += seen / seen.sum()
    follows /= follows.sum(1, keepdims=True)
    tested = [pair for kinds in data.test.kinds for pair in pairwise(kinds)]
    rule = recipe.rules()["Markov-1"]
    assert rule["test/accuracy"] == np.mean([follows[a].argmax() == b for a, b in tested])
    assert rule["test/loss"] == pytest.approx(-np.mean([np.log(follows[a, b]) for a, b in tested]))


class Stop:
    """A watcher that sends SIGTERM after the first epoch."""

    def stage(self, what: str, epochs: int = 0) -> None: ...

    def step(self, *_: object) -> None: ...

    def epoch(self, row: dict) -> None:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("variant", ["bochner-normal", "lstm", "primal"])
def test_a_run_that_was_stopped_goes_on_to_the_same_numbers(variant, tmp_path):
    recipe = tiny(recipes.phase(variant))
    whole = run("events/phase", recipe, tmp_path / "whole")
    with pytest.raises(Interrupted):
        run("events/phase", recipe, tmp_path / "parts", watch=Stop())
    parts = run("events/phase", recipe, tmp_path / "parts", resume=True)
    assert parts["metrics"] == whole["metrics"]


@every_variant
@pytest.mark.parametrize("task", TASKS)
def test_a_recipe_goes_through_json(task, variant):
    recipe = TASKS[task][1](variant)
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe


@pytest.mark.parametrize("task", TASKS)
def test_the_attention_variants_differ_in_how_they_tell_time_alone(task):
    build = TASKS[task][1]
    plain = build("bochner")
    for variant in VARIANTS.keys() - {"lstm"}:
        other = build(variant)
        assert replace(other, model=plain.model) == plain
        if variant != "primal":
            assert other.model.encoder == plain.model.encoder


# --- the table -----------------------------------------------------------------------------------


def test_the_table_runs_what_is_missing_once(badges, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "phase", ("Phase", lambda key: tiny(recipes.phase(key))))
    monkeypatch.setitem(
        TASKS, "stackoverflow", ("Badges", lambda key: tiny(recipes.stackoverflow(key)))
    )
    said: list[str] = []

    def table(**settings):
        return recipes.table(
            badges, tmp_path, seeds=2, only=("bochner", "position"), say=said.append, **settings
        )

    phase, badge = table()
    assert len(said) == 8
    assert (phase.title, badge.title) == ("Phase", "Badges")
    names = [heading for heading, _ in VARIANTS.values()]
    rules = ["Most frequent kind", "Markov-1"]
    assert [row[0] for row in phase.rows] == [*rules, "Vote, period known", *names]
    assert [row[0] for row in badge.rows] == [*rules, *names]
    assert all(len(row) == len(phase.header) for row in (*phase.rows, *badge.rows))
    filled = [row[0] for row in badge.rows if row[1]]
    assert filled == [*rules, "Bochner, non-parametric", "Positions only"]
    assert all("(2)" in row[1] for row in badge.rows if row[3])
    said.clear()
    assert table(show=True) == [phase, badge]
    assert not said


def test_the_table_says_what_is_missing_and_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("PRIMAL_DATA", raising=False)
    _, badge = recipes.table(None, tmp_path, show=True)
    assert badge.rows[0][0] == "missing"
    assert "github" in badge.notes[0]


def test_an_unknown_row_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'mercer'"):
        recipes.table(None, tmp_path, only=("mercr",))


# --- what the experiments are to show ------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_encoded_times_tell_the_phase_and_positions_do_not(tmp_path):
    found = {
        variant: run("events/phase", recipes.phase(variant), tmp_path / variant)["value"]
        for variant in ("bochner", "position")
    }
    assert found["bochner"] > 0.85
    assert 0.55 < found["position"] < 0.65


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_next_badge_beats_what_mostly_follows_the_last(shared, tmp_path):
    recipe = at(shared / "data")
    recipe = replace(recipe, training=replace(recipe.training, epochs=2))
    result = run("events/stackoverflow", recipe, tmp_path)
    (rule,) = [c["value"] for c in result["comparisons"] if c["who"] == "Markov-1"]
    assert rule == pytest.approx(0.445, abs=0.001)
    assert result["value"] > rule + 0.02
