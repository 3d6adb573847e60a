"""The folder of a model as commands take it: `coat generate WHERE`, `coat evaluate WHERE`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.
The model of a run computes in the precision that it was trained in, a Hugging Face model in the
dtype of its weights, and a quantized one in 8 bits. For the tokenizer see `texts`.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from coat_jax.cli import texts
from coat_jax.cli.output import note
from coat_jax.errors import UserError
from coat_jax.files import expand_user, read_json
from coat_jax.models import Config, Llama
from coat_jax.precision import precision_of
from coat_jax.training.checkpoint import weights
from coat_jax.validation import CountOrZero, require


class ModelFolder:
    """The folder of a model: its config, its tokenizer, and the tokens that end a text.

    Attributes:
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
        self._where, self._step = expand_user(options.where), options.step
        config_json = weights.read_config_json(self._where)
        config = weights.model_config(self._where)
        self.trained_length: int = config_json.get("sequence_length", config.context)
        if options.precision and weights.is_quantized(config_json):
            raise UserError(
                f"{self._where} is already quantized, which decides its precision: leave "
                "--precision out."
            )
        precision = precision_of(options.precision or config.precision)
        self.config: Config = dataclasses.replace(config, precision=precision, **sharding)
        self.tokenizer = texts.tokenizer_of(self._where, config, options.tokenizer)
        file = self._where / "generation_config.json"
        settings = read_json(file) if file.exists() else {}
        of_run = texts.data_of(config_json).get("end_of_text")
        named = settings.get("eos_token_id"), config_json.get("eos_token_id"), of_run
        ends = next((e for e in named if e is not None), self.tokenizer.end_of_text)
        ends = ends if isinstance(ends, list) else [ends]
        for end in ends:
            require(f"{self._where}: eos_token_id", end, CountOrZero | None)
        self.stops = [end for end in ends if end is not None and end < config.vocab]

    def load(self) -> Llama:
        """Returns the model, on the mesh that is set."""
        return weights.load(self._where, self.config, step=self._step, note=note)


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
