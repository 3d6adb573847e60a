"""The folder of a model as commands take it: `coat generate WHERE`, `coat evaluate WHERE`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.
The model of a run computes in the precision that it was trained in, a Hugging Face model in the
dtype of its weights, and a quantized one in 8 bits. For the tokenizer see `texts`.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_jax.cli.output import note
from coat_jax.errors import UserError
from coat_jax.files import expanded, read_json, status
from coat_jax.limits import Count, CountOrZero, require
from coat_jax.printable import counted

if TYPE_CHECKING:
    from coat_jax.models import Config, Llama
    from coat_jax.nn import MeshAxes


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments that choose a model, its tokenizer and its precision."""
    add = parser.add_argument
    add("where", type=Path, metavar="WHERE", help="the folder of a model")
    add("--tokenizer", metavar="FILE", help='a tokenizer.json, or "bytes"')
    add("--precision", help="bf16, fp8_linear, coat, coat_lean, coat_int8 or coat_paper")
    add("--step", type=int, help="step of a run's checkpoint; by default the newest intact one")


class ModelFolder:
    """The folder of a model: its config, its tokenizer, and the tokens that end a text.

    Attributes:
        config: of the model, with the precision and the sharding that the options ask for.
        tokenizer: of the model.
        stops: tokens that end a text.
        trained_length: tokens of a sequence in the run; of other models the context.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        *,
        axes: "MeshAxes | None" = None,
        batch_axes: tuple[str, ...] = (),
    ):
        """Reads everything but the arrays.

        Args:
            options: those of `add_model_arguments`.
            axes: of the mesh that parameters are sharded along.
            batch_axes: of the mesh that batches are sharded along.
        """
        from coat_jax.cli import texts
        from coat_jax.nn import MeshAxes
        from coat_jax.precision import precision_of
        from coat_jax.training.checkpoint import weights

        self._where, self._step = expanded(options.where), options.step
        config_json = weights.read_config_json(self._where)
        config = weights.model_config(self._where)
        length = config_json.get("sequence_length", config.context)
        self.trained_length = require(f"{self._where}: sequence_length", length, Count)
        if options.precision and weights.is_quantized(config_json):
            raise UserError(
                f"{self._where} is already quantized, which decides its precision: leave "
                "--precision out."
            )
        precision = precision_of(options.precision or config.precision)
        self.config: Config = dataclasses.replace(
            config, precision=precision, axes=axes or MeshAxes(), batch_axes=batch_axes
        )
        self.tokenizer = texts.tokenizer_of(self._where, config, options.tokenizer)
        self.stops = self._stops(
            config_json, texts.data_of(self._where, config_json).get("end_of_text")
        )

    def load(self) -> "Llama":
        """The model, on the mesh that is set."""
        from coat_jax.training.checkpoint import weights

        return weights.load(self._where, self.config, step=self._step, note=note)

    def _stops(self, config_json: dict[str, Any], of_run: int | None) -> list[int]:
        """The tokens that end a text: from generation_config.json, config.json or the tokenizer."""
        file = self._where / "generation_config.json"
        settings = read_json(file) if status(file) else {}
        ends = settings.get("eos_token_id")
        if ends is None:
            ends = config_json.get("eos_token_id")
        if ends is None:
            ends = self.tokenizer.end_of_text if of_run is None else of_run
        ends = ends if isinstance(ends, list) else [ends]
        for end in ends:
            require(f"{self._where}: eos_token_id", end, CountOrZero | None)
        return [end for end in ends if end is not None and end < self.config.vocab]


@contextlib.contextmanager
def on_devices(devices: int, axis: str) -> Iterator[None]:
    """Sets a mesh of this many devices along one axis, if it is more than one."""
    import jax

    if not 1 <= devices <= jax.device_count():
        there = counted(jax.device_count(), "device")
        raise UserError(f"--devices {devices} must be 1 or more, and JAX finds {there} here.")
    if devices == 1:
        yield
        return
    chosen, automatic = jax.devices()[:devices], (jax.sharding.AxisType.Auto,)
    with jax.set_mesh(jax.make_mesh((devices,), (axis,), devices=chosen, axis_types=automatic)):
        yield
