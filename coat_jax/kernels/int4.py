"""Products of FP8 activations and INT4 weights.

    y[m, n] = sum over groups g of  scale[n, g] (sum over k in g of x[m, k] (u[n, k] - zero[n, g]))

A code u, from 0 to 15, is also the byte of the E4M3 number u / 512. For few rows the kernel
therefore multiplies the bytes themselves in FP8, and corrects the sum of each group by the zero and
the sum of the group's x. It reads half a byte for each parameter. For many rows a weight is
expanded to FP8 codes, or to BF16 where its scales are any numbers, and multiplied as those are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from coat_jax.kernels import gemm
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.launch import Schedule
from coat_jax.kernels.sharding import launch_sharded
from coat_jax.numerics import four_bits
from coat_jax.numerics.four_bits import GROUP

# Not tuned: it has not run on a GPU yet.
SCHEDULE = Schedule(64, 16, 4, 4)  # channels and, at least, rows of x
FEW_ROWS = 64
PROGRAMS = 264  # two for each processor of an H200


class Weight(NamedTuple):
    """A weight in INT4; see `numerics.four_bits`."""

    codes: UInt8[Array, "N K/2"]
    scale: Float[Array, "N G"]
    zero: UInt8[Array, "N G"] | None


class Spec(NamedTuple):
    """The constants of the kernel."""

    rows: int  # of x
    channels: int
    inputs: int
    part: int  # inputs of a program
    height: int  # channels of a program
    width: int  # rows of a program


def product(
    x: Float[Array, "M K"], weight: Weight, implementation: Implementation = "xla"
) -> Float[Array, "M N"]:
    """x w^T, for x in E4M3, in FP32 or BF16; the scales of x are applied afterwards.

    As in `gemm.product_of_codes`, x must come from values that were rounded before the cast.
    """
    if implementation == "triton" and x.shape[0] <= FEW_ROWS:
        return product_of_few_rows(x, weight)
    if weight.zero is None:
        codes, of_channel = four_bits.expand(weight.codes, weight.scale)
        sums = gemm.product_of_codes(x, codes, jnp.float32)
        return sums * of_channel
    values = four_bits.values(*weight).astype(jnp.bfloat16)
    return jnp.matmul(x.astype(jnp.bfloat16), values.T, preferred_element_type=jnp.float32)


def product_of_few_rows(x: Float[Array, "M K"], weight: Weight) -> Float[Array, "M N"]:
    from coat_jax.kernels.triton.int4 import few_rows_tile

    rows = x.shape[0]
    channels, groups = weight.scale.shape
    part = GROUP * _groups_of_a_part(groups, -(-channels // SCHEDULE.rows))
    width = max(SCHEDULE.columns, 1 << (rows - 1).bit_length())
    of_group = jnp.sum(x.reshape(rows, groups, GROUP).astype(jnp.float32), axis=-1)

    def grid(shard: Array, *others: Array) -> dict[str, object]:
        own = others[1].shape[0]  # channels of a shard
        spec = Spec(rows, own, shard.shape[1], part, SCHEDULE.rows, width)
        return {
            "programs": -(-own // SCHEDULE.rows) * -(-shard.shape[1] // part),
            "warps": SCHEDULE.warps,
            "stages": SCHEDULE.stages,
            "SPEC": spec,
        }

    (parts,) = launch_sharded(
        few_rows_tile,
        [
            (x, "!m k"),
            (of_group, f"!m k/{GROUP}"),
            (weight.codes, "n k/2"),
            (weight.scale, f"n k/{GROUP}"),
            (weight.zero, f"n k/{GROUP}"),
        ],
        [(f"k/{part} !m n", jnp.float32)],
        grid,
        HAS_ZERO=weight.zero is not None,
    )
    return jnp.sum(parts, axis=0)


def _groups_of_a_part(groups: int, blocks: int) -> int:
    """How many groups a program sums, so that there are enough programs."""
    part = max(groups * blocks // PROGRAMS, 1)
    # On a mesh inputs may be sharded, into whole parts.
    while jax.sharding.get_abstract_mesh().size > 1 and groups % part:
        part += 1
    return part
