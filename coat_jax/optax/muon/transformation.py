"""Muon with its momentum in 8 bits, and AdamW in 8 bits for everything that is not a matrix.

    m = b m + (1 - b) g                       stored in 8 bits
    u = orthogonalize(m_hat)                  `newton_schulz`; with Nesterov momentum by default
    w = w - lr (scale u + decay w)            scale depends on the shape of the matrix

Orthogonalizing makes all singular values alike, and so amplifies the smallest along with their
error. Therefore each column of the momentum is divided by its mean magnitude before it is stored,
so that the error of a small column is small, too:

    m = codes * amax / 127 * column           8-bit integers, one amax per 128 neighbours of a row

The state of a matrix takes 1.04 bytes per parameter instead of 4. The arguments have the names, the
defaults and the order of those of `optax.contrib.muon`. Two things differ. By default,
`optax.contrib.muon` updates all leaves with two axes, including embeddings and the head; here,
`hidden_matrices` leaves these to AdamW, and includes matrices that are stacked by layer. With
`adaptive`, optax sums over all matrices of a leaf; here, each matrix has its own sum.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from coat_jax.kernels.adam import Number
from coat_jax.kernels.dispatch import Implementation
from coat_jax.numerics import noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.integers import LARGEST, SMALLEST
from coat_jax.optax.adam import Mask, fp8_adamw
from coat_jax.optax.adam_state import by_leaf, from_leaves, init_moment
from coat_jax.optax.arguments import refuse_mu_dtype, require_numbers
from coat_jax.optax.muon.matrices import (
    DimensionNumbers,
    Matrix,
    certain_matrices,
    matrices_of,
    numbers_of_leaves,
)
from coat_jax.optax.muon.newton_schulz import (
    STANDARD,
    Coefficients,
    Preconditioning,
    checked_dtype,
    coefficients_of,
    orthogonalize,
)
from coat_jax.optax.states.sharding import fit_metadata, full
from coat_jax.optax.trees import (
    OTHER_STATE,
    in_fp32,
    require_floats,
    require_like,
    update_dtypes,
)
from coat_jax.storage import Storage
from coat_jax.validation import require


class ScaleByFP8MuonState(NamedTuple):
    """The state of `scale_by_fp8_muon`: trees of arrays, whose leaves are sharded like parameters.

    mu holds three trees: codes (8 bits, the shape of the parameter), amax (FP32) and exponent_x16
    (uint8, not used), the latter two with one number per group along the last axis. See `Storage`
    for leaves in FP32. columns (FP32) has the number by which each column was divided before it was
    stored; its axes along a column have size 1.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mu: Expanded
    columns: Any


