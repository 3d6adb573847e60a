"""Rows of conversations with pictures, and of drawings; see `pictures`.

Short conversations share a row, which has room for `pictures_per_row` pictures; what is empty is
blank. Pictures are decoded when their row is read, by the loader's threads.
"""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from coat_jax.errors import UserError
from coat_jax.files import read_failures
from coat_jax.models.batches import IGNORED
from coat_jax.models.vision_language import Batch, Config
from coat_jax.models.vision_language.images import load
from coat_jax.printable import amount
from coat_jax.tokenizers import AnyTokenizer
from coat_jax.training.data import chat
from coat_jax.training.data.chat import Message
from coat_jax.training.data.drawings import COUNTS, DRAWINGS, SIDE, draw
from coat_jax.training.data.packing import Packed
from coat_jax.training.data.paths import files_of, require_apart
from coat_jax.training.data.pictures import (
    Conversations,
    Picture,
    PicturesConfig,
    picture_tokens,
    read,
    tokenizer_of,
)
from coat_jax.training.data.rows import Rows, TextRows, documents_of, pad
from coat_jax.training.data.sources import Split, documents_of_split

HEAD = 1 << 12  # bytes of a picture that the digest reads


def rows_of(
    config: PicturesConfig, model: Config, *, split: Split, sequence: int, seed: int = 0
) -> Rows:
    """Opens the data of one split, and reads the headers of its pictures.

    Args:
        config: what the data is.
        model: for which tokens and pixels are made.
        split: "train", or "held_out", which shares no conversation with it.
        sequence: tokens in a row.
        seed: decides which conversations share a row.
    """
    if DRAWINGS in config.train:
        return DrawnRows(config, model, sequence=sequence, split=split)
    files = files_of(config.train)
    held_out = files_of(config.held_out) if config.held_out else []
    require_apart(held_out, files)
    chosen = held_out if split == "held_out" and held_out else files
    found = read(chosen, config, model, sequence)
    if not held_out:
        count = len(found.documents.ends)
        found = found.part(documents_of_split(split, count, config.held_out_part))
    if not found.documents.learned.any():
        raise UserError(
            f"The {split} data has no answer in its {amount(len(found.cut), 'conversation')}. Is "
            "there only one in all, or each answer beyond sequence_length?"
        )
    return PictureRows(found, config, model, sequence=sequence, seed=seed)


class PictureRows(Packed):
    """Rows of conversations, with their pictures."""

    def __init__(
        self,
        found: Conversations,
        config: PicturesConfig,
        model: Config,
        *,
        sequence: int,
        seed: int,
    ):
        self._pictures, self._counts = found.pictures, found.counts
        self._first = np.cumsum(found.counts) - found.counts
        self._format, self._most = model.tower.images, config.pictures_per_row
        super().__init__(
            found.documents,
            sequence=sequence,
            seed=seed,
            end_of_text=found.end_of_text,
            pictures=found.counts,
            most_pictures=self._most,
        )
        hashed = hashlib.sha256(self.digest.encode())
        for picture in found.pictures:
            hashed.update(_digest_of(picture.path))
        self.digest = hashed.hexdigest()[:16]
        self.description += f", with {amount(len(found.pictures), 'picture')}"
        if cut := int(found.cut.sum()):
            self.description += f"; cut to that length: {amount(cut, 'conversation')}"
        self.padding = self._illustrated(self.padding, [])

    def __getitem__(self, row: int) -> Batch:
        numbers = [
            self._first[document] + i
            for document in self._plan[row]
            for i in range(self._counts[document])
        ]
        return self._illustrated(super().__getitem__(row), [self._pictures[n] for n in numbers])

    def _illustrated(self, row: Any, pictures: list[Picture]) -> Batch:
        size = self._format.size
        images = np.zeros((self._most, size, size, 3), np.uint8)
        for i, picture in enumerate(pictures):
            images[i] = load(picture.path, self._format, picture.place)
        return _with_images(row, images)


def _with_images(row: Any, images: UInt8[np.ndarray, "I H W 3"]) -> Batch:
    return Batch(row.tokens, row.labels, images, row.positions, row.segments)


def _digest_of(path: Path) -> bytes:
    """Names a picture by its beginning and its size."""
    with read_failures(path), path.open("rb") as file:
        name = f"{path.name} {path.stat().st_size}".encode()
        return hashlib.sha256(name + file.read(HEAD)).digest()


class DrawnRows(TextRows):
    """A conversation about a drawing in each row: all its questions in turn."""

    def __init__(self, config: PicturesConfig, model: Config, *, sequence: int, split: Split):
        if model.tower.images.size != SIDE or model.image_token != 255:
            raise UserError(
                f'data.train="{DRAWINGS}" are pictures of {SIDE} x {SIDE} pixels with text as '
                "bytes, of which 255 stands for a picture. The model has images of "
                f"{model.tower.images.size} pixels and image_token={model.image_token}: train "
                "vlm_tiny on them, or name other data."
            )
        others = config.train[1:], config.held_out, config.tokenizer, config.pictures_per_row > 1
        if any(others):
            raise UserError(
                f'data.train="{DRAWINGS}" takes neither other paths, nor data.held_out, nor '
                "data.tokenizer, and has one picture in a row: leave these out."
            )
        self._tokenizer, self._template = tokenizer_of(config, model), config.template
        self._block = picture_tokens(self._tokenizer, config, model)
        self._split: Split = split
        digested = DRAWINGS, split, sequence, config.template, self._block
        super().__init__(sequence, len(self) * sequence, self._tokenizer.end_of_text, digested)
        self.description = f"{len(self):,} drawings, one in each row of {sequence}"
        blank = np.zeros((1, SIDE, SIDE, 3), np.uint8)
        self.padding = _with_images(self.padding, blank)

    def __len__(self) -> int:
        return COUNTS[self._split]

    def __getitem__(self, row: int) -> Batch:
        drawing = draw(self._split, row)
        how = self._tokenizer, self._template, self._block, self.sequence
        return row_of_questions(drawing.pixels, drawing.questions.values(), *how)


def row_of_questions(
    pixels: UInt8[np.ndarray, "H W 3"],
    questions: Iterable[tuple[str, str]],
    tokenizer: AnyTokenizer,
    template: str,
    picture: Sequence[int],
    sequence: int,
) -> Batch:
    """Returns a row with a conversation about one picture.

    Args:
        pixels: of the picture.
        questions: in turn, each with its answer, which is learned.
        tokenizer: makes the tokens.
        template: how a message is written.
        picture: its tokens; see `picture_tokens`.
        sequence: tokens of the row, at which a longer conversation ends.
    """
    messages = []
    for number, (question, answer) in enumerate(questions):
        asked = (question,) if number else ("", question)
        messages.append(Message("user", asked, False, number == 0, DRAWINGS))
        messages.append(Message("assistant", (answer,), True, False, DRAWINGS))
    found = chat.tokenize(messages, [], tokenizer, template, picture)
    tokens = found.tokens.astype(np.int32)[: sequence + 1]
    labels = np.where(found.learned[1 : len(tokens)], tokens[1:], np.int32(IGNORED))
    text = documents_of(tokens[:-1], labels, np.zeros(len(labels), bool))
    return _with_images(pad(text, sequence), pixels[None])
