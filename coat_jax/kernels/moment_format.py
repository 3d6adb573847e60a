"""How a moment is stored, as constants of the kernels that read and write it."""

import math
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike

from coat_jax.numerics import logarithms
from coat_jax.numerics.expansion import ExponentFit, Rounding, fit_of
from coat_jax.numerics.formats import Format, format_of
from coat_jax.storage import DIRECTION, LOGARITHM


class MomentFormat(NamedTuple):
    """How a moment is stored, for the kernel: fields only, since kernels see no properties."""

    fp8: Format | None  # None where codes are integers
    fit: ExponentFit
    rounding: Rounding
    noise_base: int  # the bits of the float under which random bits are put
    smallest_second: float  # the smallest v that a group can store, for a largest of 1
    is_integer: bool  # whether codes are the integers of a direction or a logarithm
    log2_max: float  # log2 of the largest FP8 code


def moment_format(
    dtype: DTypeLike, rounding: Rounding, smallest_second: float = 0.0
) -> MomentFormat:
    """The constants of a moment that is stored as `dtype`."""
    # Stochastic rounding adds noise in units of the last place; dithering adds it to the codes
    # themselves, where it is as wide as the smallest code.
    noise_unit = 1.0
    fp8, fit = None, logarithms.FIT
    if dtype not in (DIRECTION, LOGARITHM):
        fp8, fit = format_of(dtype), fit_of(dtype, rounding)
        if rounding != "stochastic":
            noise_unit = fp8.tiny
    return MomentFormat(
        fp8,
        fit,
        rounding,
        noise_base=int(np.float32(128 * noise_unit).view(np.uint32)),
        smallest_second=smallest_second,
        is_integer=fp8 is None,
        log2_max=0.0 if fp8 is None else math.log2(fp8.max),
    )
