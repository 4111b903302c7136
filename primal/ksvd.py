"""Kernel SVD (KSVD): the leading singular vectors of an asymmetric kernel matrix, as an estimator.

Two views X (N rows) and Z (M rows) and a kernel κ(x, z), not necessarily symmetric, give the N×M
matrix K_ij = κ(x_i, z_j); self-attention is the case Z = X. KSVD is the truncated SVD of K written
as a kernel machine, whose scores extend to unseen points (Suykens, "SVD revisited", 2016; Chen,
Tao, Tonin, Suykens, "Primal-Attention", NeurIPS 2023):

    K H_r = H_e Σ                   Kᵀ H_e = H_r Σ
    dual      e(x) = Σ_j h_{r,j} κ(x, z_j)    r(z) = Σ_i h_{e,i} κ(x_i, z)
    primal    e(x) = W_eᵀ φ_q(x)              r(z) = W_rᵀ φ_k(z)      if κ(x, z) = φ_q(x)ᵀ φ_k(z)
    linked by W_e = Φ_kᵀ H_r                  W_r = Φ_qᵀ H_e

At the training points e = H_e Σ and r = H_r Σ.
Letters: N, M rows of X and Z; D, P width of data and of features; S components; L landmarks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.metrics.pairwise import PAIRWISE_KERNEL_FUNCTIONS, pairwise_kernels
from sklearn.utils import Tags, check_array, check_random_state, gen_batches
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted, validate_data

from primal.errors import require_choice, require_positive

Matrix = NDArray[np.float64]
Rows = NDArray[np.floating[Any]]  # data as the user gave it, float32 or float64
Map = Callable[[Rows], Matrix]  # (n, D) -> (n, P)
SVD = tuple[Matrix, Matrix, Matrix]  # U (·, S), Σ (S,), V (·, S)

FLOATS = (np.float64, np.float32)
SOLVERS = ("auto", "exact", "randomized", "nystrom")
BLOCK_ENTRIES = 2**20  # of K or of the features that exist at one time
EXACT_ENTRIES, RANDOMIZED_ENTRIES = 10**6, 10**8  # sizes of K at which "auto" changes the solver
OVERSAMPLING, POWER_ITERATIONS = 10, 4  # of the randomised range finder
LANDMARK_RANK = 0.75  # the part of κ(L_X, L_Z) to invert; see _landmark_maps
LANDMARK_CUTOFF = 1e-10  # relative; singular values below it are rounding errors


class KSVD(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Kernel SVD of one view (Z = X) or two, in the primal or the dual, extended out of sample.

    An explicit feature map (``feature_map``, or ``kernel="linear"``: the identity) is solved in the
    primal: one pass over the rows, O(N P²) time, O(P²) memory, no N×M matrix, and ``partial_fit``
    for data larger than memory. Any other kernel is solved in the dual, by ``solver``:

    - ``"exact"`` holds K and takes its dense SVD.
    - ``"randomized"`` multiplies with blocks of K, made anew ten times, and never holds K
      (Halko, Martinsson, Tropp, 2011).
    - ``"nystrom"`` draws landmark rows L_X and L_Z and solves the kernel
      κ(x, L_Z) κ(L_X, L_Z)⁺ κ(L_X, z), whose features are explicit, in the primal. Least precise
      for an asymmetric kernel whose spectrum decays slowly: there give it many landmarks.
    - ``"auto"`` is exact up to N·M = 10⁶, randomized up to 10⁸ and nystrom above.

    Components beyond the numerical rank of K are zero: weights, vectors, scores, singular values.
    All is computed in float64; scores have the dtype of the data.

    Parameters
    ----------
    n_components : S, at most the number of rows of either view and of features.
    feature_map : a callable (n, D) -> (n, P), or a pair (φ_q, φ_k) for an asymmetric kernel; a
        torch module is called without gradient, in the dtype and on the device of its weights.
    kernel : a name scikit-learn knows, or a callable that returns the matrix of κ(a_i, b_j) for a
        block A of rows of X and a block B of rows of Z.
    kernel_params : keyword arguments of ``kernel``.
    solver : see above; a feature map is always solved exactly.
    n_landmarks : L, landmark rows per view of ``"nystrom"``; a smaller view gives all it has.
    center : use J K J with J = I − 11ᵀ/N, that is, centre the features of both views.
    random_state : draws the landmarks and starts the range finder.

    Attributes
    ----------
    singular_values_ : (S,), descending.
    left_weights_, right_weights_ : W_e and W_r, (P, S) each; primal and nystrom.
    left_vectors_, right_vectors_ : H_e (N, S) and H_r (M, S); exact and randomized dual.
    left_offset_, right_offset_ : (S,) what centring subtracts from the scores, else zero.
    left_factor_, right_factor_ : R of the QR of [1 Φ_q] and of [1 Φ_k]; primal and nystrom.
    X_fit_, Z_fit_ : the training views; exact and randomized dual.
    solver_ : the solver that ran.
    n_features_in_, n_features_in_z_ : the widths of X and of Z.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X, Z = rng.normal(size=(50, 4)), rng.normal(size=(30, 4))
    >>> primal = KSVD(feature_map=(np.tanh, np.sin)).fit(X, Z)
    >>> dual = KSVD(kernel=lambda x, z: np.tanh(x) @ np.sin(z).T).fit(X, Z)
    >>> np.allclose(primal.singular_values_, dual.singular_values_)
    True
    >>> primal.left_scores(X).shape, primal.right_scores(Z).shape
    ((50, 2), (30, 2))
    """

    def __init__(
        self,
        n_components: int = 2,
        *,
        feature_map: Callable[..., Any] | tuple[Callable[..., Any], ...] | None = None,
        kernel: str | Callable[..., Any] = "linear",
        kernel_params: dict[str, Any] | None = None,
        solver: str = "auto",
        n_landmarks: int = 256,
        center: bool = False,
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_components = n_components
        self.feature_map = feature_map
        self.kernel = kernel
        self.kernel_params = kernel_params
        self.solver = solver
        self.n_landmarks = n_landmarks
        self.center = center
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: ArrayLike | None = None, Z: ArrayLike | None = None) -> Self:
        """Find the leading singular triplets of the kernel between the rows of X and those of Z.

        As in scikit-learn's cross-decomposition, a 2-D second argument is the second view, unless Z
        is given; any other y is a target, and ignored. Without a second view Z = X.
        """
        self._forget()
        left, right = self._views(X, y, Z, first=True)
        self._check_parameters()
        self.solver_ = self._choose_solver(len(left) * len(right))
        self._require_rank({"rows of X": len(left), "rows of Z": len(right)})
        if self._is_explicit() or self.solver_ == "nystrom":
            self._start_primal(left, right)
            self._accumulate(left, right)
            self._solve_primal()
        else:
            self._solve_dual(left, right)
        return self

    @available_if(lambda self: self._require_explicit())
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike | None = None, Z: ArrayLike | None = None
    ) -> Self:
        """Add rows to a primal fit; any division of the data into batches gives the same solution.

        The views are accumulated apart: their batches need not have the same length.
        """
        self._check_parameters()
        first = not hasattr(self, "left_factor_")
        if first:
            self._forget()
        left, right = self._views(X, y, Z, first)
        if first:
            self.solver_ = "exact"
            self._start_primal(left, right)
        self._accumulate(left, right)
        self._solve_primal()
        return self

    def transform(self, X: ArrayLike) -> Rows:  # (n, D) -> (n, S)
        """Return the left scores of X."""
        return self.left_scores(X)

    def left_scores(self, X: ArrayLike) -> Rows:  # (n, D) -> (n, S)
        """Return e(x) for every row x of X, seen or not."""
        check_is_fitted(self, "singular_values_")
        rows: Rows = validate_data(self, X, dtype=FLOATS, reset=False)
        scores = _project(self._maps[0], rows, self._coefficients[0]) - self.left_offset_
        return scores.astype(rows.dtype, copy=False)

    def right_scores(self, Z: ArrayLike) -> Rows:  # (n, D) -> (n, S)
        """Return r(z) for every row z of Z, seen or not."""
        check_is_fitted(self, "singular_values_")
        rows: Rows = check_array(Z, dtype=FLOATS, input_name="Z")
        self._require_width(rows)
        scores = _project(self._maps[1], rows, self._coefficients[1]) - self.right_offset_
        return scores.astype(rows.dtype, copy=False)

    def objective(self, X: ArrayLike, Z: ArrayLike | None = None) -> float:
        """Return J = ½ Σ_i e_iᵀΛe_i + ½ Σ_j r_jᵀΛr_j − Tr(W_eᵀW_r), Λ = Σ⁻¹.

        It is zero on the training data. In the dual Tr(W_eᵀW_r) = Tr(H_eᵀ K H_r), which is the sum
        of h_eᵀ e over the training points.
        """
        scores = self.left_scores(X), self.right_scores(X if Z is None else Z)
        energy = sum(np.sum(side.astype(np.float64) ** 2, axis=0) for side in scores)
        if hasattr(self, "left_weights_"):
            coupling = np.sum(self.left_weights_ * self.right_weights_)
        else:
            coupling = np.sum(self.left_vectors_ * self._times(self.right_vectors_))
        kept = self.singular_values_ > 0
        return float(np.sum(energy[kept] / self.singular_values_[kept]) / 2 - coupling)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    @property
    def _n_features_out(self) -> int:
        return len(self.singular_values_)

    def _is_explicit(self) -> bool:
        return self.feature_map is not None or self.kernel == "linear"

    def _require_explicit(self) -> bool:
        if not self._is_explicit():
            raise ValueError(
                "partial_fit requires an explicit feature map, whose Gram matrix sums up the past, "
                f"got kernel={self.kernel!r}; give feature_map=..., or all rows at once to fit."
            )
        return True

    def _forget(self) -> None:
        """Drop what an earlier fit learned, some of which another solver would leave in place."""
        for name in [name for name in vars(self) if name.endswith("_")]:
            delattr(self, name)

    def _check_parameters(self) -> None:
        for name in ("n_components", "n_landmarks"):
            given = getattr(self, name)
            require_positive(name, int(given) if isinstance(given, np.integer) else given)
        require_choice("solver", self.solver, SOLVERS)
        if not callable(self.kernel):
            require_choice("kernel", self.kernel, PAIRWISE_KERNEL_FUNCTIONS)
        named_twice = self.feature_map is not None and self.kernel != "linear"
        if named_twice or (self._is_explicit() and self.kernel_params):
            raise ValueError(
                "an explicit feature map requires no kernel and no kernel_params, got "
                f"feature_map={self.feature_map!r}, kernel={self.kernel!r} and "
                f"kernel_params={self.kernel_params!r}; leave out either side."
            )
        if self._is_explicit() and self.solver not in ("auto", "exact"):
            raise ValueError(
                f"an explicit feature map requires solver 'auto' or 'exact', got {self.solver!r}; "
                "for the dual, give a callable such as sklearn.metrics.pairwise.linear_kernel."
            )

    def _choose_solver(self, entries: int) -> str:
        if self.solver != "auto":
            return self.solver
        if self._is_explicit() or entries <= EXACT_ENTRIES:
            return "exact"
        return "randomized" if entries <= RANDOMIZED_ENTRIES else "nystrom"

    def _require_rank(self, bounds: dict[str, int]) -> None:
        what = min(bounds, key=lambda name: bounds[name])
        if self.n_components > bounds[what]:
            raise ValueError(
                f"n_components must be at most {bounds[what]}, the number of {what}, "
                f"got n_components={self.n_components}."
            )

    def _views(
        self, X: ArrayLike, y: ArrayLike | None, Z: ArrayLike | None, first: bool
    ) -> tuple[Rows, Rows]:
        """Return both views as checked arrays; the same array twice when there is one view."""
        if Z is None and y is not None and _dimensions(y) == 2:
            Z = y
        left = validate_data(self, X, dtype=FLOATS, reset=first)
        right = left if Z is None else check_array(Z, dtype=FLOATS, input_name="Z")
        if first:
            self._two_views, self.n_features_in_z_ = Z is not None, right.shape[1]
        elif self._two_views != (Z is not None):
            views = "both X and Z" if self._two_views else "X alone"
            raise ValueError(f"every batch must give {views}, as the first did; fit starts afresh.")
        self._require_width(right)
        return left, right

    def _require_width(self, right: Rows) -> None:
        if right.shape[1] != self.n_features_in_z_:
            raise ValueError(
                f"Z must have {self.n_features_in_z_} features, as the second view had in fit, "
                f"got {right.shape[1]}; give rows of that view."
            )

    def _start_primal(self, left: Rows, right: Rows) -> None:
        landmarks = self.solver_ == "nystrom"
        query, key = self._landmark_maps(left, right) if landmarks else self._feature_maps()
        width, other = query(left[:1]).shape[1], key(right[:1]).shape[1]
        if width != other:
            raise ValueError(
                f"φ_q(x) and φ_k(z) must have the same width P, got {width} for X of width "
                f"{left.shape[1]} and {other} for Z of width {right.shape[1]}; a pair "
                "feature_map=(φ_q, φ_k) can bring views of different width together."
            )
        self._require_rank({"landmarks" if landmarks else "features": width})
        self._maps = (query, key)
        self.left_factor_ = self.right_factor_ = np.zeros((0, width + 1))

    def _feature_maps(self) -> tuple[Map, Map]:
        given = _identity if self.feature_map is None else self.feature_map
        pair = given if isinstance(given, (tuple, list)) else (given, given)
        if len(pair) != 2 or not all(callable(function) for function in pair):
            raise ValueError(
                "feature_map must be one callable (n, D) -> (n, P) or a pair (φ_q, φ_k) of them, "
                f"got {self.feature_map!r}."
            )
        query = _Features(pair[0])
        return query, query if pair[1] is pair[0] else _Features(pair[1])

    def _kernel_maps(self, left: Rows, right: Rows) -> tuple["_KernelRows", "_KernelRows"]:
        """Return the maps x -> κ(x, right) and z -> κ(left, z)."""
        parameters = self.kernel_params or {}
        query = _KernelRows(self.kernel, parameters, right, transposed=False)
        return query, _KernelRows(self.kernel, parameters, left, transposed=True)

    def _landmark_maps(self, left: Rows, right: Rows) -> tuple["_KernelRows", "_KernelRows"]:
        """Return φ_q(x) = T^-½ Bᵀ κ(x, L_Z)ᵀ and φ_k(z) = T^-½ Aᵀ κ(L_X, z).

        A T Bᵀ is the SVD of κ(L_X, L_Z), hence φ_q(x)ᵀ φ_k(z) = κ(x, L_Z) κ(L_X, L_Z)⁺ κ(L_X, z).
        Unless the landmarks are all rows of a view this is an oblique projection, and the smallest
        T of a kernel that is not symmetric PSD can be far smaller than what they divide. Hence only
        the leading part of T is inverted.
        """
        random = check_random_state(self.random_state)
        chosen = random.permutation(len(left))[: self.n_landmarks]
        # One view, one set of landmarks: a symmetric kernel must stay symmetric.
        others = random.permutation(len(right))[: self.n_landmarks] if self._two_views else chosen
        query, key = self._kernel_maps(left[chosen], right[others])
        a, values, b = _svd(query(left[chosen]))
        if len(chosen) < len(left) and len(others) < len(right):
            rank = max(self.n_components, int(LANDMARK_RANK * len(values)))
            a, values, b = a[:, :rank], values[:rank], b[:, :rank]
        kept = values > LANDMARK_CUTOFF * values[0]
        root = np.zeros_like(values)
        root[kept] = values[kept] ** -0.5
        return replace(query, projection=b * root), replace(key, projection=a * root)

    def _accumulate(self, left: Rows, right: Rows) -> None:
        query, key = self._maps
        left_factor = right_factor = _extended_factor(self.left_factor_, query, left)
        if query is not key or self._two_views:
            right_factor = _extended_factor(self.right_factor_, key, right)
        self.left_factor_, self.right_factor_ = left_factor, right_factor

    def _solve_primal(self) -> None:
        """Solve K = Φ_q Φ_kᵀ = Q_q (R_q R_kᵀ) Q_kᵀ by the SVD U Σ Vᵀ of the inner, P×P matrix.

        Then H_e = Q_q U and H_r = Q_k V, so W_e = Φ_kᵀ H_r = R_kᵀ V and W_r = R_qᵀ U need no Q.
        The first row of R of [1 Φ] is √N (1, mean); below it stands R of the centred features.
        """
        left, right = self.left_factor_, self.right_factor_
        rows = slice(1 if self.center else 0, None)
        query, key = left[rows, 1:], right[rows, 1:]
        # Rounding errors in R are relative to the features before centring.
        norm = np.linalg.norm
        size = float(norm(left[:, 1:]) * norm(key) + norm(query) * norm(right[:, 1:]))
        u, values, v = _leading(_svd(query @ key.T), self.n_components, size)
        left_weights, right_weights = key.T @ v, query.T @ u
        signs = _signs(left_weights)
        self.singular_values_ = values
        self.left_weights_, self.right_weights_ = left_weights * signs, right_weights * signs
        self._coefficients = self.left_weights_, self.right_weights_
        self.left_offset_ = self.right_offset_ = np.zeros(self.n_components)
        if self.center:
            self.left_offset_ = left[0, 1:] / left[0, 0] @ self.left_weights_
            self.right_offset_ = right[0, 1:] / right[0, 0] @ self.right_weights_

    def _solve_dual(self, left: Rows, right: Rows) -> None:
        """Solve K H_r = H_e Σ, Kᵀ H_e = H_r Σ for K, or J K J, whole or in blocks."""
        self.X_fit_ = left.copy()
        self.Z_fit_ = right.copy() if self._two_views else self.X_fit_
        self._maps = self._kernel_maps(self.X_fit_, self.Z_fit_)
        u, values, v = self._dense_svd() if self.solver_ == "exact" else self._randomized_svd()
        signs = _signs(u)
        self.singular_values_ = values
        self.left_vectors_, self.right_vectors_ = u * signs, v * signs
        self._coefficients = self.right_vectors_, self.left_vectors_
        self.left_offset_ = self.right_offset_ = np.zeros(self.n_components)
        if self.center:
            # h ⟂ 1, so that of J K J only the mean over the training rows is left to subtract.
            self.left_offset_ = self._times(self.right_vectors_).mean(axis=0)
            self.right_offset_ = self._transposed_times(self.left_vectors_).mean(axis=0)

    def _dense_svd(self) -> SVD:
        matrix = self._maps[0](self.X_fit_)
        size = float(np.linalg.norm(matrix))
        matrix = self._centred(self._centred(matrix).T).T
        return _leading(_svd(matrix), self.n_components, size)

    def _randomized_svd(self) -> SVD:
        """Return the SVD of K on the row space to which power iterations take a random start."""
        rows, columns = len(self.X_fit_), len(self.Z_fit_)
        width = min(self.n_components + OVERSAMPLING, rows, columns)
        left = self._times(check_random_state(self.random_state).normal(size=(columns, width)))
        size = float(np.linalg.norm(left)) / width**0.5  # its expectation is ‖K‖, not centred
        for _ in range(POWER_ITERATIONS):
            orthonormal, _ = np.linalg.qr(self._centred(left))
            right, _ = np.linalg.qr(self._centred(self._transposed_times(orthonormal)))
            left = self._centred(self._times(self._centred(right)))
        u, values, v = _svd(left)
        return _leading((u, values, right @ v), self.n_components, size)

    def _times(self, columns: Matrix) -> Matrix:  # (M, n) -> (N, n)
        return _project(self._maps[0], self.X_fit_, columns)

    def _transposed_times(self, columns: Matrix) -> Matrix:  # (N, n) -> (M, n)
        return _project(self._maps[1], self.Z_fit_, columns)

    def _centred(self, columns: Matrix) -> Matrix:
        return columns - columns.mean(axis=0) if self.center else columns


