"""Which products of a model run in FP8, and what it saves for the backward pass in FP8.

                         products of linear layers    saved by norms
    preset               forward      backward        and activations      by attention
    BF16                 unchanged    unchanged       unchanged            unchanged
    FP8_LINEAR           FP8          FP8             unchanged            unchanged
    COAT                 FP8          FP8             FP8 in blocks        unchanged
    COAT_LEAN            FP8          FP8             FP8 in blocks        FP8 in blocks
    COAT_INT8            INT8         FP8             FP8 in blocks        unchanged
    COAT_BF16_FORWARD    unchanged    FP8             FP8 in blocks        unchanged
    COAT_PAPER           FP8          FP8             FP8 in blocks        unchanged

"Unchanged" is the dtype of the arrays: BF16, if a model computes in BF16. Blocks have 16 numbers.
The loss of 8-bit training is made by forward products. In INT8 they make less of it where inputs
have no outliers, and unchanged they make none: COAT_BF16_FORWARD takes the memory of COAT and
rounds only what the backward pass uses. COAT_PAPER is COAT as the paper describes it: its forward
pass continues with the rounded values that it saves, while COAT continues with the exact ones; and
it rounds saved values to nearest, not stochastically. For an ablation, change one field with
`dataclasses.replace`.

A format may also be a `Minifloat`, or its name, as in `forward="E3M4"`: then XLA simulates it, on
any device, and memory and time are not those of FP8.
"""

import dataclasses
from typing import Annotated, Any, Literal

from jax.typing import DTypeLike

from coat_jax.errors import UserError
from coat_jax.numerics.formats import E4M3, E5M2, named_format
from coat_jax.numerics.minifloat import MOST_MANTISSA_BITS, Minifloat, names_of_simulated
from coat_jax.validation import brief, require_fields

LEAST_MAX = 2.0**-16  # the largest value of a simulated format must be greater
Block = Annotated[int, (16, 32, 64, 128)]
ForwardProducts = Literal["fp8", "int8", "bf16"]


@dataclasses.dataclass(frozen=True)
class Precision:
    """A model's precision.

    Attributes:
        fp8_linear: whether linear layers multiply in FP8, with one scale per tensor.
        forward: FP8 format of activations and weights, in products and where they are saved.
        backward: FP8 format of gradients in products.
        block: norms, activations and gates save their inputs in FP8, with one exponent for
            this many neighbours. None saves them in their own dtype.
        attention_block: the same for the query, key, value and output that attention saves.
        exact_forward: whether the forward pass computes with the original values, and only the
            backward pass with the saved FP8 ones. False computes with the saved values in both
            passes.
        stochastic: whether values that are saved for the backward pass alone are rounded
            stochastically, up or down at random and right on average, instead of to nearest.
            Values that the forward pass computes with, too, are always rounded to nearest.
        forward_products: what the forward pass multiplies: "fp8"; "int8", with one scale for each
            token of an input and each column of a weight; or "bf16", the arrays in their own dtype.
            Products in INT8 have a fraction of the error of FP8, unless some columns of an input
            are more than ten times as large as the others (`coat.quantization.balance` makes such
            outliers smaller). The backward pass and the saved values are the same for all three.
        stochastic_backward: whether the backward pass also rounds the operands of its products
            stochastically: gradients, and inputs that it recomputes. This takes longer, and no
            effect on the loss has been found. Weights are always rounded to nearest.
    """

    fp8_linear: bool = True
    forward: DTypeLike = E4M3
    backward: DTypeLike = E5M2
    block: Block | None = 16
    attention_block: Block | None = None
    exact_forward: bool = True
    stochastic: bool = True
    stochastic_backward: bool = False
    forward_products: ForwardProducts = "fp8"

    def __post_init__(self) -> None:
        require_fields(self)
        for name in ("forward", "backward"):
            object.__setattr__(self, name, _format(name, getattr(self, name)))
        if self.forward == self.backward == E5M2:
            raise UserError(
                "forward and backward cannot both be E5M2: GPUs cannot multiply E5M2 by E5M2. "
                "Use E4M3 for one of them."
            )
        if self.forward_products != "fp8" and not (self.fp8_linear and self.exact_forward):
            field = "exact_forward" if self.fp8_linear else "fp8_linear"
            raise UserError(
                f"forward_products={self.forward_products!r} needs {field}=True: it replaces the "
                "FP8 products of the forward pass, and their inputs must not have been rounded "
                "before."
            )

    @property
    def saves_stochastically(self) -> bool:
        """Whether the inputs of norms and activations are rounded stochastically where saved."""
        return self.stochastic and self.exact_forward

    @property
    def simulated(self) -> bool:
        """Whether one of the formats is a `Minifloat`, so that the ops run through XLA."""
        rounds = self.fp8_linear or self.block is not None or self.attention_block is not None
        return rounds and any(isinstance(f, Minifloat) for f in (self.forward, self.backward))


def _format(name: str, value: DTypeLike | Minifloat) -> Any:
    """Returns the FP8 dtype or the `Minifloat` of a field; raises if it cannot be one."""
    fmt = named_format(value)
    if fmt is None:
        raise UserError(
            f"{name}={brief(value)} is not an FP8 format of coat_jax. Use coat.formats.E4M3 (more "
            "precision) or coat.formats.E5M2 (more range); or, to simulate another one, "
            f"{names_of_simulated(MOST_MANTISSA_BITS)}."
        )
    if isinstance(fmt, Minifloat) and not (fmt.signed and fmt.zero):
        raise UserError(
            f"{name}={fmt.name!r} cannot hold activations and gradients: choose a signed format "
            "that has a zero."
        )
    if isinstance(fmt, Minifloat) and not fmt.max > LEAST_MAX:
        raise UserError(
            f"{name}={fmt.name!r} has {fmt.max:.3g} as its largest value, which must be above "
            f"{LEAST_MAX:.3g}. Choose a lower bias: scales make up for it."
        )
    return fmt


PRESETS = {
    "bf16": Precision(fp8_linear=False, block=None),
    "fp8_linear": Precision(block=None),
    "coat": Precision(),
    "coat_lean": Precision(attention_block=16),
    "coat_int8": Precision(forward_products="int8"),
    "coat_bf16_forward": Precision(forward_products="bf16"),
    "coat_paper": Precision(exact_forward=False, stochastic=False),
}
BF16, FP8_LINEAR, COAT, COAT_LEAN, COAT_INT8, COAT_BF16_FORWARD, COAT_PAPER = PRESETS.values()


def precision_of(name: str | Precision) -> Precision:
    """Returns the preset of this name, in any case; a Precision passes through."""
    precision = name if isinstance(name, Precision) else PRESETS.get(str(name).lower())
    if precision is None:
        raise UserError(
            f"There is no precision {brief(name)}. Use one of {', '.join(PRESETS)}, or a "
            "coat.Precision."
        )
    return precision
