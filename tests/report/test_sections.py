"""The numbers on the page are those of the run."""

import re

import pytest

from primal.report.curves import learning_curves
from primal.report.html import Html, tag
from primal.report.mistakes import mistakes
from primal.report.outcome import outcome, wilson
from primal.report.predictions import predictions
from primal.report.run import read_run
from primal.report.settings import recipe
from primal.report.spectra import spectra


@pytest.fixture
def read(tmp_path, written, parts):
    """What reads a run of all parts, some of them changed."""

    def changed(**content):
        return read_run(written(tmp_path, {**parts.everything(), **content}))

    return changed


def words(markup: str | None) -> str:
    return " ".join(re.sub(r"<title>.*?</title>|<[^>]*>", " ", str(markup)).split())


def test_text_is_escaped_and_markup_is_not():
    made = tag("p", "a < b & c", tag("b", '"'), title='"<')
    assert made == '<p title="&quot;&lt;">a &lt; b &amp; c<b>&quot;</b></p>'
    assert isinstance(made, Html)


@pytest.mark.parametrize(("right", "cases"), [(0, 5), (5, 5), (362, 370), (1, 2)])
def test_the_interval_is_wilsons(right, cases):
    stats = pytest.importorskip("scipy.stats", reason="needs SciPy to compare with")
    expected = stats.binomtest(right, cases).proportion_ci(method="wilson")
    assert wilson(right, cases) == pytest.approx(tuple(expected), abs=1e-4)


def test_the_result_stands_in_order_among_others(read, parts):
    told = words(outcome(read(result=parts.result(value=0.95, comparisons=parts.OTHERS))))
    assert told.startswith("test accuracy 95.0 % 24 of 33 test cases; 95 % interval 55.8 to 84.9 %")
    assert "Transformer 98.7 % This run 95.0 % Primal.+ 88.9 %" in told
    assert "Transformer, Primal.+ : the paper&#x27;s; best epoch by test accuracy." in told


def test_of_errors_the_smallest_comes_first(read, parts):
    others = [{"who": "A", "value": 3.0, "note": ""}, {"who": "B", "value": 1.0, "note": ""}]
    given = parts.result("test/error", 2.0, comparisons=others)
    told = words(outcome(read(result=given)))
    assert "lower is better" in told
    assert "test error 2 root mean square, in the unit of the target" in told
    assert "B 1 This run 2 A 3" in told


def test_scores_per_class(read):
    rows = [["1", "a", "a", 1, 0], ["2", "a", "b", 0, 1], ["3", "b", "b", 0, 1]]
    header = ["case", "label", "predicted", "a", "b"]
    told = words(predictions(read(predictions=[header, *rows])))
    assert "a 100.0 50.0 66.7 2" in told
    assert "b 50.0 100.0 66.7 1" in told
    assert "mean 75.0 75.0 66.7 3" in told
    assert "a taken for b (1 time)" in told


def test_a_label_that_training_never_saw_has_a_row(read):
    rows = [["case", "label", "predicted", "a", "b"], ["1", "z", "a", 1, 0], ["2", "a", "a", 1, 0]]
    told = words(predictions(read(predictions=rows)))
    assert "z 0.0 0.0 0.0 1" in told
    assert "mean 25.0 50.0 33.3 2" in told  # of the classes that there are cases of


def test_of_many_classes_the_weakest_come_first(read, parts):
    rows = parts.guesses([f"sort {i}" for i in range(20)], wrong=0)
    rows[60][2] = "sort 0"  # a case of sort 5
    told = words(predictions(read(predictions=rows)))
    assert told.index("sort 5 100.0 90.9") < told.index("sort 0 91.7 100.0")
    assert "20 classes, lowest F1 first" in told


def test_errors_of_a_regression(read):
    rows = [["case", "label", "predicted"], ["1", 1, 2], ["2", 2, 2], ["3", 3, 0], ["4", 1, "nan"]]
    told = words(predictions(read(predictions=rows)))
    assert "3 test cases" in told
    assert "root mean square error 1.826" in told
    assert "mean absolute error 1.333" in told
    assert "largest absolute error 3" in told
    assert "mean error (bias) -0.6667" in told


