"""Drawn videos of moving shapes, losses at each time, and pictures of videos.

A shape has one color and moves in one direction, from a place that its text does not tell. A text
has a vector for each shape, with a number for each of its three words.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from coat_jax.models.video import VideoTransformer
from experiments.row_files import rounded

SHAPES = ("square", "disk", "cross", "ring")
COLORS = {
    "red": (1, -0.7, -0.7), "green": (-0.7, 0.9, -0.7), "blue": (-0.6, -0.3, 1),
    "yellow": (1, 0.9, -0.8), "white": (1, 1, 1), "pink": (1, -0.2, 0.7),
}  # fmt: skip
DIRECTIONS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WORDS = (*SHAPES, *COLORS, *DIRECTIONS)
STRENGTH = 3.0  # of a word in a text
WAY, SIZE = 0.35, 0.28  # how far a shape moves, and its radius, as shares of the picture's side
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)

Video = tuple[Float[np.ndarray, "F H W 3"], Float[np.ndarray, "shapes words"]]


def video(number: int, frames: int, side: int, shapes: int = 1) -> Video:
    """A video, from -1 to 1, and its text; later shapes cover earlier ones."""
    random = np.random.default_rng(number)
    drawn = np.full((frames, side, side, 3), -1, np.float32)
    text = np.zeros((shapes, len(WORDS)), np.float32)
    places, size = np.arange(side) + 0.5, SIZE * side
    for words in text:
        chosen = [str(random.choice(group)) for group in (SHAPES, [*COLORS], [*DIRECTIONS])]
        shape, color, direction = chosen
        words[[WORDS.index(word) for word in chosen]] = STRENGTH
        way = WAY * side * np.array(DIRECTIONS[direction])
        start = random.uniform(size - np.minimum(way, 0), side - size - np.maximum(way, 0))
        for number_of_frame, progress in enumerate(np.linspace(0, 1, frames)):
            row, column = start + progress * way
            ink = inside(shape, places[:, None] - row, places[None, :] - column, size)[..., None]
            drawn[number_of_frame] += ink * (np.float32(COLORS[color]) - drawn[number_of_frame])
    return drawn, text


def inside(shape: str, row: np.ndarray, column: np.ndarray, size: float) -> np.ndarray:
    """How much of each pixel the shape covers."""
    far, near = np.maximum(abs(row), abs(column)), np.minimum(abs(row), abs(column))
    around = np.hypot(row, column)
    edge = {
        "square": size - far,
        "disk": size - around,
        "cross": np.minimum(size - far, size / 3 - near),
        "ring": np.minimum(size - around, around - size / 2),
    }[shape]
    return np.clip(edge + 0.5, 0, 1)


def stacked(videos: Iterable[Video]) -> tuple[np.ndarray, np.ndarray]:
    """Videos and their texts as two arrays."""
    latents, text = zip(*videos, strict=True)
    return np.stack(latents), np.stack(text)


def losses_by_time(model: VideoTransformer, videos: Sequence[Video], batch: int) -> list[float]:
    """The squared error of velocities at each of TIMES; the noise is always the same."""

    @nnx.jit
    def error(model: VideoTransformer, latents: Any, text: Any, key: Any, time: Any) -> Any:
        noise = jax.random.normal(key, latents.shape)
        noisy = (1 - time) * latents + time * noise
        found = model(noisy, text, jnp.full(len(latents), time))
        return jnp.mean(jnp.square(found - (noise - latents)))

    sums = np.zeros(len(TIMES))
    for first in range(0, len(videos), batch):
        some = stacked(videos[first : first + batch])
        key = jax.random.key(first)
        errors = [error(model, *some, key, jnp.float32(time)) for time in TIMES]
        sums += len(some[0]) * np.array(errors, np.float64)
    return [rounded(total / len(videos)) for total in sums]


def to_pixels(videos: Any, enlarged: int = 1, gap: int = 0) -> np.ndarray:
    """Videos [..., frames, height, width, 3] as bytes, each with a gap around it."""
    pixels = np.uint8(np.clip((np.asarray(videos, np.float32) + 1) * 127.5, 0, 255))
    pixels = pixels.repeat(enlarged, -3).repeat(enlarged, -2)
    return np.pad(pixels, [(0, 0)] * (pixels.ndim - 3) + [(gap, gap)] * 2 + [(0, 0)])


def contact_sheet(pixels: np.ndarray, frames: int = 4) -> np.ndarray:
    """Videos [ways, videos, frames, height, width, 3]: a row has some frames of all ways."""
    _, videos, length, height, _, _ = pixels.shape
    some = pixels[:, :, :: length // frames][:, :, :frames]
    return some.transpose(1, 3, 0, 2, 4, 5).reshape(videos * height, -1, 3)


def frames_of_all(pixels: np.ndarray) -> np.ndarray:
    """Videos [ways, videos, frames, height, width, 3] as frames with all of them."""
    ways, videos, frames, height, width, _ = pixels.shape
    moving = pixels.transpose(2, 0, 3, 1, 4, 5)
    return moving.reshape(frames, ways * height, videos * width, 3)
