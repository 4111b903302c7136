"""KSVD: scikit-learn's contract, the theorem (primal = dual = SVD, J = 0), cost, and errors."""

import pickle
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.decomposition import KernelPCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import linear_kernel, polynomial_kernel, rbf_kernel
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import parametrize_with_checks

from primal import ksvd
from primal.feature_maps import feature_map
from primal.ksvd import KSVD

SOLVERS = ["exact", "randomized", "nystrom"]


def query_map(rows):
    return np.tanh(rows @ np.linspace(-1, 1, rows.shape[1] * 5).reshape(-1, 5))


def key_map(rows):
    return np.sin(rows @ np.linspace(1, -2, rows.shape[1] * 5).reshape(-1, 5) ** 3)


class LowRankKernel:
    """Of rank 5, asymmetric; a class, because test ids must not hold a function's address."""

    def __call__(self, left, right):
        return query_map(left) @ key_map(right).T

    def __repr__(self):
        return "low_rank_kernel"


low_rank_kernel = LowRankKernel()


def attention_kernel(left, right):  # full rank, asymmetric
    return np.exp(left @ np.roll(right, 1, axis=1).T / 2)


PAIR = (query_map, key_map)


@pytest.fixture
def views():
    random = np.random.default_rng(0)
    return random.normal(size=(40, 4)), random.normal(size=(30, 4))


def both_centred(matrix):
    return matrix - matrix.mean(axis=0) - matrix.mean(axis=1)[:, None] + matrix.mean()


def same_up_to_signs(actual, expected, atol=1e-10):
    signs = np.sign(np.sum(actual * expected, axis=0))
    np.testing.assert_allclose(actual, expected * signs, atol=atol)


# --- the scikit-learn contract ------------------------------------------------------------------


@parametrize_with_checks(
    [
        KSVD(),
        KSVD(center=True),
        KSVD(feature_map=np.tanh),
        KSVD(feature_map=(np.tanh, np.sin), center=True),
        KSVD(n_components=1, kernel="rbf"),
        KSVD(kernel=low_rank_kernel),
        *(KSVD(kernel="rbf", solver=solver) for solver in SOLVERS),
        *(KSVD(kernel="rbf", solver=solver, center=True, n_landmarks=20) for solver in SOLVERS),
    ]
)
def test_follows_the_scikit_learn_contract(estimator, check):
    check(estimator)


def test_a_1d_target_is_ignored_and_a_2d_second_argument_is_the_second_view(views):
    X, Z = views
    alone, target = KSVD().fit(X), KSVD().fit(X, np.arange(len(X)))
    np.testing.assert_array_equal(alone.singular_values_, target.singular_values_)
    positional, named = KSVD().fit(X, Z), KSVD().fit(X, Z=Z)
    np.testing.assert_array_equal(positional.singular_values_, named.singular_values_)
    assert not np.allclose(alone.singular_values_, named.singular_values_)
    with pytest.raises(TypeError, match=r"[Ss]parse"):
        KSVD().fit(X, csr_array(Z))  # 2-D, so refused as a view and not passed over as a target
    many_targets = KSVD().fit(X, np.ones((40, 4)), Z=Z)
    np.testing.assert_array_equal(many_targets.singular_values_, named.singular_values_)


def test_works_in_a_pipeline_and_a_grid_search(views):
    X = views[0].copy()
    X[:20] += 2
    pipeline = make_pipeline(KSVD(kernel="rbf", random_state=0), LogisticRegression())
    grid = {"ksvd__n_components": np.arange(1, 4), "ksvd__solver": SOLVERS}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(X, np.arange(40) < 20)
    assert search.best_score_ > 0.9


@pytest.mark.parametrize("arguments", [{"feature_map": PAIR}, {"kernel": "rbf"}])
def test_survives_pickling_and_names_its_features(views, arguments):
    X, Z = views
    model = KSVD(n_components=3, **arguments).fit(X, Z)
    copy = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(copy.left_scores(X), model.left_scores(X))
    np.testing.assert_array_equal(copy.right_scores(Z), model.right_scores(Z))
    assert list(model.get_feature_names_out()) == ["ksvd0", "ksvd1", "ksvd2"]
    assert not hasattr(clone(model), "singular_values_")
    frame = model.set_output(transform="pandas").transform(X)
    np.testing.assert_array_equal(frame.to_numpy(), model.left_scores(X))


