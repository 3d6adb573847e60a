"""Converts models between Hugging Face folders and runs, and both to 8 bits.

    to_run              safetensors -> config.json, checkpoints/0, as of a run before its first step
    to_hugging_face     a checkpoint of a run -> config.json, safetensors
    to_quantized        either of them -> config.json, safetensors in compressed-tensors' layout

The first two hold one piece of one parameter in memory at a time. Each is the inverse of the other,
bit for bit. The third holds one parameter of one layer, and the whole model during calibration. All
can balance the model on a text; while they do, the whole model is in memory. All copy the
tokenizer's files, too (`companions`). The new folder appears when it is complete.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from coat_jax import quantization, tokenizers
from coat_jax.errors import UserError
from coat_jax.files import expanded, parse_json
from coat_jax.limits import CountOrZero, require
from coat_jax.models import Config, hf, stored
from coat_jax.nn import MeshAxes
from coat_jax.quantization import Recipe
from coat_jax.quantization.balancing import balance_stored, find_factors, require_balanceable
from coat_jax.quantization.calibration import observe
from coat_jax.training.checkpoint import weights
from coat_jax.training.checkpoint.companions import (
    GENERATION,
    TOKENIZER,
    Companions,
    generation_of_run,
    note_beginning,
    read_companions,
    tokenizer_of_run,
    write_companions,
)
from coat_jax.writing import NewFolder, write_failures

ROWS, LONGEST = 8, 512  # of a batch of calibration tokens
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")

OnProgress = Callable[[int, int], object]  # called with the bytes read so far, and in all


def to_run(
    source: str | Path,
    out: str | Path,
    *,
    dtype: DTypeLike | None = None,
    balance_on: Sequence[int] = (),
    tokenizer: str | Path | None = None,
    progress: OnProgress = lambda size, total: None,
) -> None:
    """Writes the model of a Hugging Face folder as a run with one checkpoint.

    Args:
        source: the folder, with config.json and safetensors files.
        out: the folder to make.
        dtype: of the parameters; that of the tensors by default.
        balance_on: the tokens of a text to balance the model on; see `quantization.balance`.
        tokenizer: a tokenizer.json to put beside them; by default the one in the folder.
        progress: see `OnProgress`.
    """
    source, out = expanded(source), expanded(out)
    _new(out).require_new()
    weights.require_not_quantized(source, "A run")
    config = weights.model_config(source)
    companions = _companions(source, tokenizer, config.vocab)
    parameters = hf.read(source, config)
    kind = _dtype(parameters, dtype)
    config = dataclasses.replace(config, param_dtype=kind, dtype=kind)
    parameters = {
        path: stored.cast(one, kind, ".".join(map(str, path))) for path, one in parameters.items()
    }
    total = _total(parameters)
    companions = _with_special(companions, source, weights.read_config_json(source))
    with _new(out).appearing() as folder:
        parameters = _balanced(config, parameters, balance_on)
        with write_failures(out.parent, "The model", total):
            weights.write(folder, config, parameters, progress=_summed(progress, total))
            write_companions(companions, folder)


def to_hugging_face(
    source: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    balance_on: Sequence[int] = (),
    tokenizer: str | Path | None = None,
    file_bytes: int = hf.FILE_BYTES,
    progress: OnProgress = lambda size, total: None,
    note: Callable[[str], object] = lambda text: None,
) -> None:
    """Writes the model of a run for transformers.

    Args:
        source: the folder of the run.
        out: the folder to make.
        step: of the checkpoint; by default the newest intact one.
        dtype: of the tensors; that of the parameters by default. In FP32, parameters with
            corrections have all their 24 bits.
        balance_on: see `to_run`.
        tokenizer: a tokenizer.json to put beside them; by default the one in the run's folder.
        file_bytes: how large a file may become.
        progress: see `OnProgress`.
        note: called with a line about each checkpoint that is skipped, a missing tokenizer, and a
            tokenizer that begins texts with other tokens than training did.
    """
    source, out = expanded(source), expanded(out)
    _new(out).require_new()
    config = weights.model_config(source)
    companions = _companions_of_run(source, tokenizer, config.vocab, note)
    parameters = weights.read(source, step, note=note, corrected=_is_fp32(dtype))
    extra = _special(_generation_in(companions, source))
    total = _total(parameters)
    with _new(out).appearing() as folder:
        parameters = _balanced(config, parameters, balance_on)
        with write_failures(out.parent, "The model", total):
            hf.write(
                folder,
                config,
                parameters,
                dtype=dtype,
                extra=extra,
                file_bytes=file_bytes,
                progress=_summed(progress, total),
            )
            write_companions(companions, folder)


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
    progress: OnProgress = lambda size, total: None,
    note: Callable[[str], object] = lambda text: None,
) -> dict[str, quantization.Scheme]:
    """Writes a quantized model for `coat generate`, vLLM and transformers.

    Args:
        source: the folder of a run, or one of Hugging Face.
        out: the folder to make.
        recipe: how the model's projections are quantized.
        tokens: a text to calibrate on, where the recipe needs one.
        balance_on: see `to_run`.
        step: of a run's checkpoint; by default the newest intact one.
        dtype: of what is not quantized; by default the model's compute dtype. In FP32, parameters
            with corrections have all their 24 bits, quantized ones included.
        tokenizer: a tokenizer.json to put beside them; by default the one in the folder.
        progress: see `OnProgress`.
        note: see `to_hugging_face`.

    Returns:
        The scheme of each quantized projection, by its path.
    """
    source, out = expanded(source), expanded(out)
    _new(out).require_new()
    weights.require_not_quantized(source, "Quantization")
    config_json = weights.read_config_json(source)
    config = _on_one_device(weights.model_config(source))
    if weights.is_run(config_json):
        companions = _companions_of_run(source, tokenizer, config.vocab, note)
        extra = _special(_generation_in(companions, source))
    else:
        companions = _companions(source, tokenizer, config.vocab)
        extra = _special(config_json)
    if _is_fp32(dtype):
        config = dataclasses.replace(config, param_dtype=jnp.float32)
    parameters = weights.parameters_of(source, config, step=step, note=note)
    with _new(out).appearing() as folder:
        parameters, ranges = _balanced(config, parameters, balance_on), None
        if recipe.calibrated:
            model = stored.load(config, parameters)
            ranges = quantization.calibrate(model, _batches(tokens, config.context), recipe)
            del model
        total = _total(parameters)
        with write_failures(out.parent, "The model", total):
            schemes = quantization.save_quantized(
                folder,
                config,
                parameters,
                recipe,
                ranges,
                dtype=dtype,
                extra=extra,
                progress=_summed(progress, total),
            )
            write_companions(companions, folder)
    return schemes


def _on_one_device(config: Config) -> Config:
    """The config of the model while it is calibrated."""
    config = quantization.inference_config(config)
    return dataclasses.replace(config, axes=MeshAxes(), batch_axes=())


def _balanced(
    config: Config, parameters: dict[stored.Name, stored.Stored], tokens: Sequence[int]
) -> dict[stored.Name, stored.Stored]:
    """The parameters of a model, balanced on a text if there is one; reading a NaN raises."""
    parameters = {
        name: one._replace(read=functools.partial(_read_finite, name, one.read))
        for name, one in parameters.items()
    }
    if not tokens:
        return parameters
    require_balanceable(config)
    config, apart = _on_one_device(config), stored.arranged(parameters, scan=False)
    model = stored.load(config, apart)
    ranges = observe(model, _batches(tokens, config.context))
    del model
    factors = find_factors(config, lambda name: apart[name].whole(), ranges)
    return balance_stored(parameters, factors)


def _read_finite(name: stored.Name, read: Callable[[Any], np.ndarray], index: Any) -> np.ndarray:
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


def _companions(source: Path, tokenizer: str | Path | None, vocab: int) -> Companions:
    """The files to put beside the weights: those in a folder; `tokenizer` replaces its own."""
    companions = read_companions(source)
    if tokenizer is not None:
        known = tokenizers.Tokenizer(tokenizer)
        known.require_fits(vocab)
        companions[TOKENIZER] = known.content
    return companions


def _companions_of_run(
    source: Path, tokenizer: str | Path | None, vocab: int, note: Callable[[str], object]
) -> Companions:
    """The files to put beside the weights of a run."""
    config_json = weights.read_config_json(source)
    companions = _companions(source, tokenizer, vocab)
    if TOKENIZER not in companions:
        companions |= tokenizer_of_run(config_json, source, note)
    if GENERATION not in companions:
        companions |= generation_of_run(config_json, companions)
    note_beginning(config_json, companions, note)
    return companions


def _dtype(parameters: stored.Parameters, asked: DTypeLike | None) -> Any:
    """The one dtype of all parameters."""
    if asked is not None:
        return jnp.dtype(asked)
    found = {one.dtype for one in parameters.values()}
    if len(found) > 1:
        names = ", ".join(sorted(dtype.name for dtype in found))
        raise UserError(
            f"The tensors have several dtypes, {names}, and a model has one: choose it "
            "with --dtype, or in code with dtype=."
        )
    return found.pop()


def _is_fp32(asked: DTypeLike | None) -> bool:
    """Whether parameters are requested in FP32, so that their corrections count."""
    return asked is not None and jnp.dtype(asked) == jnp.float32


def _special(config_json: dict[str, Any]) -> dict[str, Any]:
    """Which tokens begin, end and pad a text."""
    special = {name: config_json[name] for name in SPECIAL if config_json.get(name) is not None}
    for name, tokens in special.items():
        for token in tokens if isinstance(tokens, list) else [tokens]:
            require(name, token, CountOrZero)
    return special


def _with_special(companions: Companions, source: Path, config_json: dict[str, Any]) -> Companions:
    """The companions of a run, with all special tokens in generation_config.json.

    The config.json of a run has none; in a Hugging Face folder they may be in either file.
    """
    own = _generation_in(companions, source)
    missing = {k: v for k, v in _special(config_json).items() if own.get(k) is None}
    if GENERATION in companions and not missing:
        return companions
    return companions | {GENERATION: (json.dumps({**own, **missing}, indent=2) + "\n").encode()}


def _generation_in(companions: Companions, source: Path) -> dict[str, Any]:
    """The content of generation_config.json; empty without one."""
    content = companions.get(GENERATION)
    found: dict[str, Any] = {} if content is None else parse_json(content, str(source / GENERATION))
    return found


def _total(parameters: stored.Parameters) -> int:
    return sum(map(stored.size_of, parameters.values()))


def _summed(progress: OnProgress, total: int) -> Callable[[int], None]:
    """A function that adds up sizes, and reports each sum to `progress`."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return advance


def _new(out: Path) -> NewFolder:
    return NewFolder(out, "coat convert")