def fp8_muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_coeffs: Coefficients | str = STANDARD,
    ns_steps: int = 5,
    beta: Number = 0.95,
    eps: Number = 1e-8,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    weight_decay_mask: Mask | None = None,
    mu_dtype: None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: Number = 0.9,
    adam_b2: Number = 0.999,
    adam_eps_root: Number = 0.0,
    adam_weight_decay: optax.ScalarOrSchedule = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    muon_weight_dimension_numbers: DimensionNumbers | None = None,
    consistent_rms: float | None = None,
    ns_dtype: DTypeLike = jnp.bfloat16,
    storage: Storage | None = None,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon for a network's hidden matrices and AdamW for the rest, all states in 8 bits.

    `scale_by_fp8_muon` describes the arguments that are not listed here.

    Args:
        learning_rate: a number or a schedule.
        beta: decay rate of Muon's momentum.
        eps: for Muon, see `scale_by_fp8_muon`; Adam adds it to the root of the second moment.
        weight_decay: of Muon's matrices; decoupled, multiplied by the learning rate.
        weight_decay_mask: a tree of booleans, or a function from parameters to one, that selects
            the matrices that decay.
        mu_dtype: must be None; keeps the argument order of optax.
        nesterov: whether to use Nesterov momentum, also in Adam.
        adam_b1: decay rate of Adam's first moment.
        adam_b2: decay rate of Adam's second moment.
        adam_eps_root: added inside Adam's root.
        adam_weight_decay: of the leaves that Adam updates.
        adam_learning_rate: a number or a schedule; by default the same as Muon's.
        muon_weight_dimension_numbers: which leaves Muon updates, and which of their axes form a
            matrix; by default `hidden_matrices`, and kernels of Flax with more than two axes are
            refused, except those of attention. See `optax.contrib.MuonDimensionNumbers`. A leaf
            with None is updated by AdamW.
        consistent_rms: the root mean square of updates of any shape: they are scaled by
            sqrt(max(fan_in, fan_out)) times this number. With the usual 0.2, learning rates of
            AdamW are suitable. By default the factor is sqrt(max(1, fan_out / fan_in)).
        storage: formats, group size, rounding and which leaves stay in FP32.
        implementation: of Adam's step: None, "xla" or "triton".

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp
        >>> params = {"embedding": jnp.ones((512, 128)), "w": jnp.ones((128, 256))}
        >>> tx = coat.optax.fp8_muon(0.02, weight_decay=0.01, adam_learning_rate=3e-4)
        >>> state = tx.init(params)
        >>> state.inner_states["muon"].inner_state[0].mu.codes["w"].dtype.name
        'int8'
    """
    require_numbers(
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        consistent_rms=0.0 if consistent_rms is None else consistent_rms,
        adam_learning_rate=learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps_root=adam_eps_root,
        adam_weight_decay=adam_weight_decay,
    )
    numbers = muon_weight_dimension_numbers or certain_matrices
    muon = optax.chain(
        scale_by_fp8_muon(
            ns_coeffs,
            ns_steps,
            beta,
            eps,
            mu_dtype,
            nesterov=nesterov,
            adaptive=adaptive,
            preconditioning=preconditioning,
            weight_dimension_numbers=numbers,
            ns_dtype=ns_dtype,
            storage=storage,
        ),
        optax.stateless(partial(_scale_by_shape, numbers, consistent_rms)),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = fp8_adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        adam_b1,
        adam_b2,
        eps,
        adam_eps_root,
        weight_decay=adam_weight_decay,
        nesterov=nesterov,
        storage=storage,
        implementation=implementation,
    )

    def labels(params: optax.Params) -> Any:
        chosen = iter(numbers_of_leaves(numbers, params))
        return jax.tree.map(lambda _: "adam" if next(chosen) is None else "muon", params)

    return optax.partition({"muon": muon, "adam": adam}, labels)


def scale_by_fp8_muon(
    ns_coeffs: Coefficients | str = STANDARD,
    ns_steps: int = 5,
    beta: Number = 0.95,
    eps: Number = 1e-8,
    mu_dtype: None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    weight_dimension_numbers: DimensionNumbers = certain_matrices,
    ns_dtype: DTypeLike = jnp.bfloat16,
    storage: Storage | None = None,
) -> optax.GradientTransformation:
    """Orthogonalizes the momentum of matrices, and stores it in 8 bits.

    Args:
        ns_coeffs: coefficients of the Newton-Schulz steps: three numbers for all steps, or three
            for each; or "standard" or "dion".
        ns_steps: the number of steps, if `ns_coeffs` has only three numbers.
        beta: decay rate of the momentum.
        eps: keeps zeros from being divided by zero; added to the Frobenius norm.
        mu_dtype: must be None; keeps the argument order of optax.
        nesterov: whether to use Nesterov momentum.
        adaptive: whether to multiply the update of each matrix by its inner product with the
            momentum.
        preconditioning: how singular values are made at most 1 before the first step: "frobenius",
            "spectral" (slow: an eigenvalue of each matrix), "aol" or "schatten".
        weight_dimension_numbers: which axes of each leaf form a matrix. Every leaf must have one;
            `fp8_muon` leaves the others to AdamW.
        ns_dtype: the dtype of the operands of the Newton-Schulz products.
        storage: the format of the momentum (`first`), the group size, the rounding, and which
            leaves stay in FP32.
    """
    coefficients, dtype = coefficients_of(ns_coeffs, ns_steps), checked_dtype(ns_dtype)
    require("preconditioning", preconditioning, Preconditioning)
    require_numbers(beta=beta, eps=eps)
    require("storage", storage, Storage | None)
    refuse_mu_dtype(mu_dtype)
    storage = storage or Storage()
    beta = in_fp32(beta)  # optax.inject_hyperparams casts it to the dtype of the parameters

    def init(params: optax.Params) -> ScaleByFP8MuonState:
        require_floats(params)
        leaves, structure = jax.tree.flatten(params)
        matrices = matrices_of(weight_dimension_numbers, params)
        columns = [
            full(p, matrix.columns_shape, jnp.float32, 1)
            for p, matrix in zip(leaves, matrices, strict=True)
        ]
        return ScaleByFP8MuonState(
            jnp.zeros([], jnp.int32),
            init_moment(params, storage.first, storage),
            fit_metadata(jax.tree.unflatten(structure, columns), params),
        )

    def update(
        updates: optax.Updates, state: ScaleByFP8MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ScaleByFP8MuonState]:
        require_like("state", state, jax.eval_shape(init, updates), OTHER_STATE)
        count = optax.safe_increment(state.count)
        gradients, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, updates))
        matrices = matrices_of(weight_dimension_numbers, updates)
        old = zip(by_leaf(state.mu), jax.tree.leaves(state.columns), strict=True)
        stored, columns, corrected = [], [], []
        for leaf, g, matrix, (mu, column) in zip(
            noise.leaf_ids(updates), gradients, matrices, old, strict=True
        ):
            g32 = g.astype(jnp.float32)
            m = beta * (storage.read(mu, storage.first) * column) + (1 - beta) * g32
            corrected.append(_bias_corrected(m, g32, beta, count, nesterov))
            columns.append(_magnitude_of_columns(m, matrix, storage))
            key = noise.leaf_key(storage.seed, count, leaf, g)
            stored.append(storage.write_momentum(m / columns[-1], key, beta))
        stacks = orthogonalize(
            [matrix.stack(m) for m, matrix in zip(corrected, matrices, strict=True)],
            coefficients,
            eps=eps,
            preconditioning=preconditioning,
            dtype=dtype,
        )
        directions = [matrix.unstack(u) for u, matrix in zip(stacks, matrices, strict=True)]
        if adaptive:
            # The inner product is about the sum of singular values: https://arxiv.org/abs/2409.20325.
            directions = [
                (wide := u.astype(jnp.float32))
                * jnp.sum(m * wide, axis=(*matrix.inputs, *matrix.outputs), keepdims=True)
                for u, m, matrix in zip(directions, corrected, matrices, strict=True)
            ]
        dtypes = update_dtypes(updates, params)
        results = [u.astype(own) for u, own in zip(directions, dtypes, strict=True)]
        state = ScaleByFP8MuonState(
            count,
            from_leaves(stored, state.mu),
            jax.tree.unflatten(jax.tree.structure(state.columns), columns),
        )
        return jax.tree.unflatten(structure, results), state

    return optax.GradientTransformation(init, update)


def _magnitude_of_columns(
    m: Float[Array, "..."], matrix: Matrix, storage: Storage
) -> Float[Array, "..."]:
    """The mean magnitude of the finite elements of each column, never zero; 1 if stored in FP32."""
    if not storage.quantizes(m.shape):
        return jnp.ones(matrix.columns_shape, jnp.float32)
    magnitudes = jnp.where(jnp.isfinite(m), jnp.minimum(jnp.abs(m), LARGEST), 0.0)
    length = math.prod(m.shape[axis] for axis in matrix.column)
    means = jnp.sum(magnitudes / max(length, 1), axis=matrix.column, keepdims=True)
    return jnp.maximum(means, SMALLEST)


def _bias_corrected(
    m: Float[Array, "..."],
    g: Float[Array, "..."],
    beta: Number,
    count: Int32[Array, ""],
    nesterov: bool,
) -> Float[Array, "..."]:
    """The momentum without the bias of its zero initial value; with Nesterov, one step ahead.

    The bias correction makes it a weighted mean of the gradients from the first step on.
    """
    steps = count.astype(jnp.float32)
    if not nesterov:
        return m / (1 - beta**steps)
    return beta * m / (1 - beta ** (steps + 1)) + (1 - beta) * g / (1 - beta**steps)


def _scale_by_shape(
    numbers: DimensionNumbers,
    consistent_rms: float | None,
    updates: optax.Updates,
    params: optax.Params | None,
) -> optax.Updates:
    """Multiplies each update by a factor that depends on its matrix's shape."""
    del params
    leaves, structure = jax.tree.flatten(updates)

    def factor(matrix: Matrix) -> float:
        if consistent_rms is None:
            return math.sqrt(max(1.0, matrix.fan_out / max(matrix.fan_in, 1)))
        return math.sqrt(max(matrix.fan_in, matrix.fan_out)) * consistent_rms

    scaled = [
        factor(matrix) * u for u, matrix in zip(leaves, matrices_of(numbers, updates), strict=True)
    ]
    return jax.tree.unflatten(structure, scaled)