def test_the_dual_keeps_its_own_copy_of_the_data(views):
    X, Z = views[0].copy(), views[1].copy()
    model = KSVD(kernel="rbf").fit(X, Z)
    before = model.left_scores(views[0]), model.right_scores(views[1])
    X[:], Z[:] = 0, 0
    np.testing.assert_array_equal(model.left_scores(views[0]), before[0])
    np.testing.assert_array_equal(model.right_scores(views[1]), before[1])


def test_a_second_fit_forgets_the_first(views):
    X, Z = views
    model = KSVD(kernel="rbf").fit(X, Z)
    model.set_params(kernel="linear").fit(X)
    assert set(vars(model)) == set(vars(KSVD().fit(X)))


@pytest.mark.parametrize("arguments", [{}, {"kernel": "rbf"}])
def test_scores_keep_the_dtype_and_are_computed_in_float64(views, arguments):
    X, Z = (view.astype(np.float32) for view in views)
    model = KSVD(**arguments).fit(X, Z)
    assert model.left_scores(X).dtype == model.right_scores(Z).dtype == np.float32
    exact = KSVD(**arguments).fit(X.astype(np.float64), Z.astype(np.float64))
    np.testing.assert_allclose(model.singular_values_, exact.singular_values_, rtol=1e-12)


def test_importing_it_does_not_import_torch():
    # An empty parent package, so that only what ksvd.py itself imports counts.
    program = (
        "import sys, types; package = types.ModuleType('primal'); "
        f"package.__path__ = [{str(Path(ksvd.__file__).parent)!r}]; "
        "sys.modules['primal'] = package; "
        "from primal.ksvd import KSVD; KSVD().fit([[1.0, 2.0], [3.0, 5.0]]); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


# --- the theorem --------------------------------------------------------------------------------


@pytest.mark.parametrize("center", [False, True])
def test_the_dual_is_the_svd_of_numpy(views, center):
    X, Z = views
    matrix = attention_kernel(X, Z)
    u, values, v = np.linalg.svd(both_centred(matrix) if center else matrix)
    model = KSVD(n_components=4, kernel=attention_kernel, center=center).fit(X, Z)
    np.testing.assert_allclose(model.singular_values_, values[:4], rtol=1e-12)
    same_up_to_signs(model.left_vectors_, u[:, :4])
    same_up_to_signs(model.right_vectors_, v[:4].T)


@pytest.mark.parametrize("center", [False, True])
def test_the_primal_is_the_svd_of_numpy(views, center):
    X, Z = views
    matrix = low_rank_kernel(X, Z)
    u, values, v = np.linalg.svd(both_centred(matrix) if center else matrix)
    model = KSVD(n_components=4, feature_map=PAIR, center=center).fit(X, Z)
    np.testing.assert_allclose(model.singular_values_, values[:4], rtol=1e-10)
    same_up_to_signs(model.left_scores(X), u[:, :4] * values[:4])
    same_up_to_signs(model.right_scores(Z), v[:4].T * values[:4])
    same_up_to_signs(model.left_weights_, key_map(Z).T @ v[:4].T)  # W_e = Φ_kᵀ H_r, 1ᵀH_r = 0
    same_up_to_signs(model.right_weights_, query_map(X).T @ u[:, :4])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.tuples(*[st.integers(1, 12)] * 3),
    seed=st.integers(0, 10**6),
    center=st.booleans(),
    data=st.data(),
)
def test_the_primal_is_the_svd_of_numpy_whatever_the_sizes(sizes, seed, center, data):
    rows, columns, width = sizes
    components = data.draw(st.integers(1, min(sizes)))
    random = np.random.default_rng(seed)
    X, Z = random.normal(size=(rows, width)), random.normal(size=(columns, width))
    matrix = both_centred(X @ Z.T) if center else X @ Z.T
    u, values, v = np.linalg.svd(matrix, full_matrices=False)
    model = KSVD(components, center=center).fit(X, Z)
    np.testing.assert_allclose(model.singular_values_, values[:components], atol=1e-10)
    if np.all(-np.diff(values)[:components] > 1e-3):  # else the leading part is not unique
        inverse = np.linalg.pinv(np.diag(model.singular_values_))
        rebuilt = model.left_scores(X) @ inverse @ model.right_scores(Z).T
        leading = (u * values)[:, :components] @ v[:components]
        np.testing.assert_allclose(rebuilt, leading, atol=1e-8)


