"""Converts a model to another format: `coat convert`.

    safetensors            -> config.json, checkpoints/0, as of a run before its first step
    a checkpoint of a run  -> config.json, safetensors
    either, by a recipe    -> config.json, safetensors in compressed-tensors' layout

The first two hold one piece of one parameter in memory at a time. Each is the inverse of the other,
bit for bit. The third holds one parameter of one layer, and the whole model during calibration. All
can balance the model on a text; while they do, the whole model is in memory. All copy the
tokenizer's files, too (`tokenizer_files`). The new folder appears when it is complete.
"""

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
from coat_jax.models import hf, lazy_arrays
from coat_jax.models.lazy_arrays import LazyArray, Name, Parameters
from coat_jax.nn import MeshAxes
from coat_jax.quantization import Recipe
from coat_jax.quantization.balancing import balance_parameters, find_factors, require_balanceable
from coat_jax.quantization.calibration import observe
from coat_jax.training.checkpoint import tokenizer_files, weights
from coat_jax.training.families import hf_of
from coat_jax.writing import atomic_folder, require_new_folder, write_failures

ROWS, LONGEST = 8, 512  # of a batch of calibration tokens

COMMAND = "coat convert"


def convert(
    source: str | Path,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    tokens: Sequence[int] = (),
    balance_on: Sequence[int] = (),
    step: int | None = None,
    dtype: DTypeLike | None = None,
    tokenizer: str | Path | None = None,
    file_bytes: int = hf.FILE_BYTES,
    progress: Callable[[int, int], object] = lambda total, size: None,
    note: Callable[[str], object] = lambda text: None,
) -> dict[str, quantization.Scheme]:
    """Writes the model of a run for transformers, and one of transformers as a run.

    Args:
        source: the folder of a run, or one of Hugging Face.
        out: the folder to make.
        recipe: if given, the model is quantized, for `coat generate`, vLLM and transformers.
        tokens: a text to calibrate on, where the recipe needs one.
        balance_on: the tokens of a text to balance the model on; see `quantization.balance`.
        step: of a run's checkpoint; by default the newest intact one.
        dtype: of what is not quantized; by default that of the parameters, or with a recipe the
            model's compute dtype. In FP32, parameters with corrections have all their 24 bits.
        tokenizer: a tokenizer.json to put beside them; by default the one in the folder.
        file_bytes: how large a file of tensors may become.
        progress: called with the bytes to be read in all, and those read since its last call.
        note: called with a line about each checkpoint that is skipped, a missing tokenizer, and a
            tokenizer that begins texts with other tokens than training did.

    Returns:
        The scheme of each quantized projection, by its path.
    """
    source, new = expand_user(source), expand_user(out)
    require_new_folder(new, COMMAND)
    weights.require_not_quantized(source, "Conversion")
    config, config_json = weights.model_config(source), weights.read_config_json(source)
    format, of_run = hf_of(config), weights.is_run(config_json)
    files = tokenizer_files.read(source, config_json, tokenizer, config.vocab, note)
    if dtype is not None and jnp.dtype(dtype) == jnp.float32:  # then corrections count
        config = dataclasses.replace(config, param_dtype=jnp.float32)
    parameters: Parameters = weights.parameters_of(source, config, step=step, note=note)
    if recipe is not None:
        config = _on_one_device(config)
    elif not of_run:
        config, parameters = _cast(config, parameters, dtype)
    total = sum(map(lazy_arrays.size_of, parameters.values()))
    in_files: dict[str, Any] = {
        "dtype": dtype,
        "extra": tokenizer_files.special_tokens(files),
        "file_bytes": file_bytes,
    }
    schemes = {}
    failures = write_failures(new.parent, "The model", total)
    with atomic_folder(new, COMMAND) as folder, failures:
        model = folder, config, _balance(config, parameters, balance_on)
        advance = functools.partial(progress, total)
        if recipe is not None:
            ranges = _ranges(*model[1:], tokens, recipe) if recipe.calibrated else None
            schemes = quantization.save_quantized(
                *model, recipe, ranges, **in_files, progress=advance
            )
        elif of_run:
            format.write(*model, **in_files, progress=advance)
        else:
            weights.write(*model, progress=advance)
        tokenizer_files.write(files, folder)
    return schemes


def _cast(
    config: Any, parameters: Parameters, dtype: DTypeLike | None
) -> tuple[Any, dict[Name, LazyArray]]:
    """The config and the parameters of a run, which are of one dtype."""
    kinds = {one.dtype if dtype is None else jnp.dtype(dtype) for one in parameters.values()}
    if len(kinds) > 1:
        names = ", ".join(sorted(kind.name for kind in kinds))
        raise UserError(
            f"The tensors have several dtypes, {names}, and a model has one: choose it "
            "with --dtype, or in code with dtype=."
        )
    (kind,) = kinds
    cast = {name: lazy_arrays.cast(one, kind, _dotted(name)) for name, one in parameters.items()}
    return dataclasses.replace(config, param_dtype=kind, dtype=kind), cast


def _ranges(
    config: Any, parameters: Parameters, tokens: Sequence[int], recipe: Recipe
) -> dict[str, quantization.Inputs]:
    model = lazy_arrays.load(config, parameters)
    return quantization.calibrate(model, _batches(tokens, config.context), recipe)


def _on_one_device(config: Any) -> Any:
    """The config of a model that is calibrated or quantized."""
    config = quantization.inference_config(config)
    return dataclasses.replace(config, axes=MeshAxes(), batch_axes=())


def _balance(config: Any, parameters: Parameters, tokens: Sequence[int]) -> dict[Name, LazyArray]:
    """The parameters of a model, balanced on a text if there is one; reading a NaN raises."""
    parameters = {
        name: one._replace(read=functools.partial(_read_finite, name, one.read))
        for name, one in parameters.items()
    }
    if not tokens:
        return parameters
    require_balanceable(config)
    config = _on_one_device(config)
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
