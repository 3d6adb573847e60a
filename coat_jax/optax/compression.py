"""Any optax transformation with its moments stored in FP8.

    compress(optax.lion(1e-4)), compress(optax.adagrad(1e-2)), compress(optax.amsgrad(1e-3))

The wrapped transformation computes in FP32; between steps those leaves of its state that
follow a parameter are kept in expanded FP8 (`coat_jax.expansion`), rounded stochastically: a
sum that grows by less than half a code a step would otherwise stand still. A group that a
step leaves as it was keeps its codes.

Which leaves: those that `optax.tree_map_params` knows to follow parameters, of a floating dtype,
large enough by the rule of `Storage` applied to the leaf's own shape, and for which `where`
says yes. Left out by `where` should be what is not a moment: copies of parameters, as in
`optax.contrib.schedule_free` or `optax.lookahead`, lose too much in 8 bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from coat_jax import noise
from coat_jax.expansion import Expanded
from coat_jax.moments import Storage
from coat_jax.optax.checks import require_real_floats
from coat_jax.qtensor import join_groups, split_groups


class CompressedState(NamedTuple):
    """Three trees of the wrapped state's structure.

    `codes` holds FP8 codes where a leaf is compressed and the leaf itself elsewhere; `amax` and
    `k16` belong to the codes, and are scalars without meaning elsewhere.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    codes: Any
    amax: Any
    k16: Any


def compress(
    tx: optax.GradientTransformation,
    *,
    storage: Storage | None = None,
    where: Callable[[str, Any], bool] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of `tx` in FP8.

    Args:
        tx: any optax transformation whose state has leaves that follow the parameters.
        storage: format (`first`), group size, rounding and which leaves stay as they are.
        where: (path, leaf) -> whether to compress a leaf of the state of `tx`, with a path such
            as "[0].mu['w']"; all that qualify by default.

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
        require_real_floats(params)
        state = inner.init(params)
        follows = optax.tree_map_params(
            inner, lambda _: True, state, transform_non_params=lambda _: False
        )
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
        leaves, structure = jax.tree.flatten(state)
        encoded = []
        for path, leaf, follows_param in zip(paths, leaves, jax.tree.leaves(follows), strict=True):
            chosen = (
                follows_param
                and jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
                and storage.holds_in_fp8(jnp.shape(leaf))
                and (where is None or where(path, leaf))
            )
            encoded.append(storage.write(leaf, storage.first) if chosen else _leave(leaf))
        return CompressedState(jnp.zeros([], jnp.int32), *_columns(structure, encoded))

    def update(
        updates: optax.Updates,
        state: CompressedState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CompressedState]:
        count = optax.safe_increment(state.count)
        structure: Any = jax.tree.structure(state.codes)
        stored = [
            Expanded(*arrays) for arrays in zip(*map(jax.tree.leaves, state[1:]), strict=True)
        ]
        before = [_read(e, storage) for e in stored]
        given = updates
        updates, after = inner.update(
            given, jax.tree.unflatten(structure, before), params, **extra_args
        )
        # Decoded moments are FP32; what leaves here has the dtypes it would have without them.
        updates = jax.tree.map(lambda u, g: u.astype(g.dtype), updates, given)
        if jax.tree.structure(after) != structure:
            raise ValueError(
                "The wrapped transformation changed the structure of its state, from "
                f"{structure} to {jax.tree.structure(after)}; compress needs it to stay."
            )
        encoded = [
            _restore(e, old, new, storage, noise.leaf_key(storage.seed, count, leaf))
            for leaf, e, old, new in zip(
                noise.leaf_ids(state.codes), stored, before, jax.tree.leaves(after), strict=True
            )
        ]
        return updates, CompressedState(count, *_columns(structure, encoded))

    return optax.GradientTransformationExtraArgs(init, update)


def _leave(leaf: Any) -> Expanded:
    """A leaf that stays as it is."""
    return Expanded(leaf, jnp.zeros([], jnp.float32), jnp.zeros([], jnp.uint8))


def _is_compressed(stored: Expanded) -> bool:
    return jnp.result_type(stored.codes).itemsize == 1 and jnp.issubdtype(
        stored.codes.dtype, jnp.floating
    )


def _read(stored: Expanded, storage: Storage) -> Any:
    return storage.read(stored) if _is_compressed(stored) else stored.codes


def _restore(stored: Expanded, old: Any, new: Any, storage: Storage, key: Any) -> Expanded:
    """Stores a leaf after a step; a group without any change keeps its codes."""
    if not _is_compressed(stored):
        return _leave(jnp.asarray(new, jnp.result_type(stored.codes)))
    # A group that is nowhere negative may be divided by, and must not be rounded to zero.
    groups = split_groups(new, storage.group_size)
    positive = jnp.all(groups >= 0, axis=-1, keepdims=True)
    fresh = storage.write(new, stored.codes.dtype, noise.distinguish(key, new), never_zero=positive)
    same = jnp.all(split_groups(old == new, storage.group_size), axis=-1)

    def select(kept: Any, written: Any) -> Any:
        return jnp.where(same.reshape(kept.shape), kept, written)

    keep_codes = jnp.broadcast_to(same[..., None], (*same.shape, storage.group_size))
    codes = jnp.where(join_groups(keep_codes, new.shape), stored.codes, fresh.codes)
    return Expanded(codes, select(stored.amax, fresh.amax), select(stored.k16, fresh.k16))


def _columns(structure: Any, leaves: list[Expanded]) -> tuple[Any, Any, Any]:
    """A list of `Expanded` as three trees."""
    codes, amax, k16 = zip(*leaves, strict=True) if leaves else ((), (), ())
    return (
        jax.tree.unflatten(structure, codes),
        jax.tree.unflatten(structure, amax),
        jax.tree.unflatten(structure, k16),
    )
