"""Videos from noise: Euler's steps along the velocities of a model, in one program."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from coat_jax.errors import UserError
from coat_jax.models.video.config import Shift
from coat_jax.models.video.model import VideoTransformer, shifted
from coat_jax.validation import Count, require


def sample(
    model: VideoTransformer,
    text: Float[Array, "B T E"],
    key: Array,
    *,
    steps: int = 50,
    guidance: float = 1.0,
    other_text: Float[Array, "B T E"] | None = None,
    shift: float | None = None,
) -> Float[Array, "B F H W C"]:
    """The latents of a video for each text.

    Attention has the levels of the model's config for the times of the steps.

    Args:
        model: the model.
        text: the states of the texts.
        key: of the noise that videos begin as.
        steps: how many there are; each computes the model once, with guidance for both texts.
        guidance: how far velocities are moved away from those of `other_text`: 1 not at all.
        other_text: with guidance, the states of what a video should not be, as of an empty text.
        shift: of the times; that of the model's config by default.
    """
    require("steps", steps, Count)
    config = model.config
    shift = require("shift", config.shift if shift is None else shift, Shift)
    if (guidance != 1) != (other_text is not None):
        raise UserError(
            f"guidance={guidance} and other_text={'None' if other_text is None else 'states'}: "
            "guidance other than 1 needs the states of another text, and nothing else does."
        )
    if other_text is not None and other_text.shape != text.shape:
        raise UserError(f"other_text {other_text.shape} must have the shape of text, {text.shape}.")
    times = shifted(jnp.linspace(1.0, 0.0, steps + 1), shift)

    def velocity(x: Array, time: Array) -> Array:
        if other_text is None:
            return model(x, text, jnp.full(len(x), time))
        both = model(
            jnp.concatenate([x, x]),
            jnp.concatenate([text, other_text]),
            jnp.full(2 * len(x), time),
        )
        wanted, other = jnp.split(both, 2)
        return other + guidance * (wanted - other)

    def step(x: Array, pair: tuple[Array, Array]) -> tuple[Array, None]:
        time, following = pair
        return x + (following - time) * velocity(x, time), None

    noise = jax.random.normal(key, (len(text), *config.latents, config.channels))
    return lax.scan(step, noise, (times[:-1], times[1:]))[0]
