"""The folder of a model as commands take it, its tokenizer, and texts as its tokens.

The model of a run computes in the precision that it was trained in, a Hugging Face model in the
dtype of its weights, and a quantized one in 8 or 4 bits. Its tokenizer is

    --tokenizer              a tokenizer.json, or "bytes"; without it the first of
    FOLDER/tokenizer.json    if it is there
    data.tokenizer           in a run's config: the one that it was trained with
    bytes                    if the model's vocabulary has 256 tokens
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from coat_jax.cli.output import note
from coat_jax.errors import UserError
from coat_jax.files import expand_user, read_failures, read_json, require_regular
from coat_jax.models.batches import require_known
from coat_jax.precision import precision_of
from coat_jax.tokenizers import BYTES, AnyTokenizer, Bytes, Tokenizer
from coat_jax.training.checkpoint import weights
from coat_jax.training.families import family_of, name_of
from coat_jax.validation import CountOrZero, require

# A text is read up to this many characters, and this many more for each token that is wanted.
PIECE, LONGEST = 1 << 16, 16


def data_of(config_json: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what a run was trained on, by its config.json; nothing for other folders."""
    return config_json.get("data") or {} if weights.is_run(config_json) else {}


def tokenizer_of(folder: Path, config: Any, asked: str | None) -> AnyTokenizer:
    """Returns the tokenizer of a model.

    Args:
        folder: of a run, or one of Hugging Face.
        config: of the model.
        asked: a tokenizer.json, or BYTES; None for that of the folder.
    """
    if asked == BYTES:
        return Bytes()
    config_json, own = weights.read_config_json(folder), folder / "tokenizer.json"
    file = asked or (own if own.exists() else data_of(config_json).get("tokenizer"))
    if file is not None:
        # Our training puts nothing in front of a text.
        tokenizer = Tokenizer(file, begin=not weights.is_run(config_json))
        tokenizer.require_fits(config.vocab)
        return tokenizer
    if config.vocab != Bytes.vocab:
        raise UserError(
            f"{folder} has no tokenizer.json, and its model knows {config.vocab:,} tokens. Name "
            f"its tokenizer with --tokenizer FILE; or --tokenizer {BYTES}."
        )
    return Bytes()


def tokens_of(text: Path, folder: Path, config: Any, asked: str | None, *, most: int) -> list[int]:
    """Returns the first tokens of a text, `most` or fewer; see `tokenizer_of`."""
    path, tokenizer = expand_user(text), tokenizer_of(folder, config, asked)
    require_regular(path)
    with read_failures(path), path.open(encoding="utf-8-sig", newline="") as file:
        size = path.stat().st_size  # bytes: no fewer than characters
        tokens = tokenizer.encode(file.read(min(PIECE + LONGEST * most, size)))[:most]
    require_known(f"{text} has", tokens, config.vocab)
    return tokens


class ModelFolder:
    """The folder of a model: its config, its tokenizer, and the tokens that end a text.

    Attributes:
        where: the path of the folder.
        config_json: its config.json.
        config: of the model, with the precision and the sharding that the options ask for.
        tokenizer: of the model.
        stops: tokens that end a text.
        trained_length: tokens of a sequence in the run; of other models the context.
    """

    def __init__(self, options: argparse.Namespace, **sharding: Any):
        """Reads everything but the arrays.

        Args:
            options: those of `arguments.add_model_arguments`.
            **sharding: fields of the config: the mesh axes of parameters and batches.
        """
        self.where, self._step = expand_user(options.where), options.step
        self.config_json = config_json = weights.read_config_json(self.where)
        config = weights.model_config(self.where)
        if not family_of(config).is_text:
            raise UserError(
                f"{self.where} holds a model of the family {name_of(config)!r}, which neither "
                "reads nor writes text. Load it in Python: coat_jax.models.video.sample makes "
                "videos with it."
            )
        self.trained_length: int = config_json.get("sequence_length", config.context)
        if options.precision and weights.is_quantized(config_json):
            raise UserError(
                f"{self.where} is already quantized, which decides its precision: leave "
                "--precision out."
            )
        if options.precision:
            config = config.in_precision(precision_of(options.precision))
        self.config: Any = dataclasses.replace(config, **sharding)
        self.tokenizer = tokenizer_of(self.where, config, options.tokenizer)
        file = self.where / "generation_config.json"
        settings = read_json(file) if file.exists() else {}
        of_run = data_of(config_json).get("end_of_text")
        named = settings.get("eos_token_id"), config_json.get("eos_token_id"), of_run
        ends = next((e for e in named if e is not None), self.tokenizer.end_of_text)
        ends = ends if isinstance(ends, list) else [ends]
        for end in ends:
            require(f"{self.where}: eos_token_id", end, CountOrZero | None)
        self.stops = [end for end in ends if end is not None and end < config.vocab]

    def load(self) -> Any:
        """Returns the model, on the mesh that is set."""
        return weights.load(self.where, self.config, step=self._step, note=note)


@contextlib.contextmanager
def on_devices(devices: int, axis: str) -> Iterator[None]:
    """Sets a mesh of this many devices along one axis, if it is more than one."""
    if devices > jax.device_count():
        raise UserError(f"--devices {devices}: JAX finds {jax.device_count()} here.")
    if devices == 1:
        yield
        return
    chosen, automatic = jax.devices()[:devices], (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((devices,), (axis,), devices=chosen, axis_types=automatic)):
        yield