@pytest.mark.parametrize("two_views", [False, True])
@pytest.mark.parametrize("center", [False, True])
def test_primal_and_dual_agree_on_seen_and_unseen_rows(views, center, two_views):
    X, Z = views
    second = Z if two_views else None
    primal = KSVD(n_components=3, feature_map=PAIR, center=center).fit(X, Z=second)
    dual = KSVD(n_components=3, kernel=low_rank_kernel, center=center).fit(X, Z=second)
    np.testing.assert_allclose(primal.singular_values_, dual.singular_values_, rtol=1e-10)
    for rows in (X, Z, np.random.default_rng(1).normal(size=(7, 4))):
        same_up_to_signs(primal.left_scores(rows), dual.left_scores(rows))
        same_up_to_signs(primal.right_scores(rows), dual.right_scores(rows))
    products = primal.left_scores(Z) * primal.right_scores(Z)  # blind to signs only if both agree
    np.testing.assert_allclose(products, dual.left_scores(Z) * dual.right_scores(Z), atol=1e-10)


ALL_ROUTES = [
    {"feature_map": PAIR},
    {"kernel": low_rank_kernel, "solver": "exact"},
    {"kernel": low_rank_kernel, "solver": "randomized"},
    {"kernel": low_rank_kernel, "solver": "nystrom", "n_landmarks": 12},
]


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("route", ALL_ROUTES, ids=["primal", *SOLVERS])
class TestEveryRoute:
    def test_the_objective_vanishes_on_the_training_data_alone(self, views, route, center):
        X, Z = views
        model = KSVD(n_components=3, random_state=0, center=center, **route).fit(X, Z)
        scale = model.singular_values_.sum()
        assert abs(model.objective(X, Z)) < 1e-10 * scale
        assert abs(model.objective(2 * X, Z)) > 1e-2 * scale

    def test_training_scores_are_the_scaled_singular_vectors(self, views, route, center):
        X, Z = views
        model = KSVD(n_components=3, random_state=0, center=center, **route).fit(X, Z)
        matrix = low_rank_kernel(X, Z)
        u, values, v = np.linalg.svd(both_centred(matrix) if center else matrix)
        left, right = model.transform(X), model.right_scores(Z)
        same_up_to_signs(left, u[:, :3] * values[:3], atol=1e-9)
        same_up_to_signs(right, v[:3].T * values[:3], atol=1e-9)
        # Left and right signs belong together: eᵀ K r = Σ³.
        np.testing.assert_allclose(left.T @ matrix @ right, np.diag(values[:3] ** 3), atol=1e-6)

    def test_one_view_is_two_equal_views(self, views, route, center):
        X, unseen = views
        model = KSVD(n_components=3, random_state=0, center=center, **route)
        one, two = clone(model).fit(X), clone(model).fit(X, X)
        np.testing.assert_allclose(one.singular_values_, two.singular_values_, rtol=1e-9)
        same_up_to_signs(one.left_scores(unseen), two.left_scores(unseen), atol=1e-8)
        same_up_to_signs(one.right_scores(unseen), two.right_scores(unseen), atol=1e-8)

    def test_components_beyond_the_rank_are_zero(self, views, route, center):
        X, Z = views
        X, Z = X.copy(), Z.copy()
        X[:, 1:], Z[:, 1:] = 0, 0
        X[X < 0], Z[Z < 0] = -1, -1
        X[X > 0], Z[Z > 0] = 2, 2  # two distinct rows in each view: rank 2, or 1 if centred
        model = KSVD(n_components=4, random_state=0, center=center, **route).fit(X, Z)
        rank = 1 if center else 2
        assert np.all(model.singular_values_[:rank] > 1e-3)
        for zero in (model.singular_values_, model.left_scores(2 * X), model.right_scores(2 * Z)):
            np.testing.assert_array_equal(zero[..., rank:], 0)
        assert abs(model.objective(X, Z)) < 1e-9


