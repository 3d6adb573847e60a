"""Statistics of the moments that an optimizer stores in 8 bits."""

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.numerics.expansion import STEPS, Expanded
from coat_jax.numerics.formats import format_of

VALUE = "value"  # the attribute of an nnx.Variable
FIELDS = ("codes", "amax", "exponent_x16")  # of what holds stored leaves: trees of one structure


class MomentStatistics(NamedTuple):
    """Statistics of one stored moment.

    Attributes:
        zero: the share of the codes that are zero.
        floor: the share of the codes that are the smallest non-zero code.
        k: the mean exponent of the groups' dynamic range expansion; 1 without expansion, as for the
            first moment in 8-bit integers.
    """

    zero: float
    floor: float
    k: float


def moments(state: Any) -> dict[str, MomentStatistics]:
    """Returns statistics of each moment in 8 bits in an optimizer's state, by parameter and moment.

    Moments of the same name are numbered: w/trace, w/trace_1.

    Args:
        state: of `fp8_adamw` or `compress`, also in place or within chains. Of an
            `nnx.Optimizer`, pass `optimizer.opt_state`.

    Example:
        >>> import coat_jax as coat, jax.numpy as jnp
        >>> tx = coat.optax.fp8_adamw(1e-3)
        >>> params = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> for name, found in sorted(coat.telemetry.moments(state).items()):
        ...     print(name, found)
        w/mu MomentStatistics(zero=0.0, floor=0.0, k=1.0)
        w/nu MomentStatistics(zero=0.0, floor=0.0, k=15.9375)
    """

    def sums(state: Any) -> dict[str, Array]:
        return moment_sums(jax.device_put(state, jax.memory.Space.Device))  # from host memory

    return report_moments(jax.device_get(jax.jit(sums)(state)))


def moment_sums(state: Any, stacked: Collection[str] = ()) -> dict[str, Float[Array, "..."]]:
    """Returns the argument of `report_moments`.

    Args:
        state: see `moments`.
        stacked: names of parameters, or of trees of them, with a first axis over layers.
    """
    sums: dict[str, Array] = {}
    for path, moment, stored in _stored_leaves(state):
        at = next((i for i, name in enumerate(path, 1) if name in stacked), None)
        names = path if at is None else [*path[:at], "*", *path[at:]]
        full = "/".join(filter(None, (*names, moment)))
        numbered = (f"{full}_{number}" for number in itertools.count(1))
        free = next(name for name in itertools.chain([full], numbered) if name not in sums)
        sums[free] = _sums(stored, 0 if at is None else 1)
    return sums


def report_moments(sums: Mapping[str, Float[np.ndarray, "..."]]) -> dict[str, MomentStatistics]:
    """Returns the statistics of sums on the host, with an entry for each layer."""
    return {
        name.replace("*", str(layer), 1): MomentStatistics(*map(float, row))
        for name, numbers in sums.items()
        for layer, row in enumerate(np.atleast_2d(numbers))
    }


def _stored_leaves(state: Any) -> Iterator[tuple[tuple[str, ...], str, Expanded]]:
    """Yields the leaves of a state in 8 bits: the parameter's path, the moment's name, the arrays.

    The only function here that knows how states are structured. 8-bit Adam has its moments as
    fields, `mu` and `nu`, whose arrays are trees of parameters. In the codes of `compress` the
    fields of the wrapped state lead to the parameters.
    """

    def holds(node: Any) -> bool:
        if isinstance(node, Mapping) and all(field in node for field in FIELDS):
            # As nnx.state(optimizer) makes it: its fields cannot be told from parameters.
            raise UserError(
                f"The state has {', '.join(FIELDS)} as keys of a dict. Pass the state as the "
                "optimizer made it: optimizer.opt_state of an nnx.Optimizer."
            )
        return all(hasattr(node, field) for field in FIELDS)

    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=holds)[0]:
        if not holds(node):
            continue
        trees = [jax.tree_util.tree_flatten_with_path(getattr(node, f))[0] for f in FIELDS]
        for (within, codes), (_, amax), (_, x16) in zip(*trees, strict=True):
            is_key = jnp.issubdtype(codes.dtype, jax.dtypes.prng_key)
            if is_key or jnp.dtype(codes.dtype).itemsize != 1:
                continue
            attributes = [i for i, key in enumerate(within) if isinstance(key, GetAttrKey)]
            fields = [i for i in attributes if within[i].name != VALUE]
            moment, parameter = "".join(_names_of(path)[-1:]), within
            if fields:
                moment, parameter = within[fields[-1]].name, within[fields[-1] + 1 :]
            yield _names_of(parameter), moment, Expanded(codes, amax, x16)


def _names_of(path: Any) -> tuple[str, ...]:
    """Returns the keys of a path, without the attribute that leads to an nnx.Variable's value."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return tuple(names[:-1] if names[-1:] == [VALUE] else names)


def _sums(stored: Expanded, layer_axes: int) -> Float[Array, "..."]:
    """Returns the statistics of a leaf; with an axis over layers, of each."""
    codes = jnp.abs(stored.codes.astype(jnp.float32))
    integers = jnp.issubdtype(stored.codes.dtype, jnp.integer)
    tiny = 1 if integers else format_of(stored.codes.dtype).tiny
    k = stored.exponent_x16.astype(jnp.float32) / STEPS

    def mean(x: Array) -> Array:
        return jnp.mean(x.astype(jnp.float32), axis=tuple(range(layer_axes, x.ndim)))

    return jnp.stack([mean(codes == 0), mean(codes == tiny), mean(k)], axis=-1)