def test_predictions_without_labels_show_nothing(read):
    assert predictions(read(predictions=[["case", "predicted", "a"], ["1", "a", 1]])) is None
    assert predictions(read(predictions=[["case", "label", "predicted", "a"]])) is None


def test_the_epoch_that_was_kept_is_marked(read, parts):
    rows = parts.curves(9)
    rows[3]["validation/accuracy"] = rows[5]["validation/accuracy"] = 0.99
    settings = {"name": "x", "recipe": {"training": {"select": "validation/accuracy"}}}
    chosen = str(learning_curves(read(metrics=rows, recipe=settings)))
    plain = str(learning_curves(read(metrics=rows)))
    assert chosen.count(">kept<") == 3
    assert ">kept<" not in plain
    (at,) = set(re.findall(r'd="M([\d.]+) [^"]*" class="mark"', chosen.partition("KSVD")[0]))
    ticks = dict(re.findall(r'<text x="([\d.]+)"[^>]*>(\d)</text>', chosen.partition("KSVD")[0]))
    assert ticks[at] == "4"  # the first of equals


def test_what_was_measured_once_is_a_point(read, parts):
    told = words(learning_curves(read(metrics=parts.curves(3))))
    assert told.count("test") == 2
    measured = [{**row, "test/accuracy": 0.5, "test/loss": 1.0} for row in parts.curves(3)]
    assert "test, once" not in str(learning_curves(read(metrics=measured)))


def test_the_objective_has_a_line_for_each_layer(read, parts):
    told = words(learning_curves(read(metrics=parts.curves(5, layers=3))))
    assert "layer 1 layer 2 layer 3" in told
    zeros = [{**row, "train/ksvd": 0.0, "train/ksvd/1": 0.0} for row in parts.curves(5, layers=1)]
    assert "KSVD" not in words(learning_curves(read(metrics=zeros)))


def test_irregular_times_stand_where_they_are(read, parts):
    case = {**parts.mistake(3, 1), "values": [[0.0, 1.0, 0.0]], "times": [0.0, 1.0, 10.0]}
    drawn = str(mistakes(read(mistakes={"cases": [case]})))
    (d,) = re.findall(r'd="([^"]*)" class="line"', drawn)
    first, second, third = (float(point.split()[0]) for point in d[1:].split("L"))
    assert (second - first) / (third - first) == pytest.approx(0.1, abs=0.01)
    assert "<small>0</small><small>time</small><small>10</small>" in drawn
    assert drawn.count('class="axis"') == 1 + 3


def test_missing_values_are_gaps_and_empty_channels_are_left_out(read, parts):
    case = {**parts.mistake(), "values": [[0, 1, None, 2, 3], [None] * 5], "times": None}
    drawn = str(mistakes(read(mistakes={"cases": [case]})))
    (d,) = re.findall(r'd="([^"]*)" class="line"', drawn)
    assert d.count("M") == 2
    assert "<small>0</small><small>time step</small><small>4</small>" in drawn
    assert "Each channel" not in drawn


def test_the_cumulative_curve_is_that_of_the_singular_values(read, parts):
    content = parts.spectrum(depth=1, heads=1, tokens=4)
    values = content["models"][1]["layers"][0]["singular_values"][0]
    shown = str(spectra(read(spectrum=content)))
    titles = re.findall(r"Transformer, layer 1: the first (\d) make up ([\d.]+) %", shown)
    for count, share in titles:
        expected = 100 * sum(values[: int(count)]) / sum(values)
        assert float(share) == pytest.approx(expected, abs=0.05)
    assert len(titles) == 4
    assert "PrimalFormer layer 1 primal" in words(shown)


def test_a_kernel_that_is_zero_is_drawn(read, parts):
    content = parts.spectrum(depth=1, heads=2, tokens=4)
    for model in content["models"]:
        model["layers"][0].update(singular_values=[[0.0] * 4] * 2, effective_rank=[0.0, 0.0])
    assert "nan" not in str(spectra(read(spectrum=content)))


def test_settings_have_the_names_the_command_line_takes(read):
    told = words(recipe(read()))
    assert "data.name Made data.path – training.epochs 9" in told


def test_nothing_to_say_is_no_section(read):
    run = read(metrics=[], mistakes={"cases": []}, spectrum={"models": []})
    assert [make(run) for make in (learning_curves, mistakes, spectra)] == [None] * 3
