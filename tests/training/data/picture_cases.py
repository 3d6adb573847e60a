"""Small conversations with pictures: 4 x 4 pixels, of the gray that their name says."""

import dataclasses

import numpy as np
from data_cases import write_lines
from PIL import Image

from coat_jax.models.vision_language import ImageFormat, TowerConfig, config_of
from coat_jax.training.data import PicturesConfig
from coat_jax.training.data.picture_rows import rows_of

TINY = config_of("vlm_tiny")
SIDE, IMAGE = 4, TINY.image_token
TOWER = TowerConfig(images=ImageFormat(size=SIDE), patch=2, width=8, layers=1, heads=1, ffn=8)
MODEL = dataclasses.replace(TINY, tower=TOWER)
BLOCK = "[####]"  # a picture in `text_of`, with what is before and after it in `config_of_files`


def paint(folder, *numbers):
    """Writes 7.png for the number 7; its pixels are 7."""
    folder.mkdir(exist_ok=True)
    for number in numbers:
        Image.new("L", (SIDE, SIDE), number).save(folder / f"{number}.png")
    return folder


def picture(number):
    return {"type": "image", "image": f"{number}.png"}


def text(words):
    return {"type": "text", "text": words}


def talk(*content, answer="x"):
    user = {"role": "user", "content": list(content)}
    return {"messages": [user, {"role": "assistant", "content": answer}]}


def write_talks(folder, numbers, name="a.jsonl"):
    """A conversation about each of these pictures, which the answer names."""
    paint(folder, *numbers)
    return write_lines(folder / name, [talk(picture(n), answer=f"{n}") for n in numbers])


def config_of_files(*paths, **changes):
    usual = {"template": "{role}: {content}{end}", "picture_before": "[", "picture_after": "]"}
    return PicturesConfig(train=tuple(map(str, paths)), **usual | changes)


def open_rows(*paths, split="train", sequence=64, model=MODEL, seed=0, **changes):
    config = config_of_files(*paths, **changes)
    return rows_of(config, model, split=split, sequence=sequence, seed=seed)


def text_of(tokens):
    return "".join({IMAGE: "#", 0: "¶"}.get(token, chr(token)) for token in tokens.tolist())


def answers_of(row):
    """What is learned."""
    places = np.flatnonzero(row.labels >= 0)
    assert np.array_equal(row.labels[places], row.tokens[places + 1])
    return text_of(row.labels[places])


def numbers_of(row):
    """The numbers of a row's pictures; 0 is blank."""
    assert (row.images == row.images[..., :1, :1, :1]).all()
    return row.images[..., 0, 0, 0].tolist()


def texts_of(row):
    """The text of each conversation in a row."""
    segments = range(1, row.segments.max() + 1)
    return [text_of(row.tokens[row.segments == segment]) for segment in segments]