@pytest.mark.parametrize("route", ALL_ROUTES[:3], ids=["primal", "exact", "randomized"])
def test_signs_do_not_depend_on_the_order_of_the_rows(views, route):
    X, Z = views
    model = KSVD(n_components=3, random_state=0, **route).fit(X, Z)
    turned = clone(model).fit(X[::-1], Z[::-1])
    np.testing.assert_allclose(turned.left_scores(X), model.left_scores(X), atol=1e-7)
    np.testing.assert_allclose(turned.right_scores(Z), model.right_scores(Z), atol=1e-7)


@pytest.mark.parametrize(
    "route",
    [{"kernel": "rbf", "solver": solver} for solver in SOLVERS] + [{"feature_map": np.tanh}],
    ids=[*SOLVERS, "primal"],
)
def test_a_symmetric_psd_kernel_has_equal_sides(views, route):
    X, unseen = views
    model = KSVD(n_components=3, random_state=0, **route).fit(X)
    np.testing.assert_allclose(model.left_scores(X), model.right_scores(X), atol=1e-6)
    np.testing.assert_allclose(model.left_scores(unseen), model.right_scores(unseen), atol=1e-6)
    few = clone(model).set_params(n_landmarks=9).fit(X)
    np.testing.assert_allclose(few.left_scores(unseen), few.right_scores(unseen), atol=1e-6)


def test_an_asymmetric_kernel_has_not(views):
    X, _ = views
    model = KSVD(n_components=3, kernel=attention_kernel).fit(X)
    overlap = np.abs(np.sum(model.left_vectors_ * model.right_vectors_, axis=0))
    assert overlap.max() < 0.99


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_centred_symmetric_psd_kernel_is_kernel_pca(views, solver):
    X, unseen = views
    pca = KernelPCA(n_components=3, kernel="rbf", gamma=0.1).fit(X)
    model = KSVD(
        n_components=3, kernel="rbf", kernel_params={"gamma": 0.1}, solver=solver, center=True
    ).fit(X)
    np.testing.assert_allclose(model.singular_values_, pca.eigenvalues_, rtol=1e-7)
    scale = np.sqrt(model.singular_values_)  # KPCA's scores are H_e Σ^½
    same_up_to_signs(model.left_scores(unseen) / scale, pca.transform(unseen), atol=1e-6)


def test_centring_survives_a_large_mean(views):
    X, Z = views
    near = KSVD(n_components=3, center=True).fit(X, Z)
    far = KSVD(n_components=3, center=True).fit(X + 1e6, Z - 1e6)
    np.testing.assert_allclose(far.singular_values_, near.singular_values_, rtol=1e-8)
    np.testing.assert_allclose(far.left_scores(Z + 1e6), near.left_scores(Z), atol=1e-6)


@pytest.mark.parametrize("kernel", ["linear", linear_kernel])
@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_the_scale_of_the_data_does_not_change_the_rank(views, kernel, scale):
    X, Z = views
    X, Z = X[:, [0, 1, 0, 1]], Z[:, [0, 1, 1, 1]]  # rank 2
    model = KSVD(n_components=4, kernel=kernel, center=True)
    values = clone(model).fit(X, Z).singular_values_
    scaled = clone(model).fit(scale * X, scale * Z).singular_values_
    assert np.count_nonzero(values) == 2
    np.testing.assert_allclose(scaled / scale**2, values, rtol=1e-8)


# --- streams ------------------------------------------------------------------------------------


def fed(model, X, Z, cuts_left, cuts_right):
    for left, right in zip(np.split(X, cuts_left), np.split(Z, cuts_right), strict=True):
        model.partial_fit(left, right)
    return model


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize(
    ("cuts_left", "cuts_right"),
    [([1, 2, 30], [7, 8, 29]), ([39], [1]), (range(1, 30), range(1, 30))],
)
def test_batches_of_any_length_give_the_same_solution(views, center, cuts_left, cuts_right):
    X, Z = views
    whole = KSVD(n_components=4, feature_map=PAIR, center=center).fit(X, Z)
    parts = fed(clone(whole), X, Z, cuts_left, cuts_right)
    for name in ("singular_values_", "left_weights_", "right_weights_", "left_offset_"):
        np.testing.assert_allclose(getattr(parts, name), getattr(whole, name), atol=1e-10)
    np.testing.assert_allclose(parts.right_scores(X), whole.right_scores(X), atol=1e-10)


