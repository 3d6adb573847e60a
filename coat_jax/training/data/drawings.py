"""Drawn numbers with questions: pictures to learn from, without a download.

    +----------+      read             37-1: the digits of the upper half, a dash, the lower half
    |  3    7  |      top left?        3; none in an empty corner
    |          |      how many?        3
    |       1  |
    +----------+

Two to four different digits stand in the corners. A drawing follows from its number, as do its
questions and their order. Held-out drawings are others than those of training.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from coat_jax.models.vision_language.images import pillow
from coat_jax.training.data.sources import Split

DRAWINGS = "drawings"  # in place of paths
COUNTS = {"train": 60_000, "held_out": 2_000}
PLACES = ("top left", "top right", "bottom left", "bottom right")
SIDE = 56


class Drawing(NamedTuple):
    """A picture, and what there is to say about it: questions and answers."""

    pixels: UInt8[np.ndarray, "56 56 3"]
    questions: dict[str, tuple[str, str]]  # by kind: the question and its answer


def draw(split: Split, number: int) -> Drawing:
    """Returns the drawing of this number."""
    random = np.random.default_rng([number, sorted(COUNTS).index(split)])
    corners = sorted(random.choice(4, random.integers(2, 5), replace=False).tolist())
    chosen = random.choice(10, len(corners), replace=False).tolist()
    digits = dict(zip(corners, chosen, strict=True))
    canvas = random.normal(random.uniform(200, 235), 5, (SIDE, SIDE))
    for corner, digit in digits.items():
        mask, ink = _digit(digit, random), random.uniform(10, 70)
        # Anywhere in its quarter of the picture.
        half = SIDE // 2
        top, left = random.integers(0, half - len(mask) + 1, 2) + np.array(divmod(corner, 2)) * half
        there = canvas[top : top + len(mask), left : left + len(mask)]
        there += mask * (ink - there)
    gray = canvas.clip(0, 255).astype(np.uint8)
    rows = ["".join(str(digits[c]) for c in half if c in digits) for half in ((0, 1), (2, 3))]
    asked = int(random.integers(4))
    kinds = {
        "read": ("read", "-".join(rows)),
        "place": (f"{PLACES[asked]}?", str(digits.get(asked, "none"))),
        "count": ("how many?", str(len(digits))),
    }
    order = random.permutation(list(kinds)).tolist()
    return Drawing(np.repeat(gray[..., None], 3, axis=2), {kind: kinds[kind] for kind in order})


def _digit(digit: int, random: np.random.Generator) -> np.ndarray:
    """How much ink a digit has where, in a square: of any size, a little turned."""
    size, angle = int(random.integers(24, 29)), float(random.uniform(-10, 10))
    drawn = pillow("Image").new("L", (size, size))
    pillow("ImageDraw").Draw(drawn).text(
        (size / 2, size / 2), str(digit), fill=255, font=_font(size - 3), anchor="mm"
    )
    return np.asarray(drawn.rotate(angle, resample=2), np.float64) / 255


@functools.cache
def _font(size: int) -> Any:
    return pillow("ImageFont").load_default(size)
