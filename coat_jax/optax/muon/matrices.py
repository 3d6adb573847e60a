"""Which parameters are matrices, and along which axes.

`optax.contrib.MuonDimensionNumbers` names the axes that a layer sums over and those of its output.
All other axes are batch axes: the leaf is then a stack of matrices.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float
from optax.contrib import MuonDimensionNumbers

from coat_jax.errors import UserError
from coat_jax.validation import brief

# A tree with MuonDimensionNumbers, or None where there is no matrix, for each leaf or for whole
# subtrees; or a function from parameters to such a tree.
DimensionNumbers = Any | Callable[[optax.Params], Any]

VOCABULARY = re.compile(r"(\b|_)(un)?embed|(\b|_)vocab|\bw[tp]e\b|head\b", re.IGNORECASE)
# The names of vectors, which have two axes where layers are stacked.
VECTOR = re.compile(
    r"(\b|_)(scales?|bias(es)?|gammas?|betas?)\b|(\b|_)bias_|norm(s|_?\d+)?\b|\bln(_?(\d+|f))?\b",
    re.IGNORECASE,
)
# The names of weights in Flax: any, and those of attention, which have an axis for heads.
KERNEL = re.compile(r"\bkernel\b")
OF_ATTENTION = re.compile(r"\b(query|key|value|out)(?=\W+kernel\b)")


def hidden_matrices(params: optax.Params) -> Any:
    """The matrices of a network's hidden layers, as `muon_weight_dimension_numbers`.

    These are the leaves with two axes or more, neither of the last two of size 1. Axes before the
    last two are a stack of matrices, except in the attention of Flax, where all heads are one
    matrix. Left out are, by the words on their path:

    - embeddings and heads: a word begins with "embed", "unembed" or "vocab", ends with "head", or
      is "wte" or "wpe";
    - vectors, which have two axes where layers are stacked: a name ends with the word "scale",
      "bias", "gamma" or "beta", or with "norm" (all also in the plural, "norm" also with a number);
      or it begins with "bias_"; or it is "ln", "ln_1", "ln_f" and the like.
    """

    shapes = {
        jax.tree_util.keystr(path): jnp.shape(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }

    def numbers(path: Any, leaf: Any) -> MuonDimensionNumbers | None:
        shape = jnp.shape(leaf)
        name = jax.tree_util.keystr(path)
        if len(shape) < 2 or min(shape[-2:]) < 2 or VOCABULARY.search(name) or VECTOR.search(name):
            return None
        found = OF_ATTENTION.search(name)
        query, out = (shapes.get(OF_ATTENTION.sub(side, name), ()) for side in ("query", "out"))
        if found and len(shape) == len(query) == len(out) == 3 and query[1:] == out[:2]:
            inputs, outputs = ((0, 1), 2) if found[1] == "out" else (0, (1, 2))
            return MuonDimensionNumbers(inputs, outputs)
        return MuonDimensionNumbers(len(shape) - 2, len(shape) - 1)

    return jax.tree.map_with_path(numbers, params)


def certain_matrices(params: optax.Params) -> Any:
    """`hidden_matrices`; raises for kernels of Flax that may be something else than stacks."""
    chosen = hidden_matrices(params)
    of_leaves = numbers_of_leaves(chosen, params)
    for (path, leaf), dims in zip(jax.tree.leaves_with_path(params), of_leaves, strict=True):
        name, axes = jax.tree_util.keystr(path), jnp.ndim(leaf)
        if KERNEL.search(name) and axes > 2 and dims == (axes - 2, axes - 1):
            raise UserError(
                f"{name} of shape {jnp.shape(leaf)} may be a stack of matrices, a matrix with axes "
                "for heads, or a convolution. If it is a stack, pass muon_weight_dimension_numbers="
                "coat_jax.optax.hidden_matrices; otherwise a tree like what that returns, with "
                "MuonDimensionNumbers(0, (1, 2)) for [D, heads, head_dim] or None for AdamW."
            )
    return chosen


class Matrix(NamedTuple):
    """A leaf as a stack of matrices [batch, fan_in, fan_out].

    Attributes:
        shape: of the leaf.
        batch: its batch axes, which count the matrices.
        inputs: its axes that the layer sums over.
        outputs: its axes of the layer's output.
    """

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def fan_in(self) -> int:
        """Inputs of the layer."""
        return math.prod(self.shape[axis] for axis in self.inputs)

    @property
    def fan_out(self) -> int:
        """Outputs of the layer."""
        return math.prod(self.shape[axis] for axis in self.outputs)

    @property
    def column(self) -> tuple[int, ...]:
        """The axes along a column: those of the side that the last axis does not belong to."""
        return self.outputs if len(self.shape) - 1 in self.inputs else self.inputs

    @property
    def columns_shape(self) -> tuple[int, ...]:
        """The shape of an array with one number per column, which has all axes of the leaf."""
        return tuple(1 if axis in self.column else size for axis, size in enumerate(self.shape))

    def stack(self, x: Float[Array, "..."]) -> Float[Array, "B M N"]:
        """The leaf, or its update, as matrices."""
        return x.transpose(self._order).reshape(-1, self.fan_in, self.fan_out)

    def unstack(self, x: Float[Array, "B M N"]) -> Float[Array, "..."]:
        """The inverse of `stack`."""
        x = x.reshape([self.shape[axis] for axis in self._order])
        return x.transpose([self._order.index(axis) for axis in range(len(self.shape))])

    @property
    def _order(self) -> tuple[int, ...]:
        return (*self.batch, *self.inputs, *self.outputs)


def matrices_of(numbers: DimensionNumbers, tree: Any) -> list[Matrix]:
    """The `Matrix` of each leaf; raises for a leaf that is not a matrix."""
    matrices = []
    of_leaves = numbers_of_leaves(numbers, tree)
    for (path, leaf), dims in zip(jax.tree.leaves_with_path(tree), of_leaves, strict=True):
        name = jax.tree_util.keystr(path) or "the parameter"
        if dims is None:
            raise ValueError(
                f"{name} of shape {jnp.shape(leaf)} is no hidden matrix, and scale_by_fp8_muon "
                "updates nothing else. fp8_muon gives such leaves to AdamW; or name its axes in "
                "weight_dimension_numbers."
            )
        matrices.append(_matrix(name, jnp.shape(leaf), dims))
    return matrices


def _matrix(name: str, shape: tuple[int, ...], dims: MuonDimensionNumbers) -> Matrix:
    every = range(len(shape))
    try:
        inputs, outputs = (
            tuple(every[axis] for axis in ([given] if isinstance(given, int) else given))
            for given in (dims.reduction_axis, dims.output_axis)
        )
    except IndexError:
        inputs = outputs = (-1,)
    batch = tuple(axis for axis in every if axis not in (*inputs, *outputs))
    if sorted((*batch, *inputs, *outputs)) != [*every]:
        raise ValueError(f"{dims} must name axes of {name} of shape {shape}, each once.")
    if any(shape[axis] == 0 for axis in (*inputs, *outputs)):
        raise ValueError(
            f"{name} of shape {shape} has matrices without elements, which Muon cannot "
            "orthogonalize. Give it to AdamW: None instead of its dimension numbers."
        )
    return Matrix(shape, batch, inputs, outputs)


def numbers_of_leaves(numbers: DimensionNumbers, tree: Any) -> list[MuonDimensionNumbers | None]:
    """The dimension numbers of each leaf, from a function, a tree, or a prefix of a tree.

    `tree` may lack leaves that the numbers name: `optax.partition` leaves out those of other
    optimizers.
    """

    def is_entry(node: Any) -> bool:
        return node is None or isinstance(node, MuonDimensionNumbers)

    given = numbers(tree) if callable(numbers) else numbers
    entries = dict(jax.tree.leaves_with_path(given, is_leaf=is_entry))
    found = []
    for path, leaf in jax.tree.leaves_with_path(tree):
        prefixes = [path[:length] for length in range(len(path), -1, -1)]
        entry = next((entries[prefix] for prefix in prefixes if prefix in entries), "nothing")
        if not is_entry(entry):
            raise ValueError(
                f"muon_weight_dimension_numbers say {brief(entry)} of {jax.tree_util.keystr(path)} "
                f"of shape {jnp.shape(leaf)}. They are a tree like the parameters, or a function "
                "from these to one, with MuonDimensionNumbers for a matrix and None for others."
            )
        found.append(entry)
    return found