def test_partial_fit_of_one_view_continues_a_fit(views, monkeypatch):
    X, _ = views
    whole = KSVD(n_components=3, feature_map=PAIR, center=True).fit(X)
    parts = clone(whole).fit(X[:11]).partial_fit(X[11:13]).partial_fit(X[13:])
    np.testing.assert_allclose(parts.left_scores(X), whole.left_scores(X), atol=1e-10)
    monkeypatch.setattr(ksvd, "BLOCK_ENTRIES", 20)
    blocks = clone(whole).fit(X)
    np.testing.assert_allclose(blocks.left_scores(X), whole.left_scores(X), atol=1e-10)


def test_before_the_rows_suffice_the_missing_components_are_zero(views):
    X, _ = views
    model = KSVD(n_components=3, center=True).partial_fit(X[:1])
    np.testing.assert_array_equal(model.singular_values_, 0)
    np.testing.assert_array_equal(model.transform(X), 0)
    model.partial_fit(X[1:])
    expected = KSVD(n_components=3, center=True).fit(X)
    np.testing.assert_allclose(model.transform(X), expected.transform(X), atol=1e-10)


def test_centring_may_be_decided_after_the_data_has_passed(views):
    X, _ = views
    late = KSVD().partial_fit(X[:20]).set_params(center=True).partial_fit(X[20:])
    expected = KSVD(center=True).fit(X)
    np.testing.assert_allclose(late.singular_values_, expected.singular_values_, rtol=1e-10)


# --- cost ---------------------------------------------------------------------------------------


