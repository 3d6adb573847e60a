"""Converts models between Hugging Face folders and runs, and both to 8 bits.

    to_run              safetensors -> config.json, checkpoints/0, as of a run before its first step
    to_hugging_face     a checkpoint of a run -> config.json, safetensors
    to_quantized        either of them -> config.json, safetensors in compressed-tensors' layout

The first two hold one piece of one parameter in memory at a time. Each is the inverse of the other,
bit for bit. The third holds one parameter of one layer, and the whole model during calibration. All
can balance the model on a text; while they do, the whole model is in memory. All copy the
tokenizer's files, too (`tokenizer_files`). The new folder appears when it is complete.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from coat_jax import quantization
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import hf, lazy_arrays
from coat_jax.models.lazy_arrays import LazyArray, Name, Parameters
from coat_jax.nn import MeshAxes
from coat_jax.quantization import Recipe
from coat_jax.quantization.balancing import balance_parameters, find_factors, require_balanceable
from coat_jax.quantization.calibration import observe
from coat_jax.training.checkpoint import tokenizer_files, weights
from coat_jax.training.checkpoint.tokenizer_files import TokenizerFiles
from coat_jax.training.families import hf_of
from coat_jax.writing import atomic_folder, require_new_folder, write_failures

ROWS, LONGEST = 8, 512  # of a batch of calibration tokens

COMMAND = "coat convert"
OnProgress = Callable[[int, int], object]
Note = Callable[[str], object]


def to_run(
    source: str | Path,
    out: str | Path,
    *,
    dtype: DTypeLike | None = None,
    balance_on: Sequence[int] = (),
    tokenizer: str | Path | None = None,
    progress: OnProgress = lambda total, size: None,
) -> None:
    """Writes the model of a Hugging Face folder as a run with one checkpoint.

    Args:
        source: the folder, with config.json and safetensors files.
        out: the folder to make.
        dtype: of the parameters; that of the tensors by default.
        balance_on: the tokens of a text to balance the model on; see `quantization.balance`.
        tokenizer: a tokenizer.json to put beside them; by default the one in the folder.
        progress: called with the bytes to be read in all, and those read since its last call.
    """
    model = _read(source, out, "A run", tokenizer)
    parameters = model.parameters
    kinds = {one.dtype if dtype is None else jnp.dtype(dtype) for one in parameters.values()}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.name for kind in kinds))
        raise UserError(
            f"The tensors have several dtypes, {names}, and a model has one: choose it "
            "with --dtype, or in code with dtype=."
        )
    (kind,) = kinds
    config = dataclasses.replace(model.config, param_dtype=kind, dtype=kind)
    cast = {name: lazy_arrays.cast(one, kind, _dotted(name)) for name, one in parameters.items()}
    model = model._replace(config=config, parameters=cast)
    with _new_folder(model, balance_on, progress) as (folder, parameters, advance):
        weights.write(folder, config, parameters, progress=advance)


def to_hugging_face(
    source: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    balance_on: Sequence[int] = (),
    tokenizer: str | Path | None = None,
    file_bytes: int = hf.FILE_BYTES,
    progress: OnProgress = lambda total, size: None,
    note: Note = lambda text: None,
) -> None:
    """Writes the model of a run for transformers; for other arguments see `to_run`.

    Args:
        source: the folder of the run.
        out: the folder to make.
        step: of the checkpoint; by default the newest intact one.
        dtype: of the tensors. In FP32, parameters with corrections have all their 24 bits.
        file_bytes: how large a file may become.
        note: called with a line about each checkpoint that is skipped, a missing tokenizer, and a
            tokenizer that begins texts with other tokens than training did.
    """
    model = _read(source, out, "Another format", tokenizer, dtype=dtype, step=step, note=note)
    with _new_folder(model, balance_on, progress) as (folder, parameters, advance):
        hf_of(model.config).write(
            folder,
            model.config,
            parameters,
            dtype=dtype,
            extra=tokenizer_files.special_tokens(model.files),
            file_bytes=file_bytes,
            progress=advance,
        )


def to_quantized(
    source: str | Path,
    out: str | Path,
    recipe: Recipe,
    *,
    tokens: Sequence[int] = (),
    balance_on: Sequence[int] = (),
    step: int | None = None,
    dtype: DTypeLike | None = None,
    tokenizer: str | Path | None = None,
    progress: OnProgress = lambda total, size: None,
    note: Note = lambda text: None,
) -> dict[str, quantization.Scheme]:
    """Writes a quantized model for `coat generate`, vLLM and transformers; see `to_hugging_face`.

    Args:
        source: the folder of a run, or one of Hugging Face.
        recipe: how the model's projections are quantized.
        tokens: a text to calibrate on, where the recipe needs one.
        dtype: of what is not quantized; by default the model's compute dtype.

    Returns:
        The scheme of each quantized projection, by its path.
    """
    model = _read(source, out, "Quantization", tokenizer, dtype=dtype, step=step, note=note)
    config, ranges = _on_one_device(model.config), None
    with _new_folder(model, balance_on, progress) as (folder, parameters, advance):
        if recipe.calibrated:
            batches = _batches(tokens, config.context)
            ranges = quantization.calibrate(lazy_arrays.load(config, parameters), batches, recipe)
        return quantization.save_quantized(
            folder,
            config,
            parameters,
            recipe,
            ranges,
            dtype=dtype,
            extra=tokenizer_files.special_tokens(model.files),
            progress=advance,
        )


class _Model(NamedTuple):
    """A model to be written to the folder `new`; its parameters are not in memory."""

    new: Path
    config: Any
    parameters: Parameters
    files: TokenizerFiles


def _read(
    source: str | Path,
    out: str | Path,
    purpose: str,
    tokenizer: str | Path | None,
    *,
    dtype: DTypeLike | None = None,
    step: int | None = None,
    note: Note = lambda text: None,
) -> _Model:
    """The model in a folder; raises if it cannot be converted, or there is a folder `out`."""
    source, new = expand_user(source), expand_user(out)
    require_new_folder(new, COMMAND)
    weights.require_not_quantized(source, purpose)
    config, config_json = weights.model_config(source), weights.read_config_json(source)
    hf_of(config)
    files = tokenizer_files.read(source, config_json, tokenizer, config.vocab, note)
    if dtype is not None and jnp.dtype(dtype) == jnp.float32:  # then corrections count
        config = dataclasses.replace(config, param_dtype=jnp.float32)
    parameters = weights.parameters_of(source, config, step=step, note=note)
    return _Model(new, config, parameters, files)


@contextlib.contextmanager
def _new_folder(
    model: _Model, balance_on: Sequence[int], progress: OnProgress
) -> Iterator[tuple[Path, Parameters, Callable[[int], object]]]:
    """The folder to write a model in, its parameters, and what to call with bytes that were read.

    The folder gets the tokenizer's files, and appears at the end.
    """
    total = sum(map(lazy_arrays.size_of, model.parameters.values()))
    failures = write_failures(model.new.parent, "The model", total)
    with atomic_folder(model.new, COMMAND) as folder, failures:
        yield folder, _balance(model, balance_on), functools.partial(progress, total)
        tokenizer_files.write(model.files, folder)


def _on_one_device(config: Any) -> Any:
    """The config of the model while it is calibrated."""
    config = quantization.inference_config(config)
    return dataclasses.replace(config, axes=MeshAxes(), batch_axes=())


def _balance(model: _Model, tokens: Sequence[int]) -> dict[Name, LazyArray]:
    """The parameters of a model, balanced on a text if there is one; reading a NaN raises."""
    parameters = {
        name: one._replace(read=functools.partial(_read_finite, name, one.read))
        for name, one in model.parameters.items()
    }
    if not tokens:
        return parameters
    require_balanceable(model.config)
    config = _on_one_device(model.config)
    ranges = observe(lazy_arrays.load(config, parameters), _batches(tokens, config.context))
    return balance_parameters(parameters, find_factors(config, parameters, ranges))


def _read_finite(name: Name, read: Callable[[Any], np.ndarray], index: Any) -> np.ndarray:
    part = read(index)
    if not np.isfinite(part).all():
        raise UserError(
            f"{_dotted(name)} has a NaN or an infinity: the model is damaged, or its training "
            "diverged."
        )
    return part


def _dotted(name: Name) -> str:
    return ".".join(map(str, name))


def _batches(tokens: Sequence[int], context: int) -> Iterator[np.ndarray]:
    """Calibration tokens in rows of one length, the last ones left out where they fill no row."""
    length = min(len(tokens), context, LONGEST)
    rows = len(tokens) // length if length else 0
    whole = np.array(tokens[: rows * length], np.int32).reshape(rows, length)
    for first in range(0, rows, ROWS):
        yield whole[first : first + ROWS]
