"""Figures that follow from the package's code."""

import jax
import jax.numpy as jnp
import optax

from coat_jax.kernels.dispatch import FIRST_WITH_FP8
from coat_jax.models import PRESETS, parameters_count
from coat_jax.numerics.expansion import GROUP_SIZE

CAPABILITY = FIRST_WITH_FP8 / 10
MOMENTS = 2 * (1 + 5 / GROUP_SIZE)  # bytes a parameter: codes, and 5 bytes a group


def bytes_of_state(tx: optax.GradientTransformation, shape: tuple[int, ...]) -> int:
    """The size of an optimizer's state of one parameter in FP32."""
    state = jax.eval_shape(tx.init, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)})
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def millions(preset: str) -> float:
    """The parameters of a model, in millions."""
    return parameters_count(PRESETS[preset]) / 1e6
