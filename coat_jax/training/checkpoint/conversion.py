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
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from coat_jax import quantization
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import Config, hf, lazy_arrays
from coat_jax.models.lazy_arrays import LazyArray, Name, Parameters
from coat_jax.nn import MeshAxes
from coat_jax.quantization import Recipe
from coat_jax.quantization.balancing import balance_parameters, find_factors, require_balanceable
from coat_jax.quantization.calibration import observe
from coat_jax.training.checkpoint import tokenizer_files, weights
from coat_jax.training.checkpoint.tokenizer_files import TokenizerFiles
from coat_jax.writing import atomic_folder, require_new_folder, write_failures

ROWS, LONGEST = 8, 512  # of a batch of calibration tokens

COMMAND = "coat convert"
OnProgress = Callable[[int, int], object]


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
    source, new = expand_user(source), _require_new(out)
    weights.require_not_quantized(source, "A run")
    config = weights.model_config(source)
    files = tokenizer_files.read(source, tokenizer, config.vocab)
    files = tokenizer_files.with_special_tokens(files, weights.read_config_json(source))
    parameters = hf.read(source, config)
    kinds = {one.dtype if dtype is None else jnp.dtype(dtype) for one in parameters.values()}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.name for kind in kinds))
        raise UserError(
            f"The tensors have several dtypes, {names}, and a model has one: choose it "
            "with --dtype, or in code with dtype=."
        )
    (kind,) = kinds
    config = dataclasses.replace(config, param_dtype=kind, dtype=kind)
    parameters = {
        name: lazy_arrays.cast(one, kind, ".".join(map(str, name)))
        for name, one in parameters.items()
    }
    advance = functools.partial(progress, _total(parameters))
    with _written(new, files, parameters) as folder:
        parameters = _balanced(config, parameters, balance_on)
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
    note: Callable[[str], object] = lambda text: None,
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
    source, new = expand_user(source), _require_new(out)
    config = weights.model_config(source)
    config_json = weights.read_config_json(source)
    files = tokenizer_files.read_of_run(source, config_json, tokenizer, config.vocab, note)
    parameters = weights.parameters_of(source, _in_full(config, dtype), step=step, note=note)
    with _written(new, files, parameters) as folder:
        hf.write(
            folder,
            config,
            _balanced(config, parameters, balance_on),
            dtype=dtype,
            extra=tokenizer_files.special_tokens(tokenizer_files.generation_in(files)),
            file_bytes=file_bytes,
            progress=functools.partial(progress, _total(parameters)),
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
    note: Callable[[str], object] = lambda text: None,
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
    source, new = expand_user(source), _require_new(out)
    weights.require_not_quantized(source, "Quantization")
    config_json = weights.read_config_json(source)
    config = _in_full(_on_one_device(weights.model_config(source)), dtype)
    if weights.is_run(config_json):
        files = tokenizer_files.read_of_run(source, config_json, tokenizer, config.vocab, note)
        extra = tokenizer_files.special_tokens(tokenizer_files.generation_in(files))
    else:
        files = tokenizer_files.read(source, tokenizer, config.vocab)
        extra = tokenizer_files.special_tokens(config_json)
    parameters = weights.parameters_of(source, config, step=step, note=note)
    with _written(new, files, parameters) as folder:
        parameters, ranges = _balanced(config, parameters, balance_on), None
        if recipe.calibrated:
            model = lazy_arrays.load(config, parameters)
            ranges = quantization.calibrate(model, _batches(tokens, config.context), recipe)
            del model
        return quantization.save_quantized(
            folder,
            config,
            parameters,
            recipe,
            ranges,
            dtype=dtype,
            extra=extra,
            progress=functools.partial(progress, _total(parameters)),
        )


def _require_new(out: str | Path) -> Path:
    new = expand_user(out)
    require_new_folder(new, COMMAND)
    return new


@contextlib.contextmanager
def _written(new: Path, files: TokenizerFiles, parameters: Parameters) -> Iterator[Path]:
    """The folder to write a model in. It gets the tokenizer's files, and appears at the end."""
    failures = write_failures(new.parent, "The model", _total(parameters))
    with atomic_folder(new, COMMAND) as folder, failures:
        yield folder
        tokenizer_files.write(files, folder)


def _total(parameters: Parameters) -> int:
    return sum(map(lazy_arrays.size_of, parameters.values()))


def _in_full(config: Config, dtype: DTypeLike | None) -> Config:
    """The config to read parameters with: if FP32 is requested, corrections count."""
    is_fp32 = dtype is not None and jnp.dtype(dtype) == jnp.float32
    return dataclasses.replace(config, param_dtype=jnp.float32) if is_fp32 else config


def _on_one_device(config: Config) -> Config:
    """The config of the model while it is calibrated."""
    config = quantization.inference_config(config)
    return dataclasses.replace(config, axes=MeshAxes(), batch_axes=())


def _balanced(
    config: Config, parameters: Parameters, tokens: Sequence[int]
) -> dict[Name, LazyArray]:
    """The parameters of a model, balanced on a text if there is one; reading a NaN raises."""
    parameters = {
        name: one._replace(read=functools.partial(_read_finite, name, one.read))
        for name, one in parameters.items()
    }
    if not tokens:
        return parameters
    require_balanceable(config)
    config, apart = _on_one_device(config), lazy_arrays.arranged(parameters, scan=False)
    model = lazy_arrays.load(config, apart)
    ranges = observe(model, _batches(tokens, config.context))
    del model
    factors = find_factors(config, lambda name: apart[name].whole(), ranges)
    return balance_parameters(parameters, factors)


def _read_finite(name: Name, read: Callable[[Any], np.ndarray], index: Any) -> np.ndarray:
    part = read(index)
    if not np.isfinite(part).all():
        raise UserError(
            f"{'.'.join(map(str, name))} has a NaN or an infinity: the model is damaged, or its "
            "training diverged."
        )
    return part


def _batches(tokens: Sequence[int], context: int) -> Iterator[np.ndarray]:
    """Calibration tokens in rows of one length, the last ones left out where they fill no row."""
    length = min(len(tokens), context, LONGEST)
    rows = len(tokens) // length if length else 0
    whole = np.array(tokens[: rows * length], np.int32).reshape(rows, length)
    for first in range(0, rows, ROWS):
        yield whole[first : first + ROWS]
