"""Figures that follow from the package's code."""

from coat_jax.kernels.dispatch import FIRST_WITH_FP8
from coat_jax.models import PRESETS, parameters_count
from coat_jax.numerics.expansion import GROUP_SIZE

CAPABILITY = FIRST_WITH_FP8 / 10
MOMENTS = 2 * (1 + 5 / GROUP_SIZE)  # bytes a parameter: codes, and 5 bytes a group


def millions(preset: str) -> float:
    """The parameters of a model, in millions."""
    return parameters_count(PRESETS[preset]) / 1e6
