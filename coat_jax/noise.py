"""Random numbers for stochastic rounding, computed from where they are used.

    key    = mix(mix(seed + step * A) + leaf * A)      one per array and step
    run    = mix(key + run index * A)                  one per `run` neighbours of the last axis
    noise  = 23 bits of mix(run + (lane // 2) * A)     two neighbours share 32 bits

A counter-based hash instead of a generator: an element's number depends only on the
seed, the step, the array and its own place in the whole array. So the same training run
rounds alike on any mesh, nothing is stored, and a kernel computes it in registers.
`mix` is Wellons' lowbias32, a bijection of 32 bits in which flipping any input bit flips
each output bit with probability close to 1/2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, UInt32

GOLDEN = 0x9E3779B9  # A above: 2^32 over the golden ratio, odd


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Scrambles 32 bits."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def leaf_key(seed: int, step: ArrayLike, leaf: int) -> UInt32[Array, ""]:
    """The key of one array (by its position in the tree) at one step."""
    return mix(_step_key(seed, step) + np.uint32(leaf * GOLDEN & 0xFFFF_FFFF))


def leaf_keys(seed: int, step: ArrayLike, leaves: int) -> UInt32[Array, "leaves"]:
    """The keys of the first `leaves` arrays."""
    return mix(_step_key(seed, step) + jnp.arange(leaves, dtype=jnp.uint32) * np.uint32(GOLDEN))


def _step_key(seed: int, step: ArrayLike) -> UInt32[Array, ""]:
    step = jnp.asarray(step).astype(jnp.uint32)
    return mix(np.uint32(seed & 0xFFFF_FFFF) + step * np.uint32(GOLDEN))


def uniform(key: UInt32[Array, ""], shape: tuple[int, ...], *, run: int) -> Float[Array, "..."]:
    """Numbers in [0, 1), one per element of an array of `shape`."""
    *leading, columns = shape or (1,)
    runs = -(-columns // run)
    grid = (*leading, runs, run)
    index = jnp.zeros((*leading, runs, 1), jnp.uint32)
    for axis, size in enumerate((*leading, runs)):
        # The run's place in the whole array, row-major, modulo 2^32.
        index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, index.shape, axis)
    lane = jax.lax.broadcasted_iota(jnp.uint32, grid, len(grid) - 1)
    bits = mix(mix(key + index * np.uint32(GOLDEN)) + (lane >> 1) * np.uint32(GOLDEN))
    # Even lanes take the lower 23 bits, odd ones the upper. As a mantissa that is in [1, 2).
    bits = jnp.where(lane & 1 == 0, bits & 0x7F_FFFF, bits >> 9)
    one_to_two = jax.lax.bitcast_convert_type(bits | np.uint32(0x3F80_0000), jnp.float32)
    flat = (one_to_two - 1.0).reshape(*leading, runs * run)
    return flat[..., :columns].reshape(shape)


def param_key(key: UInt32[Array, ""]) -> UInt32[Array, ""]:
    """A second, independent key for the same array and step: for rounding parameters."""
    return mix(key ^ np.uint32(0x5BD1E995))


def round_to_bfloat16(
    x: Float[Array, "..."], key: UInt32[Array, ""], *, run: int
) -> Float[Array, "..."]:
    """Rounds FP32 to a neighbouring BF16 value at random, right on average.

    Adds 16 random bits below BF16's last and cuts them off. Infinity and NaN stay.
    """
    dither = jax.lax.bitcast_convert_type(uniform(key, x.shape, run=run) + 1.0, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + ((dither >> 7) & 0xFFFF)
    rounded = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFF_0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)