# --- maps and kernels ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Features:
    """A feature map given by the user, its output checked."""

    function: Callable[..., Any]

    def __call__(self, rows: Rows) -> Matrix:  # (n, D) -> (n, P)
        copy = rows.astype(np.float64)  # torch warns of memory that is not writable
        return _checked("feature_map", self._evaluate(copy), len(rows), None)

    def _evaluate(self, rows: Matrix) -> Any:
        torch = sys.modules.get("torch")  # loaded, if the function is a module: no need to import
        if torch is None or not isinstance(self.function, torch.nn.Module):
            return self.function(rows)
        tensor = torch.from_numpy(rows)
        for weight in chain(self.function.parameters(), self.function.buffers()):
            if weight.is_floating_point():
                tensor = tensor.to(weight)
                break
        with torch.no_grad():
            return self.function(tensor).double().cpu().numpy()


@dataclass(frozen=True, eq=False)
class _KernelRows:
    """The map x -> κ(x, anchors), or κ(anchors, x) if ``transposed``, then the projection."""

    function: str | Callable[..., Any]
    parameters: dict[str, Any]
    anchors: Rows
    transposed: bool
    projection: Matrix | None = None

    def __call__(self, rows: Rows) -> Matrix:  # (n, D) -> (n, P)
        if self.transposed:
            matrix = self._kernel(self.anchors, rows).T
        else:
            matrix = self._kernel(rows, self.anchors)
        return matrix if self.projection is None else matrix @ self.projection

    def _kernel(self, left: Rows, right: Rows) -> Matrix:  # (n, D), (m, D) -> (n, m)
        left, right = left.astype(np.float64, copy=False), right.astype(np.float64, copy=False)
        if callable(self.function):
            matrix = self.function(left, right, **self.parameters)
        else:
            matrix = pairwise_kernels(left, right, metric=self.function, **self.parameters)
        return _checked("kernel", matrix, len(left), len(right))


