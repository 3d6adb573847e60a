"""A moment in expanded FP8 by itself: read for an optimizer's step, and rewritten after it.

    read       x = decode(stored)      in the dtype in which the optimizer computes with it
    rewrite    stored = encode(x)      rounded stochastically; but a group keeps its codes if
                                       they already decode to x

In a group that is nowhere negative no number is rounded to zero, since an optimizer may divide by
it. `numerics.expansion` has the equations. `amax` has the dtype of x, in which it is exact.

The references are the specification. XLA runs them in several passes over memory, because the
largest and smallest of a group must be known before its codes. The Triton kernels
(`triton.stored_moment`) need one pass each. Per FP32 element, `read` reads 1 byte and writes 4;
`rewrite`, in place, reads 5 and writes 1. Results differ by the rounding of approximate logarithms
and powers: a code may differ by one where the exact value is near the middle between two codes.

The kernels have no rules for `vmap` and derivatives; the references run instead.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from coat_jax.kernels import dispatch
from coat_jax.kernels.launch import launch
from coat_jax.kernels.leaf_layout import layout_of
from coat_jax.kernels.leaf_sharding import LeafShard, run_sharded_leaves
from coat_jax.kernels.moment_format import moment_format
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.groups import join_groups, split_groups
from coat_jax.storage import Storage

WARPS = 2
ALONE = ((0, 0),)  # `table` of `leaf_layout.layout_of`, for a launch with one leaf


def read_reference(stored: Expanded, storage: Storage) -> Float[Array, "..."]:
    """The values of a moment, in the dtype of its `amax`."""
    values = storage.read(stored._replace(amax=stored.amax.astype(jnp.float32)))
    return saturating(values, stored.amax.dtype)


def read(
    stored: Expanded, storage: Storage, implementation: dispatch.Implementation | None = None
) -> Float[Array, "..."]:
    """`read_reference`, as a kernel where `dispatch` says so."""
    if not _by_kernel(stored, stored.amax.dtype, implementation):
        return read_reference(stored, storage)
    return _read(*stored, storage=storage)


def rewrite_reference(
    stored: Expanded, new: Float[Array, "..."], storage: Storage, key: UInt32[Array, ""]
) -> Expanded:
    """The stored moment after its values have become `new`."""
    size = storage.group_size
    groups = split_groups(new, size)
    nonnegative = jnp.all(groups >= 0, axis=-1, keepdims=True)
    fresh = storage.write(new, stored.codes.dtype, key, never_zero=nonnegative)
    fresh = fresh._replace(amax=saturating(fresh.amax, stored.amax.dtype))
    changed = jnp.any(split_groups(read_reference(stored, storage) != new, size), axis=-1)

    def select(old_scale: Any, new_scale: Any) -> Any:
        return jnp.where(changed.reshape(old_scale.shape), new_scale, old_scale)

    takes_codes = join_groups(jnp.broadcast_to(changed[..., None], groups.shape), new.shape)
    codes = jnp.where(takes_codes, fresh.codes, stored.codes)
    return Expanded(
        codes, select(stored.amax, fresh.amax), select(stored.exponent_x16, fresh.exponent_x16)
    )


def rewrite(
    stored: Expanded,
    new: Float[Array, "..."],
    storage: Storage,
    key: UInt32[Array, ""],
    implementation: dispatch.Implementation | None = None,
) -> Expanded:
    """`rewrite_reference`, as a kernel where `dispatch` says so.

    Args:
        stored: the moment.
        new: its values after a step; of its shape, in any float dtype.
        storage: how it is stored.
        key: of `numerics.noise`, for the rounding.
        implementation: see `dispatch`.
    """
    if not _by_kernel(stored, new.dtype, implementation):
        return rewrite_reference(stored, new, storage, key)
    return Expanded(*_rewrite(new, *stored, key, storage=storage))


def saturating(x: Array, dtype: DTypeLike) -> Array:
    """Casts to a dtype that may have a smaller range; NaN stays NaN."""
    largest = float(jnp.finfo(dtype).max)
    if largest < float(jnp.finfo(x.dtype).max):
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def _by_kernel(
    stored: Expanded, dtype: DTypeLike, implementation: dispatch.Implementation | None
) -> bool:
    """Whether the kernels run, for a moment that has this dtype in a step."""
    if jnp.float64 in (dtype, stored.amax.dtype):
        if implementation == "triton":
            raise ValueError(
                "The Triton kernels store moments of up to 32 bits, and this one is float64. Use "
                'implementation=None or "xla".'
            )
        return False
    return dispatch.choose(implementation) == "triton" and stored.codes.size > 0


def _or_reference(kernel: Callable, reference: Callable) -> Callable:
    """`kernel`, but `reference` under `vmap` and where a derivative is taken."""
    batchable = jax.custom_batching.custom_vmap(kernel)

    @batchable.def_vmap
    def batched(axis_size: int, in_batched: Sequence[bool], *arrays: Array) -> tuple[Any, Any]:
        axes = [0 if batched else None for batched in in_batched]
        results = jax.vmap(reference, axes, axis_size=axis_size)(*arrays)
        return results, jax.tree.map(lambda _: True, results)

    @jax.custom_jvp
    def either(*arrays: Array) -> Any:
        return batchable(*arrays)

    @either.defjvp
    def derivative(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> Any:
        return jax.jvp(reference, primals, tangents)

    return either


# Under jit a launch is traced once for all leaves of the same shape. XLA inlines it.
@functools.partial(jax.jit, static_argnames="storage")
def _read(codes: Array, amax: Array, x16: Array, *, storage: Storage) -> Array:
    from coat_jax.kernels.triton.stored_moment import read_moment

    def kernel(*stored: Array) -> Array:
        return _launch(read_moment, [], stored, storage)[0]

    def reference(*stored: Array) -> Array:
        return read_reference(Expanded(*stored), storage)

    values: Array = _or_reference(kernel, reference)(codes, amax, x16)
    return values


@functools.partial(jax.jit, static_argnames="storage")
def _rewrite(
    new: Array, codes: Array, amax: Array, x16: Array, key: UInt32[Array, ""], *, storage: Storage
) -> list[Array]:
    from coat_jax.kernels.triton.stored_moment import rewrite_moment

    def kernel(*arrays: Array) -> list[Array]:
        *leaf, key = arrays
        return _launch(rewrite_moment, [key[None]], leaf, storage)

    def reference(*arrays: Array) -> list[Array]:
        new, *stored, key = arrays
        return list(rewrite_reference(Expanded(*stored), new, storage, key))

    rewritten: list[Array] = _or_reference(kernel, reference)(new, codes, amax, x16, key)
    return rewritten


def _launch(
    kernel: Any, keys: Sequence[Array], leaf: Sequence[Array], storage: Storage
) -> list[Array]:
    """Reads a moment, or rewrites it in place if there is a key; a leaf ends with the moment."""

    def on_shards(
        keys: Sequence[Array], local: Sequence[Sequence[Array]], shards: Sequence[LeafShard]
    ) -> list[list[Array]]:
        (arrays,) = local
        stored = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays[-3:]]
        codes, amax, _ = stored
        layout, programs, leaves = layout_of(shards, ALONE, storage.group_size)
        results = launch(
            kernel,
            *keys,
            layout,
            *arrays,
            outputs=stored if keys else [jax.ShapeDtypeStruct(codes.shape, amax.dtype)],
            aliases={3: 0, 4: 1, 5: 2} if keys else {},
            programs=programs,
            warps=WARPS,
            LARGEST=float(jnp.finfo(amax.dtype).max),
            FORMAT=moment_format(codes.dtype, "stochastic" if storage.stochastic else "nearest"),
            LEAVES=leaves,
        )
        return [results]

    return run_sharded_leaves(on_shards, keys, [leaf], group_size=storage.group_size)[0]
