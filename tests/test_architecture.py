"""The shape of the repository: who imports whom, what is public, what the README's tree shows."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

import pytest

import primal

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "primal"
FILES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"})

# A unit is a file or a folder directly in primal/. Lowest first; a unit imports from its own layer
# and from those before it. Units that are planned may be listed before they exist.
LAYERS = [
    {"backend", "errors", "settings"},
    {"kernels"},
    {"functional"},
    {"feature_maps", "layers", "projections", "time_encodings"},
    {"attention", "ksvd", "losses"},
    {"models"},
    {"data", "training"},
    {"integrations"},
    {"bench", "convert", "diagnostics", "recipes", "report"},
    {"screen"},
    {"__main__", "cli"},
]
LEVEL = {unit: level for level, layer in enumerate(LAYERS) for unit in layer}

# What the order alone does not say.
ONLY_IMPORTED_BY = {"kernels": {"functional"}}
NEVER_IMPORTED_BY = {"data": {"models"}, "models": {"data"}, "attention": {"data"}}

CORE = {
    "attention",
    "backend",
    "errors",
    "feature_maps",
    "functional",
    "kernels",
    "layers",
    "losses",
    "projections",
}

PUBLIC = [
    "Attention",
    "AttentionOutput",
    "Contextual",
    "Encoder",
    "EncoderConfig",
    "FeatureMap",
    "FromAnchors",
    "KSVD",
    "KSVDTerms",
    "PrimalAttention",
    "PrimalTimeSeriesClassifier",
    "PrimalTimeSeriesRegressor",
    "RobustAttention",
    "ScaledAttention",
    "SequenceClassifier",
    "Shared",
    "SoftmaxAttention",
    "build_encoder",
    "feature_map",
    "from_released",
    "ksvd_objective",
    "mask_from_lengths",
    "primal_plus",
    "primalformer",
    "with_ksvd",
]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the full name of everything the file imports, wherever in the file it does so."""
    package = ("primal", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def imported_units(path: Path) -> set[str]:
    return {
        module.split(".")[1] for module in imported_modules(path) if module.startswith("primal.")
    }


# --- who imports whom ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downwards(path):
    unit, others = unit_of(path), imported_units(path) - {unit_of(path)}
    assert unit in LEVEL, f"{unit} is in no layer: give it one"
    unknown = others - LEVEL.keys()
    assert not unknown, f"import {sorted(unknown)} from the file that defines it"
    upwards = {other for other in others if LEVEL[other] > LEVEL[unit]}
    assert not upwards, f"{unit} sits below {sorted(upwards)}"
    for other in others:
        assert unit in ONLY_IMPORTED_BY.get(other, {unit}), f"{unit} must do without {other}"
        assert unit not in NEVER_IMPORTED_BY.get(other, set()), f"{unit} knows nothing of {other}"


def test_every_layer_is_imported_by_name():
    assert not [name_of(path) for path in FILES if "primal" in imported_modules(path)]


@pytest.mark.parametrize("path", [f for f in FILES if unit_of(f) in CORE], ids=name_of)
def test_the_core_imports_torch_alone(path):
    foreign = {module.split(".")[0] for module in imported_modules(path)} - {"primal", "torch"}
    assert foreign <= sys.stdlib_module_names
    assert imported_units(path) <= CORE


# --- what is public ------------------------------------------------------------------------------


def test_public_names():
    assert sorted(primal.__all__) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    documentation = getattr(primal, name).__doc__
    assert documentation
    # What dataclass and NamedTuple write by themselves is no documentation.
    assert not re.match(rf"{name}\(", documentation)


# --- what an import costs ------------------------------------------------------------------------


# Public names that bring a foreign package with them; all others are torch alone.
HEAVY = {"KSVD", "PrimalTimeSeriesClassifier", "PrimalTimeSeriesRegressor"}


def test_import_is_fast_and_light():
    script = (
        "import sys, time, torch; before = set(sys.modules); start = time.perf_counter();"
        "import primal; [getattr(primal, name) for name in primal.__all__ if name not in "
        f"{sorted(HEAVY)!r}];"
        "print(time.perf_counter() - start, *{m.split('.')[0] for m in set(sys.modules) - before})"
    )
    seconds, loaded = [], set()
    for _ in range(3):
        command = [sys.executable, "-c", script]
        spent, *modules = subprocess.check_output(command, text=True, cwd=ROOT).split()
        seconds.append(float(spent))
        loaded.update(modules)
    heavy = {"matplotlib", "pandas", "rich", "scipy", "sklearn", "transformers", "tyro"}
    assert not loaded & heavy
    assert median(seconds) < 0.3


def test_importing_the_package_waits_for_nothing():
    script = "import sys, primal; assert 'torch' not in sys.modules; dir(primal)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_every_public_name_has_a_home():
    assert sorted(primal._HOME) == PUBLIC
    for name, module in primal._HOME.items():
        assert getattr(primal, name).__module__ == module


# --- the tree in the README ----------------------------------------------------------------------


def readme_tree() -> Iterator[str]:
    """Yield every path in the README's tree; a folder ends in a slash.

    The tree is the first fenced block with a line that begins with "primal/". A line holds a name,
    or several with one space between them, and after two spaces or more a clause about them. Two
    more spaces in front of a line put it into the folder above.
    """
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    tree = next(block for block in blocks if re.search(r"^primal/", block, flags=re.MULTILINE))
    folders: list[str] = []
    for line in filter(str.strip, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split(" ")
        assert depth <= len(folders), f"no folder above {line!r}"
        del folders[depth:]
        yield from ("".join(folders) + name for name in names)
        if len(names) == 1 and names[0].endswith("/"):
            folders += names


def test_every_path_in_the_readme_exists():
    wrong = [p for p in readme_tree() if (ROOT / p).is_dir() != p.endswith("/")]
    missing = [p for p in readme_tree() if not (ROOT / p).exists()]
    assert not missing + wrong


def test_every_path_is_in_the_readme():
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    top = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    kept = [path for path in top if not any(fnmatch(path.name, pattern) for pattern in ignored)]
    modules = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    wanted = {path.relative_to(ROOT).as_posix() + "/" * path.is_dir() for path in kept + modules}
    assert wanted <= set(readme_tree())
