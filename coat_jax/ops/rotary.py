"""Rotary position embeddings: pairs of numbers in a head are rotated by an angle per position.

    (a, b) -> (a cos - b sin, b cos + a sin)      angle = position * frequency of the pair

The pairs are (i, i + H/2), as in Hugging Face's checkpoints. The gradient is the inverse
rotation: nothing is saved but the positions.
"""

import dataclasses
import math
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from coat_jax.errors import UserError
from coat_jax.kernels.rotary import rotary_backward
from coat_jax.ops.checks import require_real
from coat_jax.validation import Between, Count, require_fields

Theta = Annotated[float, Between(least=1, most=1e12)]
Factor = Annotated[float, Between(least=1e-6, most=1e6)]


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of low frequencies to contexts longer than those of pretraining."""

    factor: Factor = 8.0
    low_freq_factor: Factor = 1.0
    high_freq_factor: Factor = 4.0
    original_context: Count = 8192

    def __post_init__(self) -> None:
        require_fields(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise UserError(
                f"low_freq_factor={self.low_freq_factor} must be below "
                f"high_freq_factor={self.high_freq_factor}, as in 1 and 4."
            )

    def scale(self, frequencies: Float[Array, " P"]) -> Float[Array, " P"]:
        """Divides frequencies by `factor`; high ones not, those between gradually less."""
        wavelength = 2 * math.pi / frequencies
        low, high = (
            self.original_context / f for f in (self.low_freq_factor, self.high_freq_factor)
        )
        smooth = (self.original_context / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        scaled = jnp.where(wavelength > low, frequencies / self.factor, between)
        return jnp.where(wavelength < high, frequencies, scaled)


@dataclasses.dataclass(frozen=True)
class Rotary:
    """How positions become angles.

    Attributes:
        theta: the base of the frequencies.
        scaling: for long contexts: a number by which positions are divided, or Llama 3.1's
            scaling of frequencies; None for neither.
    """

    theta: Theta = 10000.0
    scaling: Factor | Llama3Scaling | None = None

    def __post_init__(self) -> None:
        require_fields(self)

    def cos_sin(
        self, positions: Int[Array, "*B S"], head_dim: int
    ) -> tuple[Float[Array, "*B S P"], Float[Array, "*B S P"]]:
        """Cosine and sine of each pair's angle, the same for all heads."""
        if head_dim % 2:
            raise ValueError(f"Rotary embeddings rotate pairs: a head of {head_dim} is odd.")
        pairs = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        frequencies = 1.0 / self.theta**pairs  # radians per position
        if isinstance(self.scaling, Llama3Scaling):
            frequencies = self.scaling.scale(frequencies)
        elif self.scaling is not None:
            frequencies = frequencies / self.scaling
        frequencies = jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*B S N H"], positions: Int[Array, "*B S"], rotary: Rotary
) -> Float[Array, "*B S N H"]:
    """Rotates each head of `x` by its position.

    Args:
        x: queries or keys.
        positions: of each token, of shape [S] or [*B, S].
        rotary: how a position becomes angles.
    """
    require_real("rotate", x)
    if x.ndim < 3:
        raise ValueError(f"rotate takes x [*B, S, N, H], not {x.shape}.")
    require_rotary(rotary, positions, x.shape[:-2])
    return _rotate(rotary, x, positions)


def require_rotary(rotary: Any, positions: Array, tokens: tuple[int, ...]) -> None:
    """Raises unless this is a `Rotary`, and there is one position for each token, [*B, S]."""
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary={rotary!r} must be a coat.ops.Rotary, as in Rotary(theta=10000).")
    shape = jax.typeof(positions).shape
    if shape not in (tokens, tokens[-1:]):
        raise ValueError(f"positions {shape} must be one per token: {tokens[-1:]} or {tokens}.")


def rotary_forward(
    x: Float[Array, "B S N H"], cos: Float[Array, "*B S P"], sin: Float[Array, "*B S P"]
) -> Float[Array, "B S N H"]:
    """Rotates each head of `x`; P is H / 2."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (jnp.broadcast_to(angles[..., None, :], a.shape) for angles in (cos, sin))
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


def split_heads(y: Float[Array, "*B S NH"], head_dim: int) -> Float[Array, "*B S N H"]:
    """Columns as heads. (JAX cannot infer a size given as -1 in an array without elements.)"""
    return y.reshape(*y.shape[:-1], y.shape[-1] // head_dim, head_dim)


def join_heads(y: Float[Array, "*B S N H"]) -> Float[Array, "*B S NH"]:
    """The inverse of `split_heads`."""
    return y.reshape(*y.shape[:-2], y.shape[-2] * y.shape[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate(rotary: Rotary, x: Array, positions: Array) -> Array:
    return _forward(rotary, x, positions)[0]


def _forward(rotary: Rotary, x: Array, positions: Array) -> Any:
    return rotary_forward(x, *rotary.cos_sin(positions, x.shape[-1])), positions


def _backward(rotary: Rotary, positions: Array, gradient: Array) -> Any:
    return rotary_backward(gradient, *rotary.cos_sin(positions, gradient.shape[-1])), None


_rotate.defvjp(_forward, _backward)
