"""Statistics of the moments that an optimizer stores in 8 bits.

`moments` reads them from a state. `direction_error` is the error of Adam's direction, relative to
the direction of FP32 moments that begin with the stored ones and receive the same gradients:

    m' = b1 m + (1 - b1) g      v' = b2 v + (1 - b2) g^2      d = m' / (sqrt(v') + eps)

    error = |d stored - d| / |d|, root mean squares

Both directions are corrected for bias, and clipped to the largest that exact moments can give.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from coat_jax.errors import UserError
from coat_jax.kernels.adam import bias, largest_direction
from coat_jax.numerics.expansion import STEPS, Expanded
from coat_jax.numerics.formats import format_of
from coat_jax.storage import Storage

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
    """Statistics of each moment in 8 bits in the state of an optimizer, by parameter and moment.

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
    """The argument of `report_moments`.

    Args:
        state: see `moments`.
        stacked: names of parameters, or of trees of them, with a first axis over layers.
    """
    sums: dict[str, Array] = {}
    for path, moment, stored in stored_leaves(state):
        by_layer = bool(path) and path[0] in stacked
        name = "/".join([path[0], "*", *path[1:]] if by_layer else path)
        full = "/".join(filter(None, (name, moment)))
        names = itertools.chain([full], (f"{full}_{number}" for number in itertools.count(1)))
        free = next(name for name in names if name not in sums)
        sums[free] = _sums(stored, 1 if by_layer else 0)
    return sums


def report_moments(
    sums: Mapping[str, Float[np.ndarray, "..."]],
) -> dict[str, MomentStatistics]:
    """The statistics of sums on the host, with an entry for each layer."""
    return {
        name.replace("*", str(layer), 1): MomentStatistics(*map(float, row))
        for name, numbers in sums.items()
        for layer, row in enumerate(np.atleast_2d(numbers))
    }


def stored_leaves(state: Any) -> Iterator[tuple[tuple[str, ...], str, Expanded]]:
    """The leaves of a state in 8 bits: the parameter's path, the moment's name, the arrays.

    The only function here that knows how states are structured.
    """

    def holds(node: Any) -> bool:
        if isinstance(node, Mapping) and all(field in node for field in FIELDS):
            # Fields cannot be told from parameters.
            raise UserError(
                f"The state has {', '.join(FIELDS)} as keys of a dict, as nnx.state(optimizer) "
                "makes it. Pass the state as the optimizer made it: optimizer.opt_state of an "
                "nnx.Optimizer."
            )
        return all(hasattr(node, field) for field in FIELDS)

    for path, node in jax.tree_util.tree_flatten_with_path(state, is_leaf=holds)[0]:
        if not holds(node):
            continue
        trees = [jax.tree_util.tree_flatten_with_path(getattr(node, f))[0] for f in FIELDS]
        for (within, codes), (_, amax), (_, x16) in zip(*trees, strict=True):
            if jnp.issubdtype(codes.dtype, jax.dtypes.prng_key):
                continue
            if jnp.dtype(codes.dtype).itemsize == 1:
                moment, parameter = _split(path, within)
                yield parameter, moment, Expanded(codes, amax, x16)


def _split(path: Any, within: Any) -> tuple[str, tuple[str, ...]]:
    """The moment's name, and the parameter's path.

    8-bit Adam has its moments as fields, `mu` and `nu`, whose arrays are trees of parameters. In
    the codes of `compress` the fields of the wrapped state lead to the parameters.
    """
    fields = [
        place
        for place, key in enumerate(within)
        if isinstance(key, jax.tree_util.GetAttrKey) and key.name != VALUE
    ]
    if not fields:
        return "".join(names_of(path)[-1:]), names_of(within)
    place = fields[-1]
    return within[place].name, names_of(within[place + 1 :])


def names_of(path: Any) -> tuple[str, ...]:
    """The keys of a path, without the attribute that leads to an nnx.Variable's value."""
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    return tuple(names[:-1] if names[-1:] == [VALUE] else names)


def _sums(stored: Expanded, layer_axes: int) -> Float[Array, "..."]:
    """The statistics of a leaf; with an axis over layers, of each."""
    codes = jnp.abs(stored.codes.astype(jnp.float32))
    integers = jnp.issubdtype(stored.codes.dtype, jnp.integer)
    tiny = 1 if integers else format_of(stored.codes.dtype).tiny
    k = stored.exponent_x16.astype(jnp.float32) / STEPS

    def mean(x: Array) -> Array:
        return jnp.mean(x.astype(jnp.float32), axis=tuple(range(layer_axes, x.ndim)))

    return jnp.stack([mean(codes == 0), mean(codes == tiny), mean(k)], axis=-1)


# --- The error of a direction ----------------------------------------------------------------


class Shadow(NamedTuple):
    """Some rows of both moments of a leaf, in FP32."""

    m: Float[Array, "*rows D"]
    v: Float[Array, "*rows D"]


class Decay(NamedTuple):
    """Adam's hyperparameters that a direction depends on."""

    b1: float
    b2: float
    eps: float


def read_rows(storage: Storage, pair: Sequence[Expanded], rows: int) -> Shadow:
    """The first rows of both stored moments of a parameter, in FP32."""
    mu, nu = (Expanded(*(some_rows(array, rows) for array in stored)) for stored in pair)
    return Shadow(*storage.read_moments(mu, nu))


def some_rows(x: Float[Array, "..."], rows: int) -> Float[Array, "..."]:
    """The first rows of the middle one of its matrices. Groups, along the last axis, stay whole."""
    while x.ndim > 2:
        x = x[x.shape[0] // 2]
    return x[:rows] if x.ndim == 2 else x


def next_shadow(shadow: Shadow, g: Float[Array, "*rows D"], decay: Decay) -> Shadow:
    """The moments after a gradient."""
    g = g.astype(jnp.float32)
    b1, b2, _ = decay
    m = b1 * shadow.m + (1 - b1) * g
    return Shadow(m, b2 * shadow.v + (1 - b2) * jnp.square(g))


def direction_error(
    stored: Shadow, exact: Shadow, count: Int[Array, ""], decay: Decay
) -> Float[Array, ""]:
    """The error of a direction after `count` steps; 0 where both directions are zero."""
    d, wanted = (_direction(shadow, count, decay) for shadow in (stored, exact))
    off, whole = jnp.sum(jnp.square(d - wanted)), jnp.sum(jnp.square(wanted))
    return jnp.where(off == 0, 0.0, jnp.sqrt(off / whole))


def _direction(shadow: Shadow, count: Int[Array, ""], decay: Decay) -> Float[Array, "*rows D"]:
    b1, b2, eps = decay
    m, v = shadow.m / bias(b1, count), shadow.v / bias(b2, count)
    limit = largest_direction(count, b1, b2, nesterov=False)
    return jnp.clip(m / (jnp.sqrt(v) + eps), -limit, limit)