def peak_memory(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_primal_never_forms_the_kernel_matrix():
    X = np.random.default_rng(0).normal(size=(20_000, 16))
    model = KSVD(n_components=4, center=True)
    peak = peak_memory(lambda: model.fit(X).right_scores(X))
    assert peak < 16 * X.nbytes  # K would take 1250 times the memory of X


def test_the_memory_of_the_primal_does_not_grow_with_the_rows(monkeypatch):
    monkeypatch.setattr(ksvd, "BLOCK_ENTRIES", 2**12)
    X = np.random.default_rng(0).normal(size=(40_000, 8))
    short, long = (peak_memory(lambda n=n: KSVD().fit(X[:n])) for n in (10_000, 40_000))
    assert long < 1.1 * short + 10_000


class CountingKernel:
    """Counts the entries of the largest block it is asked for, and of all blocks."""

    def __init__(self):
        self.largest = self.total = 0

    def __call__(self, left, right):
        self.largest = max(self.largest, len(left) * len(right))
        self.total += len(left) * len(right)
        return rbf_kernel(left, right, gamma=0.5)


@pytest.mark.parametrize("solver", ["randomized", "nystrom"])
def test_large_duals_see_the_kernel_matrix_in_blocks(solver, monkeypatch):
    monkeypatch.setattr(ksvd, "BLOCK_ENTRIES", 2**16)
    X, Z = np.random.default_rng(0).normal(size=(2, 1500, 3))
    kernel = CountingKernel()
    model = KSVD(n_components=4, kernel=kernel, solver=solver, center=True, random_state=0)
    peak = peak_memory(lambda: model.fit(X, Z[:1200]).right_scores(Z))
    assert kernel.largest <= 1.5 * 2**16  # 256 landmarks give 192 features
    assert kernel.total < 13 * 1500 * 1500
    assert peak < 1500 * 1200 * 8 / 2


def test_randomized_finds_the_leading_part_of_a_decaying_spectrum(monkeypatch):
    monkeypatch.setattr(ksvd, "BLOCK_ENTRIES", 500)
    X, Z = np.random.default_rng(0).normal(size=(2, 300, 3))
    exact = KSVD(n_components=6, kernel=attention_kernel, solver="exact").fit(X, Z[:200])
    model = KSVD(n_components=6, kernel=attention_kernel, solver="randomized", random_state=0)
    model.fit(X, Z[:200])
    np.testing.assert_allclose(model.singular_values_, exact.singular_values_, rtol=1e-8)
    same_up_to_signs(model.left_vectors_, exact.left_vectors_, atol=1e-5)
    same_up_to_signs(model.right_vectors_, exact.right_vectors_, atol=1e-5)
    identity = model.right_vectors_.T @ model.right_vectors_
    np.testing.assert_allclose(identity, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("center", [False, True])
def test_nystrom_with_all_landmarks_is_exact(views, center):
    X, Z = views
    model = KSVD(n_components=3, kernel=attention_kernel, center=center, solver="nystrom")
    exact = clone(model).set_params(solver="exact").fit(X, Z)
    model.fit(X, Z)
    np.testing.assert_allclose(model.singular_values_, exact.singular_values_, rtol=1e-7)
    same_up_to_signs(model.left_scores(X), exact.left_scores(X), atol=1e-6)
    same_up_to_signs(model.right_scores(Z), exact.right_scores(Z), atol=1e-6)


def test_nystrom_with_few_landmarks_is_close_on_a_smooth_kernel():
    X, unseen = np.random.default_rng(0).normal(size=(2, 500, 2))
    smooth = partial(KSVD, n_components=3, kernel="rbf", kernel_params={"gamma": 0.1})
    exact = smooth(solver="exact").fit(X)
    model = smooth(solver="nystrom", n_landmarks=60, random_state=0).fit(X)
    assert model.left_weights_.shape == (45, 3)
    np.testing.assert_allclose(model.singular_values_, exact.singular_values_, rtol=1e-3)
    same_up_to_signs(model.left_scores(unseen), exact.left_scores(unseen), atol=1e-2)


def test_nystrom_is_stable_whatever_landmarks_two_views_draw():
    X, Z = np.random.default_rng(0).normal(size=(2, 400, 4))
    smooth = partial(KSVD, n_components=4, kernel="rbf", kernel_params={"gamma": 0.1})
    exact = smooth(solver="exact").fit(X, Z).singular_values_
    for seed in range(20):  # inverting the whole of κ(L_X, L_Z) fails for some of these
        model = smooth(solver="nystrom", n_landmarks=50, random_state=seed).fit(X, Z)
        np.testing.assert_allclose(model.singular_values_, exact, rtol=0.03)


def test_auto_goes_from_exact_to_randomized_to_nystrom(views, monkeypatch):
    X, _ = views
    assert KSVD(kernel="rbf").fit(X).solver_ == "exact"
    monkeypatch.setattr(ksvd, "EXACT_ENTRIES", 1599)
    assert KSVD(kernel="rbf").fit(X).solver_ == "randomized"
    monkeypatch.setattr(ksvd, "RANDOMIZED_ENTRIES", 1599)
    assert KSVD(kernel="rbf").fit(X).solver_ == "nystrom"
    assert KSVD().fit(X).solver_ == "exact"


# --- feature maps of torch ----------------------------------------------------------------------


def test_the_feature_maps_of_primal_are_feature_maps(views):
    X, Z = views
    phi = feature_map("polynomial", width=4)  # (1 + xᵀz / √D)², D = 4
    primal = KSVD(n_components=3, feature_map=phi).fit(X, Z)
    parameters = {"degree": 2, "gamma": 0.5, "coef0": 1}
    dual = KSVD(n_components=3, kernel=polynomial_kernel, kernel_params=parameters).fit(X, Z)
    np.testing.assert_allclose(primal.singular_values_, dual.singular_values_, rtol=1e-10)
    same_up_to_signs(primal.left_scores(Z), dual.left_scores(Z))


def test_a_module_is_called_in_its_own_dtype_without_gradient(views):
    X, Z = views
    query, key = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
    model = KSVD(n_components=3, feature_map=(query, key)).fit(X, Z)
    with torch.no_grad():
        left, right = query(torch.from_numpy(X).float()), key(torch.from_numpy(Z).float())
    expected = np.linalg.svd(left.double().numpy() @ right.double().numpy().T, compute_uv=False)
    np.testing.assert_allclose(model.singular_values_, expected[:3], rtol=1e-12)
    assert query.weight.dtype == torch.float32


# --- errors -------------------------------------------------------------------------------------


def not_finite(rows):
    return np.full((len(rows), 3), np.nan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_components": 0}, "n_components must be a positive integer, got 0"),
        ({"n_components": 5}, "at most 4, the number of features, got n_components=5"),
        ({"n_components": 31, "kernel": "rbf"}, "at most 30, the number of rows of Z, got"),
        (
            {"n_components": 9, "kernel": "rbf", "solver": "nystrom", "n_landmarks": 8},
            "at most 8, the number of landmarks",
        ),
        ({"n_landmarks": 2.5}, "n_landmarks must be a positive integer, got 2.5"),
        ({"kernel": "rbf", "solver": "arpack"}, "solver must be one of .* got 'arpack'"),
        ({"kernel": "rfb"}, "kernel must be one of .* Did you mean 'rbf'?"),
        (
            {"solver": "nystrom"},
            "requires solver 'auto' or 'exact', got 'nystrom'; .*linear_kernel",
        ),
        ({"feature_map": np.tanh, "kernel": "rbf"}, "requires no kernel and no kernel_params"),
        ({"kernel_params": {"gamma": 1}}, "requires no kernel and no kernel_params"),
        ({"feature_map": "cosine"}, "feature_map must be one callable .* got 'cosine'"),
        ({"feature_map": (np.tanh,)}, "or a pair .* of them, got"),
        ({"feature_map": np.sum}, r"feature_map must return shape \(1, 'P'\)"),
        ({"feature_map": lambda x: x[:1].repeat(3, axis=0)}, r"must return .*got \(3, 4\)"),
        ({"feature_map": not_finite}, "feature_map must return finite numbers"),
        ({"kernel": lambda x, z: z @ x.T}, r"kernel must return shape \(40, 30\) .*got \(30, 40\)"),
        ({"kernel": lambda x, z: x @ z.T + np.inf}, "kernel must return finite numbers"),
        (
            {"feature_map": (np.tanh, lambda z: z[:, :3])},
            "same width P, got 4 for X .* and 3 for Z",
        ),
    ],
)
def test_errors_say_what_is_required_and_what_was_given(views, arguments, message):
    with pytest.raises(ValueError, match=message):
        KSVD(**arguments).fit(*views)


def test_views_of_different_width_need_maps_of_equal_width(views):
    X, Z = views
    with pytest.raises(ValueError, match="got 4 for X of width 4 and 2 for Z of width 2; a pair"):
        KSVD().fit(X, Z[:, :2])
    model = KSVD(feature_map=(lambda x: x[:, :2], np.sin)).fit(X, Z[:, :2])
    assert model.right_scores(Z[:, :2]).shape == (30, 2)
    with pytest.raises(ValueError, match="Z must have 2 features, as the second view had in fit"):
        model.right_scores(Z)


def test_partial_fit_says_what_it_cannot_do(views):
    X, Z = views
    with pytest.raises(AttributeError) as error:  # as scikit-learn: the method is not there at all
        KSVD(kernel="rbf").partial_fit(X)
    assert "requires an explicit feature map" in str(error.value.__cause__)
    assert "got kernel='rbf'" in str(error.value.__cause__)
    with pytest.raises(ValueError, match="every batch must give both X and Z, as the first did"):
        KSVD().partial_fit(X, Z).partial_fit(X)
    with pytest.raises(ValueError, match="every batch must give X alone"):
        KSVD().fit(X).partial_fit(X, Z)


def test_a_batch_that_fails_leaves_the_model_as_it_was(views):
    X, Z = views
    model = KSVD(feature_map=(np.tanh, np.log)).fit(X, np.abs(Z))
    before = model.left_factor_.copy()
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="finite"):
        model.partial_fit(X, Z)
    np.testing.assert_array_equal(model.left_factor_, before)


def test_a_matrix_on_which_lapack_gives_up(monkeypatch):
    """Divide and conquer does, on a rare matrix; its transpose has the same triplets."""
    matrix, solve = np.random.default_rng(0).normal(size=(9, 5)), np.linalg.svd

    def failing(a, **options):
        if a.shape == matrix.shape:
            raise np.linalg.LinAlgError("SVD did not converge")
        return solve(a, **options)

    monkeypatch.setattr(np.linalg, "svd", failing)
    u, values, v = ksvd._svd(matrix)
    np.testing.assert_allclose(u * values @ v.T, matrix, atol=1e-12)
    assert (u.shape, v.shape) == ((9, 5), (5, 5))
