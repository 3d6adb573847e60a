"""Grids of nine coloured icons, with questions.

    what is there?                         red anchor, blue bell, .. all nine
    what is in the middle left?            red anchor
    what color is the bell?                green
    where is the bell?                     top right
    how many are red?                      2
    is there a blue bell?                  no, although there is a bell, or something blue

A scene follows from its split and its number. In training, pairs of a name and a color that
`is_kept_back` names do not occur, nor icons of the style "fill".

    train          what is learned
    held_out       other scenes of the same kind
    style          all icons are of the style "fill"
    combinations   all pairs are kept back
"""

import functools
import importlib.metadata
import json
import zlib
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, UInt8

Split = Literal["train", "held_out", "style", "combinations"]
SPLITS: tuple[Split, ...] = get_args(Split)
SIDE, CELL = 192, 64  # pixels of a scene, and of the square of an icon
FONT, CHARACTERS = "phosphor-1.3.0.ttf", "phosphor-charmap-1.3.0.json"
STYLES = ("", "-thin", "-light", "-bold")  # and "-fill"
NAMES = (
    "airplane", "anchor", "atom", "bell", "bicycle", "bird", "boat", "book", "bug", "bus", "cake",
    "camera", "car", "cat", "clock", "cloud", "coffee", "crown", "cube", "diamond", "dog", "ear",
    "eye", "factory", "fish", "flag", "flask", "flower", "gear", "ghost", "gift", "globe", "hand",
    "heart", "horse", "house", "key", "knife", "lamp", "laptop", "leaf", "lock", "magnet", "moon",
)  # fmt: skip
COLORS = {
    "red": (214, 39, 40),
    "green": (44, 150, 44),
    "blue": (31, 100, 220),
    "yellow": (225, 180, 20),
    "purple": (140, 60, 190),
    "orange": (250, 125, 15),
    "pink": (235, 110, 185),
    "gray": (120, 120, 120),
}
PLACES = [
    f"{row} {column}"
    for row in ("top", "middle", "bottom")
    for column in ("left", "center", "right")
]
KINDS = ("read", "name", "color", "place", "count", "yes")
KEPT_BACK = 8  # one pair in so many


class Icon(NamedTuple):
    """One of the nine."""

    name: str
    color: str
    style: str


class Scene(NamedTuple):
    """A grid of icons, and what is asked about it."""

    icons: tuple[Icon, ...]  # by place
    questions: dict[str, tuple[str, str]]  # by kind: the question and its answer


def is_kept_back(name: str, color: str) -> bool:
    """Whether training has no icon of this name in this color."""
    return zlib.crc32(f"{color} {name}".encode()) % KEPT_BACK == 0


def scene_of(split: Split, number: int) -> Scene:
    """The scene of this number."""
    random = np.random.default_rng([SPLITS.index(split), number])
    pairs = _pairs(split == "combinations")
    chosen: list[Icon] = []
    for index in random.permutation(len(pairs)).tolist():
        name, color = pairs[index]
        if name not in {icon.name for icon in chosen}:
            style = "-fill" if split == "style" else STYLES[random.integers(len(STYLES))]
            chosen.append(Icon(name, color, style))
        if len(chosen) == len(PLACES):
            break
    return Scene(tuple(chosen), _questions(chosen, random))


@functools.cache
def _pairs(kept_back: bool) -> list[tuple[str, str]]:
    return [(n, c) for n in NAMES for c in COLORS if is_kept_back(n, c) == kept_back]


def _questions(icons: list[Icon], random: np.random.Generator) -> dict[str, tuple[str, str]]:
    place, other, third = random.choice(len(icons), 3, replace=False).tolist()
    asked, color = icons[other], icons[third].color
    true = random.random() < 0.5
    # An icon that is there, in a color that is there, and not always its own.
    hue = (
        asked.color
        if true
        else next(c for c in random.permutation([*COLORS]).tolist() if c != asked.color)
    )
    read = ", ".join(f"{icon.color} {icon.name}" for icon in icons)
    found = {
        "read": ("what is there?", read),
        "name": (f"what is in the {PLACES[place]}?", f"{icons[place].color} {icons[place].name}"),
        "color": (f"what color is the {asked.name}?", asked.color),
        "place": (f"where is the {icons[third].name}?", PLACES[third]),
        "count": (f"how many are {color}?", str(sum(icon.color == color for icon in icons))),
        "yes": (f"is there a {hue} {asked.name}?", "yes" if true else "no"),
    }
    return {kind: found[kind] for kind in random.permutation(KINDS).tolist()}


def draw(scene: Scene) -> UInt8[np.ndarray, "192 192 3"]:
    """The picture of a scene."""
    rows = (scene.icons[first : first + 3] for first in (0, 3, 6))
    return np.vstack([np.hstack([_drawn(icon) for icon in row]) for row in rows])


@functools.cache
def _drawn(icon: Icon) -> UInt8[np.ndarray, "64 64 3"]:
    """An icon, on white."""
    ink = _ink(icon.name + icon.style)[..., None]
    return (255 + ink * (np.float32(COLORS[icon.color]) - 255)).astype(np.uint8)


def _ink(name: str) -> Float[np.ndarray, "64 64"]:
    """How much of an icon is where."""
    from PIL import Image, ImageDraw

    drawn, middle = Image.new("L", (CELL, CELL)), (CELL / 2, CELL / 2)
    ImageDraw.Draw(drawn).text(middle, _characters()[name], fill=255, font=_font(), anchor="mm")
    return np.asarray(drawn, np.float32) / 255


@functools.cache
def _font() -> object:
    from PIL import ImageFont

    return ImageFont.truetype(str(_file(FONT)), CELL - 12)


@functools.cache
def _characters() -> dict[str, str]:
    found: dict[str, str] = json.loads(_file(CHARACTERS).read_text())
    return {name: chr(int(code, 16)) for name, code in found.items()}


def _file(name: str) -> Path:
    """A file of the package qtawesome, which is not imported: that would need Qt."""
    (file,) = (f for f in importlib.metadata.files("qtawesome") or () if f.name == name)
    return Path(str(file.locate()))
