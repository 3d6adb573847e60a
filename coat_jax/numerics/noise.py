"""Random numbers for stochastic rounding, each hashed from the place of its element.

    key    = mix(mix(seed + step * A) + leaf * A)      one per array and step
    run    = mix(key + run index * A)                  one per `run` neighbours of the last axis
    bits   = mix(run + (lane // 2) * A)                32 bits for two neighbours
    noise  = 16 of these for the even lane, the other 16 for the odd one

This is a counter-based hash, not a stateful generator: an element's number depends only on the
seed, the step, the array and its own place in the whole array. The same training run therefore
rounds alike on any mesh, nothing is stored, and a kernel computes the numbers in registers.
`mix` is Wellons' lowbias32, a bijection of 32 bits in which flipping any input bit flips
each output bit with probability close to 1/2. Two lanes share no bit, so they are independent.
Probabilities are accurate to 2^-17, half the distance of two values of the noise.

`leaf` is a hash of the array's path in its tree (`leaf_ids`), not its position: optimizers
of several groups of parameters (`optax.partition`) see trees with other leaves left out.
The copies of one array under `vmap` and `shard_map` have keys of their own.

Activations that are saved for a backward pass, and operands of its products, are rounded with
`of_places`, which takes no key: an element has the same random bits at every step. Its rounding
error changes from step to step only because its value does.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, UInt32

from coat_jax.numerics.mesh_axes import varying_axes
from coat_jax.numerics.one_program import one_program

GOLDEN = 0x9E3779B9  # A above: 2^32 over the golden ratio, odd
# Streams of random bits, one for each operand of a product: their rounding errors are independent.
NoiseStream = Literal["gradients", "inputs"]
_STREAMS: dict[NoiseStream, int] = {"gradients": 0, "inputs": 1 << 31}


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Scrambles 32 bits."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def leaf_ids(tree: Any) -> list[int]:
    """A number of 32 bits for each leaf of a tree: a checksum of its path."""
    return [
        zlib.crc32(jax.tree_util.keystr(path).encode())
        for path, _ in jax.tree.leaves_with_path(tree)
    ]


def leaf_key(
    seed: int, step: ArrayLike, leaf: int | Sequence[int], *arrays: Array
) -> UInt32[Array, "*leaves"]:
    """The key of the array with the number `leaf`, at one step; or those of several arrays.

    It differs between the elements of a `vmap` and the shards of a `shard_map`, but only where any
    of `arrays` does: where they are the same on all devices of an axis, so is the key, and replicas
    stay equal. `shard_map(check_vma=False)` does not track what is the same, so there all shards
    get one key; if they should differ, give each its own seed.
    """
    # XLA must not see the constant: it would compile each array's rounding by itself, not once.
    distinct = (np.array(leaf, np.uint64) * np.uint64(GOLDEN)).astype(np.uint32)
    distinct = jax.lax.optimization_barrier(distinct)
    step = jnp.asarray(step).astype(jnp.uint32)
    key = mix(mix(np.uint32(seed & 0xFFFF_FFFF) + step * np.uint32(GOLDEN)) + distinct)
    if axes := varying_axes(*arrays):
        key = mix(key + jax.lax.axis_index(axes).astype(jnp.uint32) * np.uint32(GOLDEN))
    # A random number has no gradient.
    return _of_element(key, [jax.lax.stop_gradient(a) for a in arrays]) if arrays else key


@jax.custom_batching.custom_vmap
def _of_element(key: UInt32[Array, "..."], arrays: list[Array]) -> UInt32[Array, "..."]:
    del arrays
    return key


@_of_element.def_vmap
def _of_element_batched(
    axis_size: int, in_batched: Any, key: UInt32[Array, "..."], arrays: list[Array]
) -> tuple[UInt32[Array, "..."], bool]:
    key = _of_element(key, arrays)  # of the vmaps around this one
    if not in_batched[0]:
        key = jnp.broadcast_to(key, (axis_size, *key.shape))
    element = jax.lax.broadcasted_iota(jnp.uint32, key.shape, 0)
    return mix(key + (element + np.uint32(1)) * np.uint32(GOLDEN)), True


@one_program("key")
def uniform(key: UInt32[Array, ""], shape: tuple[int, ...], *, run: int) -> Float[Array, "..."]:
    """Numbers in (0, 1), one per element of an array of `shape`: odd multiples of 2^-17."""
    return uniform_pair(key, shape, run=run)[0]


@one_program("key")
def uniform_pair(
    key: UInt32[Array, ""], shape: tuple[int, ...], *, run: int
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`uniform` twice, from the same hashes: two independent numbers per element.

    The second number of a lane is the first of its neighbour in the pair. This suits two arrays
    whose elements are used together, such as the two moments of a parameter: the rounding errors of
    the two are independent. The error of the first array in one lane and that of the second array
    in the neighbouring lane are not, but no update uses both.
    """
    # The complement makes "noise < p" the same as a carry of p + bits / 2^16, as in the kernels.
    own, other = (
        ((np.uint32(0xFFFF) - half).astype(jnp.float32) + 0.5) * 2.0**-16
        for half in _halves(key, shape, run=run)
    )
    return own, other


