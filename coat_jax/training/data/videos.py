"""Videos as latents, with the states of their texts: files of safetensors, made beforehand.

    latents    [videos, frames, height, width, channels]
    text       [videos, tokens, width]; shorter texts end in zeros

A row is a video and a seed, which decides its time and its noise. Each video is in an epoch with
`SEEDS` of them, so a model meets it at many times before an epoch ends. In held-out data each video
has a few, always the same.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from coat_jax.errors import UserError
from coat_jax.models.hf.files import read_file
from coat_jax.models.lazy_arrays import LazyArray
from coat_jax.models.video import Batch, Config
from coat_jax.printable import amount
from coat_jax.training.data.paths import files_of, require_apart
from coat_jax.training.data.rows import Rows
from coat_jax.training.data.sources import Split
from coat_jax.validation import Between, Count, require_fields

SEEDS = {"train": 1000, "held_out": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideosConfig:
    """Where videos come from. A path may be a pattern: 'latents/*.safetensors'.

    Attributes:
        train: paths of files with the tensors "latents" and "text".
        held_out: paths of data for evaluation. Without any, the last videos of the training data
            are held out.
        held_out_part: the share of the training data that is held out in this way.
        text_tokens: tokens of a text, with those that are empty.
    """

    train: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    held_out_part: Annotated[float, Between(above=0, below=1)] = 0.01
    text_tokens: Count = 512

    def __post_init__(self) -> None:
        require_fields(self, "data.")


class _File(NamedTuple):
    path: Path
    latents: LazyArray
    text: LazyArray


def rows_of(config: VideosConfig, model: Config, *, split: Split, sequence: int) -> Rows:
    """Opens the videos of one split, and compares their shapes with what the model takes."""
    if sequence != (tokens := int(np.prod(model.grid))):
        raise UserError(
            f"sequence_length={sequence} must be {tokens}: a video of the model's latents has so "
            "many tokens."
        )
    if not config.train:
        raise UserError(
            "data.train=() names no videos: give files with their latents and texts, as in "
            "--data.train 'latents/*.safetensors'."
        )
    files = files_of(config.train)
    held_out = files_of(config.held_out) if config.held_out else []
    require_apart(held_out, files)
    chosen = held_out if split == "held_out" and held_out else files
    opened = [_open(path, config, model) for path in chosen]
    count = sum(one.latents.shape[0] for one in opened)
    videos = range(count)
    if not held_out:
        kept = count - max(round(config.held_out_part * count), 1)
        videos = videos[:kept] if split == "train" else videos[kept:]
    if not videos:
        raise UserError(
            f"The {split} data has no video, because all files have {amount(count, 'video')}. Add "
            "videos, or name files in data.held_out."
        )
    return VideoRows(opened, videos, split)


def _open(path: Path, config: VideosConfig, model: Config) -> _File:
    if path.suffix != ".safetensors":
        raise UserError(
            f"{path} must be a .safetensors file, with `latents` and `text` as numbers."
        )
    found = read_file(path)
    shapes = {
        "latents": (*model.latents, model.channels),
        "text": (config.text_tokens, model.text_width),
    }
    for name, shape in shapes.items():
        if name not in found or found[name].shape[1:] != shape:
            there = f"{list(found[name].shape)}" if name in found else "none"
            raise UserError(
                f"{path} has {name} {there}, and needs [videos, {', '.join(map(str, shape))}]."
            )
    if found["latents"].shape[0] != found["text"].shape[0]:
        raise UserError(
            f"{path} has {found['latents'].shape[0]} videos and {found['text'].shape[0]} texts."
        )
    return _File(path, found["latents"], found["text"])


class VideoRows(Rows):
    """A video and a seed in each row."""

    def __init__(self, files: list[_File], videos: range, split: Split):
        self._files, self._videos = files, videos
        self._ends = np.cumsum([one.latents.shape[0] for one in files])
        self._seeds = SEEDS[split]
        self.end_of_text = None
        named = [(one.path.name, one.path.stat().st_size) for one in files]
        digest = hashlib.sha256(repr((named, videos, split)).encode())
        for array in (*self._video(videos[0]), *self._video(videos[-1])):
            digest.update(array.tobytes())
        self.digest = digest.hexdigest()[:16]
        self.description = f"{amount(len(videos), 'video')}, each with {self._seeds:,} seeds"
        self.padding: Any = self[0]._replace(counts=np.bool_(False))

    def __len__(self) -> int:
        return len(self._videos) * self._seeds

    def __getitem__(self, row: int) -> Batch:
        latents, text = self._video(self._videos[row % len(self._videos)])
        return Batch(latents, text, np.uint32(row), np.bool_(True))

    def has_labels(self, row: Any) -> bool:
        """See `Rows`."""
        return bool(row.counts)

    def _video(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        file = int(np.searchsorted(self._ends, number, side="right"))
        one, place = self._files[file], number - (self._ends[file - 1] if file else 0)
        latents, text = (
            tensor.read((slice(place, place + 1), *[slice(None)] * (len(tensor.shape) - 1)))[0]
            for tensor in (one.latents, one.text)
        )
        return latents.astype(np.float32), text.astype(jnp.bfloat16)
