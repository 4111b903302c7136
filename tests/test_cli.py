"""The command, as a person types it."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest

from primal import cli

SMALL = [
    *("--training.epochs", "3", "--model.encoder.width", "16", "--model.encoder.heads", "2"),
    *("--model.encoder.depth", "1", "--model.encoder.rank", "4", "--device", "cpu"),
]
RUN = ["run", "uea/JapaneseVowels", *SMALL, "--no-twin"]
PRIMAL = [sys.executable, "-m", "primal"]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PRIMAL_DATA", raising=False)  # JapaneseVowels comes with aeon
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def own_file(tmp_path):
    """A table as people keep them: irregular times, holes, names as labels."""
    generator = np.random.default_rng(0)
    path = tmp_path / "my.csv"
    with path.open("w", newline="") as opened:
        table = csv.writer(opened)
        table.writerow(["case", "time", "x", "y", "label"])
        for case in range(40):
            kind = case % 2
            times = np.cumsum(generator.exponential(1.0, 12)) + 1.7e9
            for t in times:
                x = np.sin((t - 1.7e9) * (1 + kind)) + 2 * kind + generator.normal() / 10
                y = "" if generator.random() < 0.1 else f"{generator.normal():.3f}"
                row = [f"c{case}", f"{t:.3f}", f"{x:.4f}", y, ("slow", "fast")[kind]]
                table.writerow(row)
    return path


# --- list, help ----------------------------------------------------------------------------------


def test_help_waits_for_nothing():
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        text = subprocess.check_output([*PRIMAL, "--help"], text=True)
        seconds.append(time.perf_counter() - started)
    for verb in ("list", "run", "predict", "report", "diagnose", "table"):
        assert re.search(rf"^ +{verb} ", text, flags=re.MULTILINE)
    assert median(seconds) < 0.5


def test_list(capsys):
    assert cli.main(["list"]) == 0
    everything = capsys.readouterr().out
    assert cli.main(["list", "JapaneseVowels"]) == 0
    some = capsys.readouterr().out
    for name in ("uea/JapaneseVowels", "timeseries", "uea/PEMS-SF/primal-plus"):
        assert f"\n{name} " in f"\n{everything}"
    assert "(paper 98.9)" in some
    assert all("JapaneseVowels" in line for line in some.splitlines())


def test_a_recipe_lists_its_fields(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "uea/JapaneseVowels", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for field in ("--data.path", "--training.epochs", "--model.encoder.rank", "--folder"):
        assert field in text


# --- a run, from a file to a page ----------------------------------------------------------------


def test_a_run_and_what_is_made_of_it(capsys):
    assert cli.main([*RUN, "--folder", "here"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"test/accuracy +\d+\.\d\d %", shown)
    assert "here/report.html" in shown
    assert "Primal.+" in shown
    folder = Path("here")
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == {
        "recipe.json",
        "environment.json",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "model.safetensors",
        "predictions.csv",
        "mistakes.json",
        "spectrum.json",
        "result.json",
        "report.html",
    }
    result = json.loads((folder / "result.json").read_text())
    with (folder / "predictions.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    right = np.mean([row["label"] == row["predicted"] for row in rows])
    assert len(rows) == 370
    assert result["value"] == pytest.approx(right)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3

    assert cli.main(["report", "here"]) == 0
    assert cli.main(["diagnose", "here"]) == 0
    assert "effective" in capsys.readouterr().out

    with pytest.raises(SystemExit) as stop:  # an option of another verb
        cli.main(["report", "here", "--training.epochs", "3"])
    assert stop.value.code == 2


def test_own_files(own_file, capsys):
    run = ["run", "timeseries", "--data.path", str(own_file), *SMALL, "--folder", "own"]
    assert cli.main(run) == 0
    assert "test/accuracy" in capsys.readouterr().out
    with own_file.open() as opened:
        rows = [row[:-1] for row in csv.reader(opened)]
    with Path("new.csv").open("w", newline="") as opened:
        csv.writer(opened).writerows(rows)  # without its labels
    assert cli.main(["predict", "own", "new.csv", "--out", "out.csv"]) == 0
    assert "40 cases" in capsys.readouterr().out
    with Path("out.csv").open() as opened:
        found = list(csv.DictReader(opened))
    assert list(found[0]) == ["case", "predicted", "fast", "slow"]
    assert [row["case"] for row in found] == [f"c{i}" for i in range(40)]
    assert all(float(r["fast"]) + float(r["slow"]) == pytest.approx(1, abs=2e-6) for r in found)


def test_own_files_in_closed_form(own_file, capsys):
    run = ["run", "timeseries-closed-form", "--data.path", str(own_file), "--folder", "own"]
    assert cli.main(run) == 0
    assert re.search(r"test/accuracy +100\.00 %", capsys.readouterr().out)
    assert cli.main(["predict", "own", str(own_file), "--out", "out.csv"]) == 0


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "uea/JapaneseVowel"], r"Did you mean 'uea/JapaneseVowels'\?"),
        (["run", "timeseries"], r"--data\.path FILE, or --data\.name NAME"),
        (["run", "uea/PEMS-SF"], r"not on this machine .* --data\.download"),
        (["run", "timeseries", "--data.path", "no.csv"], r"no\.csv"),
        ([*RUN, "--training.epochs", "0"], r"epochs must be a positive integer, got 0"),
        ([*RUN, "--training.optimizer", "sgd"], r"sgd"),
        ([*RUN, "--training.epoch", "3"], r"--training\.epochs"),
        ([*RUN, "--resume", "nowhere"], r"nowhere holds no run"),
        (["predict", "nowhere", "x.csv", "--out", "y.csv"], r"nowhere has no recipe\.json"),
        (["report", "nowhere"], r"nowhere with neither result\.json"),
        (["diagnose", "nowhere"], r"nowhere has no spectrum\.json"),
        (["list", "nothing"], r"`primal list` lists all"),
        (["table", "uea", "--only", "JapaneseVowel"], r"Did you mean 'JapaneseVowels'\?"),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_errors_say_what_to_do(arguments, said, capsys):
    try:
        status: Any = cli.main(arguments)
    except SystemExit as stop:  # the parsers' own way
        status = stop.code
    assert status == 2
    told = capsys.readouterr()
    assert re.search(said, told.err + told.out)
    assert "Traceback" not in told.err


def test_two_runs_into_one_folder(capsys):
    assert cli.main([*RUN, "--folder", "here"]) == 0
    assert cli.main([*RUN, "--folder", "here"]) == 2
    assert "here holds a run already" in capsys.readouterr().err


def test_a_run_that_never_began_claims_no_folder(own_file, capsys):
    whole = own_file.read_text()
    own_file.write_text(whole.replace("slow", "fast"))
    run = ["run", "timeseries", "--data.path", str(own_file), *SMALL, "--folder", "own"]
    assert cli.main(run) == 2
    assert "at least two classes" in capsys.readouterr().err
    own_file.write_text(whole)
    assert cli.main(run) == 0


def test_a_resumption_wants_the_same_settings(capsys):
    assert cli.main([*RUN, "--folder", "here"]) == 0
    assert cli.main([*RUN, "--training.learning-rate", "0.1", "--resume", "here"]) == 2
    assert "other settings" in capsys.readouterr().err


# --- signals, processes --------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_resume(number):
    longer = [*RUN, "--training.epochs", "12"]
    subprocess.run([*PRIMAL, *longer, "--folder", "whole"], check=True, capture_output=True)
    with subprocess.Popen(
        [*PRIMAL, *longer], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("epoch"):
                run.send_signal(number)
                break
        _, told = run.communicate(timeout=60)
    assert run.returncode == 128 + number
    assert "Traceback" not in told
    again = re.search(r"go on with\n +(primal .*)", told)
    assert again
    assert "--resume runs/uea/JapaneseVowels/" in again[1]
    resumed = subprocess.run(
        [*PRIMAL, *longer, "--resume", "auto"], check=True, capture_output=True, text=True
    )
    (folder,) = Path("runs/uea/JapaneseVowels").iterdir()
    assert str(folder) in resumed.stdout
    for name in ("predictions.csv", "mistakes.json", "spectrum.json"):
        assert (folder / name).read_bytes() == (Path("whole") / name).read_bytes()


def test_torchrun_gives_the_result_of_one_process():
    """270 cases are 8 batches of 32 and one of 14; of 37, two processes get 19 and 18."""
    # Every process draws its own dropout.
    run = [*RUN, "--model.encoder.dropout", "0", "--training.batch-size", "37"]
    assert cli.main([*run, "--folder", "one"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run(
        [*torchrun, "--standalone", "-m", "primal", *run, "--folder", "two"],
        check=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    one, two = (
        [json.loads(line) for line in (Path(name) / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert len(one) == 3
    for alone, shared in zip(one, two, strict=True):
        for name in ("train/loss", "train/ksvd", "train/score"):
            assert shared[name] == pytest.approx(alone[name], rel=1e-4)
    accuracy = [json.loads((Path(n) / "result.json").read_text())["value"] for n in ("one", "two")]
    assert accuracy[0] == pytest.approx(accuracy[1], abs=1 / 370)