@one_program("key")
def bits(key: UInt32[Array, ""], shape: tuple[int, ...], *, run: int) -> UInt32[Array, "..."]:
    """16 random bits per element of an array of `shape`."""
    return _halves(key, shape, run=run)[0]


def _halves(
    key: UInt32[Array, ""], shape: tuple[int, ...], *, run: int
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Each lane's 16 bits, and those of its neighbour in the pair."""
    *leading, columns = shape or (1,)
    runs = -(-columns // run)
    grid = (*leading, runs, run)
    index = run_numbers((*leading, runs))[..., None]
    lane = jax.lax.broadcasted_iota(jnp.uint32, grid, len(grid) - 1)
    bits = mix(mix(key + index * np.uint32(GOLDEN)) + (lane >> 1) * np.uint32(GOLDEN))
    lower, upper, even = bits & 0xFFFF, bits >> 16, lane & 1 == 0
    own, other = (
        half.reshape(*leading, runs * run)[..., :columns].reshape(shape)
        for half in (jnp.where(even, lower, upper), jnp.where(even, upper, lower))
    )
    return own, other


def of_places(runs: UInt32[Array, "*runs"], lanes: int) -> UInt32[Array, "*runs lanes"]:
    """32 random bits for each element of runs of neighbours, from the numbers of the runs alone.

    One hash serves a whole run: each lane multiplies it by an odd number of its own. Only the
    upper bits of such a product are random, and those of any two lanes are independent.
    """
    of_runs = mix((runs + np.uint32(1)) * np.uint32(GOLDEN))
    of_lanes = mix(jnp.arange(1, lanes + 1, dtype=jnp.uint32)) | np.uint32(1)
    return of_runs[..., None] * jnp.expand_dims(of_lanes, tuple(range(runs.ndim)))


def of_elements(shape: tuple[int, ...], stream: NoiseStream) -> UInt32[Array, "*rows columns"]:
    """`of_places` for an array of this shape: each row is one run."""
    return of_places(element_numbers(shape, stream)[0], shape[-1])


def element_numbers(
    shape: tuple[int, ...], stream: NoiseStream
) -> tuple[UInt32[Array, "*rows"], UInt32[Array, " columns"]]:
    """The numbers of rows and columns behind `of_elements`, for kernels, which see only a shard."""
    *rows, columns = shape
    numbers = run_numbers(tuple(rows)) ^ np.uint32(_STREAMS[stream])
    return numbers, jnp.arange(columns, dtype=jnp.uint32)


def run_numbers(shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """The row-major index of each run in an array of this shape, modulo 2^32."""
    number = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        number = number * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(
            jnp.uint32, shape, axis
        )
    return number


def param_key(key: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """A second, independent key for the same array and step: for rounding parameters."""
    return mix(key ^ np.uint32(0x5BD1E995))


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def round_to_bfloat16(
    x: Float[Array, "..."], key: UInt32[Array, ""], run: int
) -> Float[Array, "..."]:
    """Rounds FP32 to a neighbouring BF16 value at random, right on average.

    Adds 16 random bits below BF16's last bit, then drops them. Infinity and NaN are unchanged. As
    with a cast, the derivative is 1.
    """
    dithered = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits(key, x.shape, run=run)
    rounded = jax.lax.bitcast_convert_type(dithered & np.uint32(0xFFFF_0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)


@round_to_bfloat16.defjvp
def _round_to_bfloat16_jvp(run: int, primals: Any, tangents: Any) -> Any:
    return round_to_bfloat16(*primals, run), tangents[0].astype(jnp.bfloat16)
