"""8-bit integers: numbers in 127 equal steps on each side of zero, with one scale per group.

    encode    code = 127 x / amax,  rounded
    decode    x = amax code / 127

Use them for numbers of similar size, such as the directions of Adam's updates. Large codes may be
rounded to nearest and small ones stochastically: a number that decays by a fixed share per step
leaves a large code even when rounded to nearest, but would never leave a small one.

Laws, for finite input of any shape:
    zero stays zero;
    the largest of a group gets the code 127, so a constant group is exact to FP32;
    no result is infinite or NaN;
    where rounding is stochastic, the decoded value is right on average.
There is no code for NaN: it becomes -1 and leaves the rest of its group unchanged. Magnitudes above
2^100 become 2^100, and a group whose largest is below 2^-100 becomes zeros, because the scales of
such groups would have no reciprocals.
"""

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from coat_jax.numerics.expansion import STEPS, Expanded, in_groups
from coat_jax.numerics.groups import group_max, join_groups, split_groups, to_groups
from coat_jax.numerics.one_program import one_program

DTYPE = jnp.int8
LARGEST_CODE = 127
NAN_CODE = -1
SMALLEST, LARGEST = 2.0**-100, 2.0**100


@one_program("x", "noise", "stochastic_below")
def encode(
    x: Float[Array, "*rows D"],
    *,
    group_size: int,
    noise: Float[Array, "*rows D"] | None = None,
    stochastic_below: ArrayLike = jnp.inf,
) -> Expanded:
    """Rounds `x` to nearest, or with `noise` (uniform in (0, 1)) stochastically.

    Args:
        x: floats of any shape.
        group_size: neighbours along the last axis that share a scale.
        noise: one number per element; see `coat_jax.numerics.noise.uniform`.
        stochastic_below: codes of at least this magnitude are rounded to nearest even with
            `noise`.
    """
    values = to_groups(x, group_size)
    lost = jnp.isnan(values)
    values = jnp.clip(jnp.where(lost, 0.0, values), -LARGEST, LARGEST)
    amax = group_max(jnp.abs(values))
    amax = jnp.where(amax < SMALLEST, 0.0, amax)
    largest = jnp.where(amax > 0, amax, jnp.inf)[..., None]
    # The share of the largest is set to 1: its quotient could be just under 1, and be rounded down.
    share = jnp.where(jnp.abs(values) >= largest, jnp.sign(values), values / largest)
    exact = LARGEST_CODE * share
    codes = jnp.floor(exact + 0.5)
    if noise is not None:
        whole = jnp.floor(exact)
        up = split_groups(noise, group_size) < exact - whole
        at_random = whole + up.astype(jnp.float32)
        codes = jnp.where(jnp.abs(exact) < stochastic_below, at_random, codes)
    codes = jnp.where(lost, NAN_CODE, codes).astype(DTYPE)
    # Always STEPS, computed so that it is sharded as amax is.
    exponent_x16 = jnp.where(amax >= 0, STEPS, 0).astype(jnp.uint8)
    return in_groups(codes, amax, exponent_x16, x.shape, group_size)


@one_program("e")
def decode(e: Expanded, *, group_size: int) -> Float[Array, "*rows D"]:
    """Returns the FP32 values of `e`."""
    codes = split_groups(e.codes, group_size).astype(jnp.float32)
    scale = e.amax.reshape(codes.shape[:-1])[..., None] / LARGEST_CODE
    return join_groups(codes * scale, e.codes.shape)
