"""Makes a Hugging Face folder of a run or of another Hugging Face folder: `coat convert`.

The model may be cast, balanced on a text, and quantized by a recipe, in this order. One piece of
one parameter is in memory at a time, with a recipe one parameter of one layer, and while a text is
read the whole model. The tokenizer's files are copied, too (`tokenizer_files`). The new folder
appears when it is complete.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from coat_jax import models, quantization
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import hf, lazy_arrays
from coat_jax.models.lazy_arrays import Index, LazyArray, Name, dotted_name
from coat_jax.nn import MeshAxes
from coat_jax.quantization import Recipe
from coat_jax.quantization.balancing import balance_parameters, require_balanceable
from coat_jax.quantization.calibration import observe
from coat_jax.training.checkpoint import tokenizer_files, weights
from coat_jax.training.families import family_of, hf_of, name_of
from coat_jax.writing import atomic_folder

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
    """Writes the model of a run or of a Hugging Face folder to a new Hugging Face folder.

    Args:
        source: the folder of a run, or one of Hugging Face.
        out: the folder to make.
        recipe: if given, the model is quantized, for `coat generate`, vLLM and transformers.
        tokens: a text to calibrate on, where the recipe needs one, or for INT4.
        balance_on: the tokens of a text to balance the model on; see `quantization.balance`.
        step: of a run's checkpoint; by default the newest intact one.
        dtype: of what is not quantized; by default that of the run's parameters or of config.json,
            or with a recipe the model's compute dtype. In FP32, parameters with corrections have
            all their 24 bits.
        tokenizer: a tokenizer.json to put beside them, or "bytes" for none; by default the one in
            the folder.
        file_bytes: how large a file of tensors may become.
        progress: called with the bytes to be read in all, and those read since its last call.
        note: called with a line about each checkpoint that is skipped, a missing tokenizer, and a
            tokenizer that begins texts with other tokens than training did.

    Returns:
        The scheme of each quantized projection, by its path.
    """
    source = expand_user(source)
    weights.require_not_quantized(source, "Conversion")
    config, config_json = weights.model_config(source), weights.read_config_json(source)
    if (recipe is not None or balance_on) and not isinstance(config, models.Config):
        raise UserError(
            f"{source} holds a {name_of(config)} model, and only decoders can be quantized or "
            "balanced: leave --to and --balance out."
        )
    format = hf_of(config)
    files: dict[str, bytes] = {}
    special: dict[str, Any] = {}
    if family_of(config).is_text:
        vocab = config.vocab
        files, special = tokenizer_files.read(source, config_json, tokenizer, vocab, note)
    # A recipe rounds the parameters as they are stored; in FP32 that is with their corrections.
    if dtype is not None and (recipe is None or jnp.dtype(dtype) == jnp.float32):
        config = dataclasses.replace(config, param_dtype=jnp.dtype(dtype))
    stored = weights.parameters_of(source, config, step=step, note=note)
    parameters = {path: _cast_finite(path, one, config.param_dtype) for path, one in stored.items()}
    if recipe is not None or balance_on:
        config = quantization.inference_config(config)
        config = dataclasses.replace(config, axes=MeshAxes(), batch_axes=())
    if balance_on:
        require_balanceable(config)
    total = sum(one.nbytes for one in parameters.values())
    in_files: dict[str, Any] = {
        "dtype": dtype,
        "extra": special,
        "file_bytes": file_bytes,
        "progress": functools.partial(progress, total),
    }

    def load() -> Any:
        return lazy_arrays.load(config, parameters)

    with atomic_folder(expand_user(out), COMMAND, total) as folder:
        schemes, ranges = {}, None
        if balance_on:
            seen = observe(load(), _batches(balance_on, config.context))
            parameters = balance_parameters(config, parameters, seen)
        if recipe is None:
            format.write(folder, config, parameters, **in_files)
        else:
            if recipe.needs_calibration or (tokens and recipe.format == "int4"):
                batches = _batches(tokens, config.context)
                ranges = quantization.calibrate(load(), batches, recipe)
            schemes = quantization.save_quantized(
                folder, config, parameters, recipe, ranges, **in_files
            )
        for name, content in files.items():
            (folder / name).write_bytes(content)
    return schemes


def _cast_finite(path: Name, stored: LazyArray, dtype: Any) -> LazyArray:
    """Returns a parameter in another dtype; reading a NaN or an infinity raises."""
    one = lazy_arrays.cast(stored, dtype, dotted_name(path))

    def read(index: Index) -> np.ndarray:
        part = one.read(index)
        if not np.isfinite(part).all():
            raise UserError(
                f"{dotted_name(path)} has a NaN or an infinity: the model is damaged, or its "
                "training diverged."
            )
        return part

    return one._replace(read=read)


def _batches(tokens: Sequence[int], context: int) -> Iterator[np.ndarray]:
    """Yields tokens in rows of one length. Those left at the end, fewer than rows, are dropped."""
    rows = -(-len(tokens) // min(context, LONGEST))
    length = len(tokens) // max(1, rows)
    whole = np.array(tokens[: rows * length], np.int32).reshape(rows, length)
    for first in range(0, rows, ROWS):
        yield whole[first : first + ROWS]
