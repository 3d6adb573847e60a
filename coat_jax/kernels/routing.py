"""Tokens sorted by the experts that they chose, and sums over each token's choices.

    x, in the order of tokens     [T, D]
    rows, in that of experts      [R, D]    k rows for each token

A group of rows, those of one expert, begins at a multiple of ALIGNED rows where kernels read codes
along the rows: a load of 16 codes must be aligned. The rows in between are empty, and zero. How
many rows there are at most is known beforehand, how many an expert has only at run time.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

ALIGNED = 16
MOST_ROWS = 2**31 - 1


class Groups(NamedTuple):
    """Tokens in the order of their experts; those of one expert in their own order.

    Attributes:
        choices: the number t * k + j of the choice in each row; -1 in empty rows.
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
        """The rows of each expert, with the empty rows at their end."""
        return jnp.diff(self.starts)

    def of_tokens(self, x: Float[Array, "T ..."]) -> Float[Array, "R ..."]:
        """x in the order of rows, zero in empty ones."""
        return _at(x, self.tokens)

    def of_choices(self, x: Float[Array, "T k"]) -> Float[Array, " R"]:
        """x in the order of rows, zero in empty ones."""
        return _at(x.reshape(-1), self.choices)


def rows_of(choices: int, experts: int, aligned: int) -> int:
    """How many rows hold all choices, however they are distributed."""
    most = choices + (aligned - 1) * min(experts, choices)
    return most // aligned * aligned


def group(experts: Int[Array, "T k"], count: int, aligned: int = ALIGNED) -> Groups:
    """Sorts the choices of all tokens by expert.

    Args:
        experts: of each token, from 0 to count - 1.
        count: how many experts there are.
        aligned: a group begins at a multiple of as many rows.
    """
    chosen = experts.reshape(-1).astype(jnp.int32)
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    numbers = jnp.arange(count + 1, dtype=jnp.int32)
    # One fusion of XLA; a binary search is a loop of launches.
    before = jnp.sum(chosen < numbers[:, None], axis=1, dtype=jnp.int32)
    sizes = -(-jnp.diff(before) // aligned) * aligned
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    rows = jnp.arange(chosen.size, dtype=jnp.int32) + (starts - before)[chosen[order]]
    empty = jnp.full(rows_of(chosen.size, count, aligned), -1, jnp.int32)
    choices = empty.at[rows].set(order, unique_indices=True)
    places = jnp.zeros_like(rows).at[order].set(rows, unique_indices=True)
    return Groups(choices, places.reshape(experts.shape), starts)


def combine(
    rows: Float[Array, "R D"], groups: Groups, weights: Float[Array, "T k"] | None = None
) -> Float[Array, "T D"]:
    """The sum over each token's rows, weighted if there are weights; in FP32."""
    total = jnp.zeros((len(groups.places), rows.shape[1]), jnp.float32)
    # A sum over an axis of rows[places] would have this array, of all choices, in memory.
    for j in range(groups.places.shape[1]):
        share = rows[groups.places[:, j]].astype(jnp.float32)
        total += share if weights is None else share * weights[:, j, None].astype(jnp.float32)
    return total


def _at(x: Array, rows: Int32[Array, " R"]) -> Array:
    """These rows of x, zero where -1."""
    return x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)
