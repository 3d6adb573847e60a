"""Any optax transformation with its moments stored in FP8.

    compress(optax.lion(1e-4)), compress(optax.adagrad(1e-2)), compress(optax.amsgrad(1e-3))

Between steps the moments are stored in expanded FP8 (`coat_jax.numerics.expansion`), rounded
stochastically: a sum that grows by less than half a code a step would otherwise never change.
In a step they have the dtype that the wrapped transformation gave them, so that it computes as
it would alone. A group that a step does not change keeps its codes. `kernels.stored_moment` reads
and writes them.

`coat_jax.optax.states.selection` says which leaves of a state are moments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from coat_jax.kernels import stored_moment
from coat_jax.kernels.dispatch import Implementation
from coat_jax.numerics import noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.groups import scales_shape
from coat_jax.optax.adam_state import refuse_derivatives
from coat_jax.optax.states.host_memory import on_device
from coat_jax.optax.states.selection import select_moments, without_names
from coat_jax.optax.states.sharding import fit_metadata, full
from coat_jax.optax.trees import explaining_states
from coat_jax.storage import Storage, placeholder_shape


class CompressedState(NamedTuple):
    """The state of the wrapped transformation, and what decodes its moments.

    `codes` is that state, with FP8 codes for its moments. `amax` (in the moment's own dtype, in
    which it is exact) and `exponent_x16` have one number per group of a moment, and a few unused
    ones for any other leaf. They are trees like `codes`, but with plain tuples instead of its named
    tuples and dicts, so that `optax.tree.get(state, name)` finds each name once.
    """

    step: Int32[Array, ""]
    codes: Any
    amax: Any
    exponent_x16: Any


def compress(
    tx: optax.GradientTransformation,
    *,
    storage: Storage | None = None,
    where: Callable[[str, Any], bool] | None = None,
    implementation: Implementation | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of `tx` in FP8.

    Args:
        tx: any optax transformation whose state has leaves that follow the parameters.
        storage: format (`other`), group size, rounding and which leaves stay as they are.
        where: (path, leaf) -> whether to compress a leaf of the state of `tx`, with a path such
            as "[0].mu['w']"; all moments by default.
        implementation: of reading and writing moments: None, "xla" or "triton"; see
            `coat_jax.kernels.dispatch`.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
        >>> state = coat.optax.compress(optax.lion(1e-4)).init(params)
        >>> {name: mu.dtype.name for name, mu in state.codes[0].mu.items()}
        {'b': 'float32', 'w': 'float8_e4m3fn'}
    """
    inner = optax.with_extra_args_support(tx)
    storage = storage or Storage()

    def init(params: optax.Params) -> CompressedState:
        state = inner.init(params)
        leaves, structure = jax.tree.flatten(state)
        chosen = select_moments(inner.init, state, params, storage, where)
        encoded = [
            _compressed(leaf, storage) if moment else _uncompressed(leaf, storage)
            for leaf, moment in zip(leaves, chosen, strict=True)
        ]
        codes, amax, exponent_x16 = (
            jax.tree.unflatten(structure, [getattr(e, field) for e in encoded])
            for field in Expanded._fields
        )
        return CompressedState(
            jnp.zeros([], jnp.int32),
            codes,
            *(without_names(fit_metadata(tree, state), params) for tree in (amax, exponent_x16)),
        )

    def update(
        updates: optax.Updates,
        state: CompressedState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CompressedState]:
        with explaining_states(init, state, updates if params is None else params):
            stored = _stored_leaves(state, storage)
            step = optax.safe_increment(state.step)
            structure: Any = jax.tree.structure(state.codes)
            moments = [_read(e, storage, implementation) for e in stored]
            before = jax.tree.unflatten(structure, moments)
            updates, after = inner.update(updates, before, params, **extra_args)
            if jax.tree.structure(after) != structure:
                raise ValueError(
                    "The wrapped transformation changed the structure of its state, from "
                    f"{structure} to {jax.tree.structure(after)}; compress needs it to stay."
                )
            encoded = [
                _write(e, new, storage, step, leaf, implementation)
                for leaf, e, new in zip(
                    noise.leaf_ids(state.codes), stored, jax.tree.leaves(after), strict=True
                )
            ]
        trees = (
            jax.tree.unflatten(jax.tree.structure(tree), [getattr(e, field) for e in encoded])
            for tree, field in zip(state[1:], Expanded._fields, strict=True)
        )
        return updates, CompressedState(step, *trees)

    return optax.GradientTransformationExtraArgs(init, update)


def decompress(state: Any, storage: Storage | None = None) -> Any:
    """Returns `state` with each `CompressedState` in it replaced by the state it stands for.

    Use it for code that reads the state of an optimizer, such as
    `optax.contrib.schedule_free_eval_params` or `optax.tree.get(decompress(state), "mu")`.

    Args:
        state: of `compress`, or of a chain or wrapper around it. What is in host memory is copied
            to the device.
        storage: what was given to `compress`.
    """
    storage = storage or Storage()

    def plain(node: Any) -> Any:
        if not isinstance(node, CompressedState):
            return node
        leaves = [_read(e, storage) for e in on_device(_stored_leaves(node, storage))]
        return jax.tree.unflatten(jax.tree.structure(node.codes), leaves)

    return jax.tree.map(plain, state, is_leaf=lambda node: isinstance(node, CompressedState))


def _stored_leaves(state: Any, storage: Storage) -> list[Expanded]:
    """The leaves of a state, checked to be stored as `storage` says."""
    trees = state.codes, state.amax, state.exponent_x16
    stored = [Expanded(*arrays) for arrays in zip(*map(jax.tree.leaves, trees), strict=True)]
    for (path, _), e in zip(jax.tree.leaves_with_path(state.codes), stored, strict=True):
        scales = scales_shape(jnp.shape(e.codes), storage.group_size)
        if _is_fp8(e.codes) and (e.codes.dtype, e.amax.shape) != (storage.other, scales):
            raise ValueError(
                f"state.codes{jax.tree_util.keystr(path)} is {e.codes.dtype} with scales "
                f"{list(e.amax.shape)} instead of {jnp.dtype(storage.other)} with {list(scales)}: "
                "use the Storage that the state was made with."
            )
    return stored


def _compressed(leaf: Any, storage: Storage) -> Expanded:
    e = storage.write(leaf, storage.other)
    return e._replace(amax=stored_moment.saturating(e.amax, leaf.dtype))


def _uncompressed(leaf: Any, storage: Storage) -> Expanded:
    """A leaf that stays as it is, with unused scales that can be sharded like it."""
    per_group = scales_shape(jnp.shape(leaf), storage.group_size)
    shape = placeholder_shape(per_group)
    return Expanded(leaf, full(leaf, shape, jnp.float32), full(leaf, shape, jnp.uint8))


def _is_fp8(leaf: Any) -> bool:
    dtype = jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1


def _read(stored: Expanded, storage: Storage, implementation: Implementation | None = None) -> Any:
    if not _is_fp8(stored.codes):
        return stored.codes
    return stored_moment.read(refuse_derivatives(stored), storage, implementation)


def _write(
    stored: Expanded,
    new: Any,
    storage: Storage,
    step: Array,
    leaf: int,
    implementation: Implementation | None,
) -> Expanded:
    """The leaf as it is stored after a step."""
    if not _is_fp8(stored.codes):
        wanted = jnp.result_type(stored.codes)
        same = jnp.result_type(new) == wanted
        return stored._replace(codes=new if same else jnp.asarray(new, wanted))
    key = noise.leaf_key(storage.seed, step, leaf, new)
    return stored_moment.rewrite(stored, new, storage, key, implementation)
