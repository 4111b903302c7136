"""The paper's table and settings, as published, and the table laid out."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from primal.recipes import base, uea
from primal.recipes.published import COLUMNS, PEERS, SETTINGS, TABLE_1


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as opened:
        return list(csv.DictReader(opened))


def test_table_1_is_the_papers(shared):
    published = rows(shared / "reference" / "uea_table1.csv")
    for row in published:
        name, *values = row.values()
        if name in TABLE_1:
            assert TABLE_1[name] == tuple(map(float, values))
    assert {row["dataset"] for row in published} >= TABLE_1.keys()
    assert len(TABLE_1) == 10
    assert len(COLUMNS) == 11


def test_settings_are_the_papers(shared):
    for row in rows(shared / "reference" / "uea_hyperparameters.csv"):
        ours = tuple(
            (
                int(row[f"{model}_rank"]),
                float(row[f"{model}_eta"]),
                int(row[f"{model}_multiplier"]),
            )
            for model in ("primalformer", "primal_plus")
        )
        assert SETTINGS[row["dataset"]] == (int(row["epochs"]), row["optimizer"].lower(), *ours)


@pytest.mark.parametrize(
    ("model", "layers"), [("transformer", ()), ("primalformer", "all"), ("primal-plus", (-1,))]
)
def test_the_paper_trained_this(model, layers):
    recipe = uea.paper("UWaveGestureLibrary", model)
    encoder, training = recipe.model.encoder, recipe.training
    assert (encoder.width, encoder.heads, encoder.depth) == (512, 8, 2)
    assert encoder.primal_layers == layers
    assert (training.batch_size, training.learning_rate, training.clip) == (16, 1e-3, 4.0)
    assert (training.optimizer, training.epochs) == ("radam", 100)
    if model == "primal-plus":
        assert (encoder.rank, encoder.anchors, training.objective_weight) == (40, 400, 0.1)
    assert recipe.protocol == "paper"
    assert not recipe.validation


def test_the_honest_protocol_chooses_on_validation_cases():
    recipe = uea.paper("Handwriting", "primalformer", "honest")
    assert recipe.validation == 0.2
    assert recipe.training.select == "validation/accuracy"
    assert recipe.protocol == "honest"
    assert uea.default("Handwriting").training.select is None


def test_every_recipe_survives_a_round_through_a_file():
    for name, entry in base.recipes().items():
        recipe = entry.build()
        content = json.loads(json.dumps(base.to_json(recipe)))
        assert base.from_json(content) == recipe, name
        assert recipe.seeded(7) != recipe


BOTH = "average of Handwriting, JapaneseVowels"

# --- the table -----------------------------------------------------------------------------------


@pytest.fixture
def archive(tmp_path):
    """Two of the ten sets, tiny."""
    generator = np.random.default_rng(0)
    for name in ("Handwriting", "JapaneseVowels"):
        for part in ("TRAIN", "TEST"):
            lines = ["@univariate false", "@dimensions 2", "@classLabel true a b", "@data"]
            for case in range(20):
                series = generator.normal(size=(2, 12)) + 3 * (case % 2)
                channels = (",".join(f"{value:.3f}" for value in channel) for channel in series)
                lines.append(":".join([*channels, "ab"[case % 2]]))
            (tmp_path / f"{name}_{part}.ts").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.fixture
def small(monkeypatch):
    """The columns of the table, each as small as it goes."""

    def shrunk(build):
        def built(name):
            recipe = build(name)
            if not hasattr(recipe, "training"):
                return recipe
            encoder = replace(recipe.model.encoder, width=16, heads=2, rank=4, anchors=4)
            return replace(
                recipe,
                model=replace(recipe.model, encoder=encoder),
                training=replace(recipe.training, epochs=2),
            )

        return built

    monkeypatch.setattr(uea, "OURS", {title: shrunk(b) for title, b in uea.OURS.items()})


@pytest.mark.usefixtures("small")
def test_the_table(archive, tmp_path):
    said: list[str] = []
    store = tmp_path / "store"
    published, ours = uea.table(archive, store, seeds=2, device="cpu", say=said.append)
    assert len(said) == 2 * 8 * 2  # sets, columns, seeds
    assert published.rows[-1][0] == BOTH
    expected = np.mean([TABLE_1["Handwriting"][0], TABLE_1["JapaneseVowels"][0]])
    assert float(published.rows[-1][1]) == pytest.approx(expected, abs=0.051)
    table = {row[0]: row[1:] for row in ours.rows}
    assert all("± " in cell and "(2)" in cell for cell in table["Handwriting"])
    assert set(table["PEMS-SF"]) == {"missing"}
    for column, cell in enumerate(table[BOTH]):
        means = [float(table[n][column].split()[0]) for n in ("Handwriting", "JapaneseVowels")]
        assert float(cell) == pytest.approx(np.mean(means), abs=0.11)
    notes = " ".join(ours.notes)
    assert "best epoch by TEST accuracy" in notes
    assert "PEMS-SF" in notes
    assert "timeseriesclassification.com" in notes

    # What is there is not run again; another recipe's result is not taken for this one's.
    again: list[str] = []
    assert uea.table(archive, store, seeds=2, device="cpu", say=again.append)[1].rows == ours.rows
    assert not again
    (cell,) = store.glob("uea/Handwriting/transformer-paper-seed0.json")
    content = json.loads(cell.read_text())
    content["recipe"]["training"]["learning_rate"] = 0.5
    cell.write_text(json.dumps(content))
    uea.table(archive, store, seeds=2, device="cpu", say=again.append)
    assert len(again) == 1


@pytest.mark.usefixtures("small")
def test_a_part_of_the_table(archive, tmp_path):
    said: list[str] = []
    only = ["Handwriting", "transformer-honest"]
    options: dict[str, Any] = {"seeds": 1, "device": "cpu", "only": only, "say": said.append}
    _, ours = uea.table(archive, tmp_path / "store", show=True, **options)
    assert not said
    _, ours = uea.table(archive, tmp_path / "store", **options)
    assert len(said) == 1
    table = {row[0]: row[1:] for row in ours.rows}
    assert sum(bool(cell) for cell in table["Handwriting"]) == 1
    # JapaneseVowels is still to be run.
    assert [cell for cell in table["average of Handwriting"] if cell]
    assert BOTH not in table
    with pytest.raises(ValueError, match="Did you mean 'Handwriting'"):
        uea.table(archive, tmp_path, only=["Handwritin"])


def test_a_run_is_read_beside_the_papers_and_the_peers_numbers():
    found = {one.who: one for one in uea.default("JapaneseVowels").comparisons()}
    assert found["Primal.+"].value == pytest.approx(0.989)
    assert found["MultiRocketHydra"].value == pytest.approx(0.986)
    assert "best epoch by test accuracy" in found["Primal.+"].note
    assert {one.who for one in uea.closed_form("Libras").comparisons()} == {
        "MiniRocket",
        "MultiRocketHydra",
    }


def test_the_peers_numbers_are_those_that_were_measured():
    root = Path(__file__).parents[2]
    text = (root / "benchmarks/results/uea_peers_cpu_2026-11-19.md").read_text()
    readme = (root / "README.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    measured = {row[0]: row for row in rows if len(row) == 10 and row[0] in PEERS}
    assert measured.keys() == PEERS.keys()
    for name, row in measured.items():
        mini, hydra = PEERS[name].values()
        assert (float(row[4]), float(row[7])) == (mini, hydra)
        assert f"| {name} | {row[1]} | {row[4]} | {row[7]} |" in readme
