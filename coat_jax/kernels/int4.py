"""Products of FP8 activations and INT4 weights.

    y[m, n] = sum over groups g of  scale[n, g] (sum over k in g of x[m, k] (u[n, k] - zero[n, g]))

A code u, from 0 to 15, is also the byte of the E4M3 number u / 512. For few rows the kernel
therefore multiplies the bytes themselves in FP8, and corrects the sum of each group by the zero and
the sum of the group's x. It reads half a byte for each parameter. For many rows a weight is
expanded to FP8 codes, or to BF16 where its scales are any numbers, and multiplied as those are.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from coat_jax.kernels import gemm
from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.launch import Schedule
from coat_jax.kernels.norm import padded_width
from coat_jax.kernels.sharding import launch_sharded, on_one_device
from coat_jax.numerics import four_bits
from coat_jax.numerics.formats import E4M3
from coat_jax.numerics.four_bits import GROUP

# Among the fastest of those tried on an H200, for each shape and number of rows.
SCHEDULE = Schedule(64, 16, 4, 3)  # channels and, at least, rows of x
TOGETHER = 4, 2  # groups of a step, at most; the second with over 32 rows, for want of registers
FEW_ROWS = 64
ADDED_ROWS = 32  # with more, the last programs of `add_product` take longer than a launch
PROGRAMS = 512  # at most, if a weight is divided: about four for each processor of an H200
MOST_WEIGHTS = 3  # of a launch
COUNTS = 512  # at most, blocks of channels in `add_product`


class Weight(NamedTuple):
    """A weight in INT4; see `numerics.four_bits`."""

    codes: UInt8[Array, "N K/2"]
    scale: Float[Array, "N G"]
    zero: UInt8[Array, "N G"] | None


class Rows(NamedTuple):
    """Rows in E4M3: what few of them are multiplied from."""

    codes: Float[Array, "M K"]
    scale: Float[Array, " M"]
    sums: Float[Array, "G M"]  # of the codes in each group, times 8 / 512
    counts: Int[Array, "512"]  # zeros, for `add_product`

    @classmethod
    def of(cls, codes: Float[Array, "M K"], scale: Float[Array, " M"]) -> Self:
        """Rows from their codes."""
        groups = codes.reshape(codes.shape[0], -1, GROUP)
        sums = jnp.sum(groups.astype(jnp.float32), axis=-1).T / 64
        return cls(codes, scale, sums, jnp.zeros(COUNTS, jnp.int32))


class Product(NamedTuple):
    """A product of `Rows`, in parts that are not added up yet."""

    parts: Float[Array, "P M N"]
    scale: Float[Array, " M"]

    def total(self) -> Float[Array, "M N"]:
        """The product itself."""
        return jnp.sum(self.parts, axis=0) * self.scale[:, None]

    def added_to(self, x: Float[Array, "M N"]) -> Float[Array, "M N"]:
        """x + the product, which is rounded to the dtype of x before."""
        return x + self.total().astype(x.dtype)

    def plus(self, bias: Float[Array, " N"]) -> Self:
        """The product with a bias, as one part."""
        total = self.total() + bias.astype(jnp.float32)
        return type(self)(total[None], jnp.ones_like(self.scale))


class Spec(NamedTuple):
    """The constants of the kernel."""

    rows: int  # of x
    inputs: int
    part: int  # inputs of a program
    height: int  # channels of a program
    width: int  # rows of a program
    together: int  # groups of one step of the loop
    channels: int
    channels_2: int  # of the second weight; 0 without
    channels_3: int


class Expansion(NamedTuple):
    """The constants of the kernel that expands."""

    groups: int  # of a channel
    finds: bool  # whether the kernel finds the scales of channels


def product_of_many_rows(
    x: Float[Array, "*rows K"], weight: Weight, how: Implementation, dtype: DTypeLike
) -> Float[Array, "*rows N"]:
    """x w^T for x in E4M3, by cuBLAS, in FP32: sums in `dtype`, times the scales of channels.

    The scales of x are applied afterwards. As in `gemm.product_of_codes`, x must come from values
    that were rounded before the cast.
    """
    if weight.zero is None:
        expanded = expand if how == "triton" else four_bits.expand
        codes, of_channel = expanded(weight.codes, weight.scale)
        return gemm.product_of_codes(x, codes, dtype).astype(jnp.float32) * of_channel
    values = four_bits.values(*weight).astype(jnp.bfloat16)
    return jnp.matmul(x.astype(jnp.bfloat16), values.T, preferred_element_type=jnp.float32)


def expand(
    codes: UInt8[Array, "N K/2"], scale: Float[Array, "N G"]
) -> tuple[Float[Array, "N K"], Float[Array, " N"]]:
    """`four_bits.expand`, by the kernel."""
    from coat_jax.kernels.triton.int4 import expand_channel

    # A program finds the scale of a channel if it has all its inputs. A mesh may divide them.
    whole = on_one_device()
    k, of_channel = ("!k", None) if whole else ("k", four_bits.channel_scales(scale))

    def grid(codes: Array, scale: Array, *others: Array) -> dict[str, Any]:
        del others
        spec = Expansion(scale.shape[1], whole)
        warps = max(1, padded_width(spec.groups) // 32)  # a thread has 64 bytes
        return {"programs": codes.shape[0], "warps": warps, "SPEC": spec}

    expanded, found = launch_sharded(
        expand_channel,
        [(codes, f"n {k}/2"), (scale, f"n {k}/{GROUP}"), (of_channel, "n")],
        [(f"n {k}", E4M3), ("n" if whole else "", jnp.float32)],
        grid,
    )
    return expanded, found if of_channel is None else of_channel


def share_a_launch(weights: Sequence[Weight]) -> bool:
    """Whether products of one input with these weights are one launch."""
    alike = len({weight.zero is None for weight in weights}) == 1
    return alike and len(weights) <= MOST_WEIGHTS


def products_of_few_rows(x: Rows, weights: Sequence[Weight]) -> list[Product]:
    """x w^T of each weight, by the kernel."""
    from coat_jax.kernels.triton.int4 import few_rows_tile

    if not share_a_launch(weights):
        return [product for weight in weights for product in products_of_few_rows(x, [weight])]
    arrays, part, grid = _launch_arguments(x, weights)
    absent = MOST_WEIGHTS - len(weights)
    parts = launch_sharded(
        few_rows_tile,
        arrays + [(None, "")] * (3 * absent),
        [(f"k/{part} !m n{i}", jnp.float32) for i in range(len(weights))]
        + [("", jnp.float32)] * absent,
        grid,
        HAS_ZERO=weights[0].zero is not None,
    )
    return [Product(of_weight, x.scale) for of_weight in parts[: len(weights)]]


def add_product(x: Float[Array, "M N"], rows: Rows, weight: Weight) -> Float[Array, "M N"]:
    """`Product.added_to(x)` for the product of rows and a weight, in the launch that multiplies.

    The last program of each block of channels adds up the parts, always in the same order.
    """
    from coat_jax.kernels.triton.int4 import add_product_tile

    if x.shape[1] > COUNTS * SCHEDULE.rows:
        most = COUNTS * SCHEDULE.rows
        raise ValueError(f"{x.shape=} has over {most} columns: use `products_of_few_rows`.")
    arrays, part, grid = _launch_arguments(rows, [weight])
    y, *_ = launch_sharded(
        add_product_tile,
        [*arrays, (rows.scale, "!m"), (x, "!m n0"), (rows.counts, "!counts")],
        [("!m n0", x.dtype), (f"!k/{part} !m n0", jnp.float32), ("!counts", jnp.int32)],
        lambda *shards: {**grid(*shards), "aliases": {7: 2}},  # counts
        HAS_ZERO=weight.zero is not None,
    )
    return y


def _launch_arguments(
    x: Rows, weights: Sequence[Weight]
) -> tuple[list[tuple[Array | None, str]], int, Callable[..., dict[str, Any]]]:
    """The first inputs of a kernel, how many columns of x a program reads, and its grid."""
    rows, inputs = x.codes.shape
    channels = [weight.codes.shape[0] for weight in weights]
    blocks = sum(-(-of_weight // SCHEDULE.rows) for of_weight in channels)
    part = GROUP * _groups_of_a_part(inputs // GROUP, blocks)
    width = max(SCHEDULE.columns, 1 << (rows - 1).bit_length())
    absent = MOST_WEIGHTS - len(weights)

    def grid(shard: Array, *others: Array) -> dict[str, Any]:
        # Of a shard; the codes of each weight are followed by scales and zeros.
        own = [codes.shape[0] for codes in others[1::3][: len(weights)]]
        # Few steps of many groups wait less, but a loop of very few steps loads nothing ahead.
        together = min(max(part // GROUP // 8, 1), TOGETHER[width > 32])
        spec = Spec(rows, shard.shape[1], part, SCHEDULE.rows, width, together, *own, *[0] * absent)
        blocks = sum(-(-of_weight // SCHEDULE.rows) for of_weight in own)
        return {
            "programs": blocks * -(-shard.shape[1] // part),
            "warps": SCHEDULE.warps,
            "stages": SCHEDULE.stages,
            "SPEC": spec,
        }

    arrays: list[tuple[Array | None, str]] = [(x.codes, "!m k"), (x.sums, f"k/{GROUP} !m")]
    for i, weight in enumerate(weights):
        of_groups = f"n{i} k/{GROUP}"
        arrays += [
            (weight.codes, f"n{i} k/2"),
            (weight.scale, of_groups),
            (weight.zero, of_groups),
        ]
    return arrays, part, grid


def _groups_of_a_part(groups: int, blocks: int) -> int:
    """How many groups a program sums, so that there are enough programs."""
    part = -(-groups // max(1, PROGRAMS // blocks))
    # On a mesh inputs may be sharded, into whole parts.
    while not on_one_device() and groups % part:
        part += 1
    return part
