"""Tokens sorted by the experts that they chose, and sums over each token's choices.

    x, in the order of tokens        [T, D]
    rows, in the order of experts    [R, D]    k rows for each token

The rows of an expert are a group. If kernels read codes along the rows, each group begins at a
multiple of ALIGNED rows, because a load of 16 codes must be aligned. The rows between groups are
empty: they are zero. An upper bound R of the number of rows is known when a program is traced; how
many an expert has, only at run time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from coat_jax.kernels.dispatch import Implementation
from coat_jax.kernels.launch import Tile, divide
from coat_jax.kernels.sharding import launch_sharded

ALIGNED = 16
BLOCK = 256  # choices that are compared with each other
MOST_ROWS = 2**31 - 1
COMBINE = Tile(4, 512, 4)  # of tokens


class Groups(NamedTuple):
    """Tokens in the order of their experts; those of one expert in their own order.

    Attributes:
        choices: the index t * k + j of the choice in each row; -1 in empty rows.
        places: the row of each choice.
        starts: the first row of each expert, and the end of the last one.
    """

    choices: Int32[Array, " R"]
    places: Int32[Array, "T k"]
    starts: Int32[Array, " E+1"]

    @property
    def tokens(self) -> Int32[Array, " R"]:
        """The token in each row; -1 in empty rows."""
        return self.choices // self.places.shape[1]  # rounds down

    @property
    def sizes(self) -> Int32[Array, " E"]:
        """How many rows each expert has, with the empty ones at its end."""
        return jnp.diff(self.starts)

    def of_tokens(self, x: Float[Array, "T ..."]) -> Float[Array, "R ..."]:
        """x in the order of rows, zero in empty ones."""
        return _at(x, self.tokens)

    def of_choices(self, x: Float[Array, "T k"]) -> Float[Array, " R"]:
        """x in the order of rows, zero in empty ones."""
        return _at(x.reshape(-1), self.choices)


def rows_of(choices: int, experts: int, aligned: int) -> int:
    """How many rows suffice for all choices, however these are distributed."""
    most = choices + (aligned - 1) * min(experts, choices)
    return most // aligned * aligned


def group(experts: Int[Array, "T k"], count: int, aligned: int = ALIGNED) -> Groups:
    """Sorts the choices of all tokens by expert.

    Args:
        experts: of each token, from 0 to count - 1.
        count: how many experts there are.
        aligned: each group begins at a multiple of this number of rows.
    """
    chosen = experts.reshape(-1).astype(jnp.int32)
    # Counting choices, block by block, takes a fifth of the time of sorting them.
    blocks = jnp.pad(chosen, (0, -chosen.size % BLOCK), constant_values=count).reshape(-1, BLOCK)
    number = jnp.arange(BLOCK, dtype=jnp.int32)
    alike = (blocks[:, :, None] == blocks[:, None, :]) & (number[:, None] > number)
    in_block = jnp.sum(alike, axis=2, dtype=jnp.int32)
    counts = jnp.sum(blocks[:, :, None] == jnp.arange(count), axis=1, dtype=jnp.int32)
    until = jnp.cumsum(counts, axis=0, dtype=jnp.int32)
    sizes = -(-jnp.sum(counts, axis=0, dtype=jnp.int32) // aligned) * aligned
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    before = starts[:-1] + until - counts
    rows = jnp.take_along_axis(before, blocks, axis=1, mode="clip") + in_block
    places = rows.reshape(-1)[: chosen.size]
    empty = jnp.full(rows_of(chosen.size, count, aligned), -1, jnp.int32)
    choices = empty.at[places].set(jnp.arange(chosen.size, dtype=jnp.int32), unique_indices=True)
    return Groups(choices, places.reshape(experts.shape), starts)


def combine(
    rows: Float[Array, "R D"],
    groups: Groups,
    dtype: DTypeLike,
    implementation: Implementation,
    weights: Float[Array, "T k"] | None = None,
) -> Float[Array, "T D"]:
    """The sum over each token's rows, in FP32, weighted if there are weights; then in `dtype`."""
    tokens, choices = groups.places.shape
    wide = None if weights is None else weights.astype(jnp.float32)
    if implementation == "xla":
        total = jnp.zeros((tokens, rows.shape[1]), jnp.float32)
        # Summing rows[places] over an axis would put that array, of all choices, in memory.
        for j in range(choices):
            share = rows[groups.places[:, j]].astype(jnp.float32)
            total += share if wide is None else share * wide[:, j, None]
        return total.astype(dtype)
    from coat_jax.kernels.triton.routing import combine_tile

    def grid(rows: Array, *others: Array) -> dict[str, Any]:
        del others
        return divide(jax.ShapeDtypeStruct((tokens, rows.shape[1]), dtype), tile=COMBINE)

    inputs = [(rows, "!r d"), (groups.places, "!t !k"), (wide, "!t !k")]
    outputs, weighted = [("!t d", dtype)], wide is not None
    (out,) = launch_sharded(combine_tile, inputs, outputs, grid, CHOICES=choices, WEIGHTED=weighted)
    return out


def _at(x: Array, rows: Int32[Array, " R"]) -> Array:
    """These rows of x; zero for row -1."""
    return x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
