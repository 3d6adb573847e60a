"""A drop-in for `lax.dot_general` in FP8, for modules that let their products be replaced.

    nnx.Linear(..., dot_general=coat.ops.DotGeneral())
    nn.Dense(..., dot_general_cls=coat.linen.dot_general_cls())

Any contraction of an input (left) with a weight (right) that has no batch axes is one linear
layer: the weight is viewed as a matrix of the contracted axes by the other axes.
"""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from coat_jax.numerics.explicit_axes import explicit_spec, merge_specs, shard_inside
from coat_jax.ops.checks import require_real
from coat_jax.ops.linear import linear
from coat_jax.precision import COAT, Precision, precision_of

Axes = Sequence[int]


@dataclasses.dataclass(frozen=True)
class _Product:
    precision: Precision | str = COAT

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", precision_of(self.precision))


class DotGeneral(_Product):
    """`lax.dot_general` whose three products run as `coat.Precision` says.

    Attributes:
        precision: a `coat.Precision`, or its name.
    """

    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: tuple[tuple[Axes, Axes], tuple[Axes, Axes]],
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """Contracts `lhs` with the weight `rhs`; lax's own `precision` has no meaning here.

        Over explicit axes of a mesh, each axis of the result is sharded like the axis of the input
        or weight that it comes from, or as `out_sharding` says.
        """
        del precision
        (left, right), (left_batch, right_batch) = dimension_numbers
        if left_batch or right_batch:
            raise ValueError(
                "coat.ops.DotGeneral multiplies an input by a weight without batch axes, and got "
                f"{tuple(left_batch)}, {tuple(right_batch)}. Leave this product as it is."
            )
        require_real("coat.ops.DotGeneral", lhs)
        require_real("coat.ops.DotGeneral", rhs)
        contract = partial(lax.dot_general, dimension_numbers=dimension_numbers)
        # JAX refuses axes that do not fit.
        shapes = (jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (lhs, rhs))
        whole = jax.eval_shape(contract, *shapes)
        rows = [axis for axis in range(lhs.ndim) if axis not in left]
        others = [axis for axis in range(rhs.ndim) if axis not in right]
        contracted = math.prod(rhs.shape[axis] for axis in right)

        def op(lhs: Array, rhs: Array) -> Array:
            x = lhs.transpose(*rows, *left).reshape(*whole.shape[: len(rows)], contracted)
            columns = math.prod(whole.shape[len(rows) :])
            w = rhs.transpose(*right, *others).reshape(contracted, columns)
            return linear(x, w, precision=self.precision).reshape(whole.shape)

        def result() -> Any:
            of_input, of_weight = explicit_spec(lhs), explicit_spec(rhs)
            free = [of_input[axis] for axis in rows] + [of_weight[axis] for axis in others]
            return merge_specs(*free) if out_sharding is None else out_sharding

        y: Array = shard_inside(op, result, lhs, rhs)
        if out_sharding is not None:
            y = jax.sharding.reshard(y, out_sharding)
        return y if preferred_element_type is None else y.astype(jnp.dtype(preferred_element_type))


class Einsum(_Product):
    """`jnp.einsum` of an input and a weight that share no axis of the output.

    Attributes:
        precision: a `coat.Precision`, or its name.
    """

    def __call__(
        self,
        equation: str,
        x: Float[Array, "..."],
        w: Float[Array, "..."],
        *,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """Evaluates the equation, in which only the input may have an ellipsis."""
        require_real("coat.ops.Einsum", x)
        require_real("coat.ops.Einsum", w)
        inputs, arrow, output = equation.replace(" ", "").partition("->")
        if not arrow:
            raise ValueError(f'{equation!r} names no output: write one, as in "bsd,df->bsf".')
        of_x, _, of_w = inputs.partition(",")
        rest = x.ndim - len(of_x.replace("...", ""))
        leading = "".join(chr(0x3B1 + i) for i in range(rest))  # letters that equations do not use
        of_x, output = (part.replace("...", leading) for part in (of_x, output))
        for letters, operand in ((of_x, x), (of_w, w)):
            if len(letters) != operand.ndim or len(set(letters)) != len(letters):
                raise ValueError(
                    f"{equation!r} does not name each axis of an input {x.shape} and of a weight "
                    f"{w.shape} once. Only the input may have an ellipsis."
                )
        contracted = [name for name in of_x if name in of_w and name not in output]
        if set(of_x) & set(of_w) & set(output):
            raise ValueError(
                f"{equation!r} has axes that input, weight and output share. coat.ops.Einsum "
                "contracts all axes that input and weight have in common."
            )
        left, right = ([names.index(c) for c in contracted] for names in (of_x, of_w))
        y = DotGeneral(self.precision)(
            x,
            w,
            ((left, right), ((), ())),
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
        )
        names = [c for c in of_x + of_w if c not in contracted]
        if sorted(names) != sorted(output):
            raise ValueError(f"{equation!r} sums over an axis of one operand alone.")
        return y.transpose([names.index(c) for c in output])