# --- linear algebra -----------------------------------------------------------------------------


def _extended_factor(factor: Matrix, features: Map, rows: Rows) -> Matrix:
    """Return R of [1 Φ] after ``rows`` have joined: [R; 1 Φ_new] has the Gram matrix of all rows.

    R is the root of the Gram matrix RᵀR, found without the squared condition number of its sum.
    """
    width = factor.shape[1] - 1
    # At least P rows at a time: fewer would make the QR of R itself the main cost.
    size = max(width, BLOCK_ENTRIES // max(width, rows.shape[1]))
    for block in gen_batches(len(rows), size):
        new = features(rows[block])
        new = np.column_stack((np.ones(len(new)), new))
        # numpy's stubs know the return type of mode="reduced" alone.
        factor = cast(Matrix, np.linalg.qr(np.vstack((factor, new)), mode="r"))
    return factor


def _project(features: Map, rows: Rows, coefficients: Matrix) -> Matrix:
    """Return ``features(rows) @ coefficients``, a block of rows at a time."""
    size = max(1, BLOCK_ENTRIES // max(len(coefficients), rows.shape[1]))
    blocks = gen_batches(len(rows), size)
    return np.concatenate([features(rows[block]) @ coefficients for block in blocks])


def _svd(matrix: Matrix) -> SVD:
    try:
        u, values, v = np.linalg.svd(matrix, full_matrices=False)
    except np.linalg.LinAlgError:
        # LAPACK's divide and conquer gives up on a rare matrix, and not on its transpose.
        v, values, u = np.linalg.svd(matrix.T, full_matrices=False)
        return u.T, values, v
    return u, values, v.T


def _leading(svd: SVD, rank: int, size: float) -> SVD:
    """Return ``rank`` triplets, zero those within rounding errors of a matrix of norm ``size``."""
    u, values, v = svd
    floor = np.finfo(np.float64).eps * max(len(u), len(v)) * size
    kept = min(rank, np.count_nonzero(values > floor))

    def leading(array: Matrix) -> Matrix:  # (..., any) -> (..., S)
        padded = np.zeros((*array.shape[:-1], rank))
        padded[..., :kept] = array[..., :kept]
        return padded

    return leading(u), leading(values), leading(v)


def _signs(columns: Matrix) -> Matrix:  # (n, S) -> (S,)
    """Return the sign of each column's largest entry, to undo the sign LAPACK happened to give."""
    largest = np.take_along_axis(columns, np.abs(columns).argmax(axis=0)[None], axis=0)[0]
    return np.where(largest < 0, -1.0, 1.0)


def _checked(what: str, result: Any, rows: int, columns: int | None) -> Matrix:
    matrix = np.asarray(result, dtype=np.float64)
    if matrix.shape != (rows, *(matrix.shape[-1:] if columns is None else (columns,))):
        required = (rows, "P" if columns is None else columns)
        raise ValueError(f"{what} must return shape {required} for such rows, got {matrix.shape}.")
    if not np.isfinite(matrix).all():
        raise ValueError(f"{what} must return finite numbers, got NaN or infinity; scale the data.")
    return matrix


def _dimensions(array: ArrayLike) -> int:
    # np.asarray would make a sparse second view 0-D, and pass it off as a target.
    return int(array.ndim) if hasattr(array, "ndim") else np.asarray(array).ndim


def _identity(rows: Matrix) -> Matrix:
    return rows
