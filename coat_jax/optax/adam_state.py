"""The state of Adam with 8-bit moments: its initial value, and one step of it.

Each parameter has two moments, each stored in three arrays: the codes, and per group of
neighbours the largest magnitude `amax` and `exponent_x16`. `coat_jax.storage.Storage` says which
leaves are stored in 8 bits, and in which formats. Muon, too, uses `init_moment`, `by_leaf` and
`from_leaves`.

Derivatives go through one step, not through several, as in meta-learning: the updates of a step
depend on its gradients through FP32 only. JAX would silently round the derivative of FP8 codes to
FP8, and take that of integer codes as zero, so differentiating what is read from a state raises.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Int32

from coat_jax.kernels.adam import Hyper, Leaf, Settings
from coat_jax.kernels.adam_launch import adam_step
from coat_jax.kernels.dispatch import Implementation
from coat_jax.numerics import expansion, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import codes_dtype
from coat_jax.optax.rounding import is_bf16
from coat_jax.optax.states.sharding import fit_metadata, full
from coat_jax.optax.trees import in_fp32, require_floats
from coat_jax.storage import Storage


class ScaleByFP8AdamState(NamedTuple):
    """The state of `scale_by_fp8_adam`: trees of arrays, each leaf following its parameter.

    mu and nu each hold three trees: codes (8 bits, the parameter's shape), amax (FP32) and
    exponent_x16 (uint8), one number per group along the last axis. See `Storage` for leaves in
    FP32.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mu: Expanded
    nu: Expanded


def init_state(params: optax.Params, storage: Storage) -> ScaleByFP8AdamState:
    """The state before the first step: zeros, sharded as the parameters are."""
    require_floats(params)
    return ScaleByFP8AdamState(
        jnp.zeros([], jnp.int32),
        init_moment(params, storage.first, storage),
        init_moment(params, storage.second, storage),
    )


def init_moment(params: optax.Params, dtype: DTypeLike, storage: Storage) -> Expanded:
    """A moment of zeros for every parameter, sharded as the parameter is."""
    leaves = []
    for p in jax.tree.leaves(params):
        shape, scales = jnp.shape(p), storage.scales_shape(jnp.shape(p))
        stored = codes_dtype(dtype) if storage.quantizes(shape) else jnp.float32
        exponents = full(p, scales, jnp.uint8, expansion.STEPS)
        leaves.append(Expanded(full(p, shape, stored), full(p, scales, jnp.float32), exponents))
    trees = from_leaves(leaves, Expanded(params, params, params))
    return Expanded(*(fit_metadata(tree, params) for tree in trees))


def step_tree(
    params: optax.Params | None,
    grads: optax.Updates,
    state: ScaleByFP8AdamState,
    hyper: Hyper,
    settings: Settings,
    *,
    decayed: list[bool] | None = None,
    corrections: Any = None,
    dtypes: list[np.dtype] | None = None,
    implementation: Implementation | None,
) -> tuple[Any, ScaleByFP8AdamState, Any]:
    """Steps a whole tree: returns new parameters (without any, directions), state and corrections.

    The other arguments are those of `adam_step`.
    """
    leaves, structure = jax.tree.flatten(grads)
    old: list[Any] = [None] * len(leaves)
    if params is not None:
        old, structure = jax.tree.flatten(params)
        old = [jnp.asarray(p) for p in old]
    of_leaves = [None] * len(leaves) if corrections is None else jax.tree.leaves(corrections)
    per_leaf = [
        Leaf(p, jnp.asarray(g), mu, nu, c if c is not None and is_bf16(p) else None)
        for p, g, mu, nu, c in zip(
            old, leaves, by_leaf(state.mu), by_leaf(state.nu), of_leaves, strict=True
        )
    ]
    count = optax.safe_increment(state.count)
    # optax.inject_hyperparams casts numbers to the dtype of the parameters: 1e-8 is 0 in FP16.
    hyper = Hyper(*in_fp32(tuple(hyper)))
    stepped = adam_step(
        per_leaf,
        count,
        hyper,
        settings,
        ids=noise.leaf_ids(grads),
        decayed=decayed,
        dtypes=dtypes,
        implementation=implementation,
    )
    result = jax.tree.unflatten(structure, [s.result for s in stepped])
    mu = from_leaves([s.mu for s in stepped], state.mu)
    nu = from_leaves([s.nu for s in stepped], state.nu)
    if hyper.skip is not False:
        count = jnp.where(hyper.skip, state.count, count)
    if corrections is not None:
        new = [
            c if s.correction is None else s.correction
            for s, c in zip(stepped, of_leaves, strict=True)
        ]
        corrections = jax.tree.unflatten(jax.tree.structure(corrections), new)
    return result, ScaleByFP8AdamState(count, mu, nu), corrections


def by_leaf(moment: Expanded) -> list[Expanded]:
    """An `Expanded` of trees as a list with one `Expanded` per leaf."""
    leaves = [Expanded(*arrays) for arrays in zip(*map(jax.tree.leaves, moment), strict=True)]
    return [x if x.codes.dtype == jnp.float32 else refuse_derivatives(x) for x in leaves]


def from_leaves(leaves: list[Expanded], like: Expanded) -> Expanded:
    """The inverse of `by_leaf`, with the structures that the trees had."""
    return Expanded(
        *(
            jax.tree.unflatten(jax.tree.structure(tree), arrays)
            for tree, arrays in zip(like, zip(*leaves, strict=True), strict=True)
        )
        if leaves
        else like
    )


@jax.custom_jvp
def refuse_derivatives(stored: Expanded) -> Expanded:
    """Returns a leaf in 8 bits; differentiating it raises an error."""
    return stored


@refuse_derivatives.defjvp
def _refuse(primals: tuple[Expanded], tangents: tuple[Expanded]) -> tuple[Expanded, Expanded]:
    raise NotImplementedError(
        "Moments stored in 8 bits cannot be differentiated, which happens when a derivative is "
        "taken through more than one step or with respect to the state. Use the uncompressed optax "
        "optimizer there, or storage=coat_jax.Storage(min_size=10**12), which stores all moments "
        "in FP32; for derivatives through the last step alone, apply jax.lax.stop_gradient to "
        "the state."
    )
