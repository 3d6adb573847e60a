"""Which parts of a model compute in FP8, and what the backward pass keeps in FP8.

    preset        linear layers    norms, activations keep    attention keeps
    BF16          as they come     as they come               as they come
    FP8_LINEAR    FP8              as they come               as they come
    COAT          FP8              FP8 in blocks of 16        as they come
    COAT_LEAN     FP8              FP8 in blocks of 16        FP8 in blocks of 16

"As they come" is the dtype of the arrays: BF16, where a model computes in BF16. An ablation is
a `dataclasses.replace` of one field.
"""

import dataclasses

from jax.typing import DTypeLike

from coat_jax.formats import E4M3, E5M2, format_of

BLOCK_SIZES = (16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Precision:
    """A model's precision.

    Attributes:
        fp8_linear: whether linear layers multiply in FP8, with one scale per tensor.
        forward: FP8 format of activations and weights, multiplied or kept.
        backward: FP8 format of gradients, multiplied.
        block: norms, activations and gates keep their inputs in FP8, with one exponent per
            this many neighbours. None keeps them as they come.
        attention_block: likewise for the query, key, value and output that attention keeps.
    """

    fp8_linear: bool = True
    forward: DTypeLike = E4M3
    backward: DTypeLike = E5M2
    block: int | None = 16
    attention_block: int | None = None

    def __post_init__(self) -> None:
        forward, backward = format_of(self.forward), format_of(self.backward)
        if forward.name == backward.name == "E5M2":
            raise ValueError(
                "forward and backward cannot both be E5M2, which GPUs do not multiply with itself. "
                "Use E4M3 for one of them."
            )
        for name in ("block", "attention_block"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value not in BLOCK_SIZES):
                raise ValueError(f"{name}={value!r} must be None or one of {BLOCK_SIZES}.")


BF16 = Precision(fp8_linear=False, block=None)
FP8_LINEAR = Precision(block=None)
COAT = Precision()
COAT_LEAN = Precision(attention_block=16)

PRESETS = {"bf16": BF16, "fp8_linear": FP8_LINEAR, "coat": COAT, "coat_lean": COAT_LEAN}


def precision_of(name: str | Precision) -> Precision:
    """The preset of this name, in any case; a Precision passes through."""
    if isinstance(name, Precision):
        return name
    try:
        return PRESETS[name.lower()]
    except (KeyError, AttributeError):
        raise ValueError(
            f"There is no precision {name!r}. Use one of {', '.join(PRESETS)}, or a coat.Precision."
        ) from None
