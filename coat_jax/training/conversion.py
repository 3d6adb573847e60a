"""Models between Hugging Face's folders and ours, one piece of one parameter at a time in memory.

    to_run              safetensors -> config.json, checkpoints/0, as of a run that has not begun
    to_hugging_face     a checkpoint of a run -> config.json, safetensors

Both copy the tokenizer's files along, and give back bit for bit what the other was given. The
new folder appears when it is complete.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from coat_jax.models import hf, stored
from coat_jax.training import weights
from coat_jax.training.disk import failures_named
from coat_jax.training.new_folder import NewFolder

GENERATION, TOKENIZER = "generation_config.json", "tokenizer.json"
COPIED = (
    GENERATION,
    TOKENIZER,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")

Progress = Callable[[int, int], object]  # is told bytes that were read, and of how many in all


def to_run(
    source: str | Path,
    out: str | Path,
    *,
    dtype: DTypeLike | None = None,
    progress: Progress = lambda size, total: None,
) -> None:
    """Writes the model of a Hugging Face folder like the checkpoint of a run.

    Args:
        source: with config.json and safetensors files.
        out: the folder to make.
        dtype: of the parameters; that of the tensors by default.
        progress: see `Progress`.
    """
    source, out = Path(source), Path(out)
    _new(out).require_new()
    config = weights.model_config(source)
    parameters = hf.read(source, config)
    kind = _dtype(parameters, dtype)
    config = dataclasses.replace(config, param_dtype=kind, dtype=kind)
    parameters = {name: stored.cast(one, kind) for name, one in parameters.items()}
    total = _total(parameters)
    with _new(out).appearing() as folder, failures_named(out.parent, "The model", total):
        weights.write(folder, config, parameters, progress=_counted(progress, total))
        _copy(source, folder)
        if not (folder / GENERATION).exists():
            special = _special(json.loads((source / hf.CONFIG).read_text("utf-8")))
            (folder / GENERATION).write_text(json.dumps(special, indent=2) + "\n", "utf-8")


def to_hugging_face(
    source: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: DTypeLike | None = None,
    file_bytes: int = hf.FILE_BYTES,
    progress: Progress = lambda size, total: None,
    note: Callable[[str], object] = lambda text: None,
) -> None:
    """Writes the model of a run for transformers.

    Args:
        source: the folder of the run.
        out: the folder to make.
        step: of the checkpoint; by default the newest that is whole.
        dtype: of the tensors; that of the parameters by default.
        file_bytes: how large a file may become.
        progress: see `Progress`.
        note: is told of checkpoints that are passed over.
    """
    source, out = Path(source), Path(out)
    _new(out).require_new()
    said, config = weights.read_json(source), weights.model_config(source)
    parameters = weights.read(source, step, note=note)
    extra = {}
    if (source / GENERATION).exists():
        extra = _special(json.loads((source / GENERATION).read_text("utf-8")))
    total = _total(parameters)
    with _new(out).appearing() as folder, failures_named(out.parent, "The model", total):
        hf.write(
            folder,
            config,
            parameters,
            dtype=dtype,
            extra=extra,
            file_bytes=file_bytes,
            progress=_counted(progress, total),
        )
        _copy(source, folder)
        own = (said.get("data") or {}).get("tokenizer")
        if own is not None and Path(own).is_file() and not (folder / TOKENIZER).exists():
            shutil.copyfile(own, folder / TOKENIZER)


def _dtype(parameters: stored.Parameters, asked: DTypeLike | None) -> Any:
    """The one dtype of all parameters."""
    if asked is not None:
        return jnp.dtype(asked)
    found = {one.dtype for one in parameters.values()}
    if len(found) > 1:
        names = ", ".join(sorted(dtype.name for dtype in found))
        raise ValueError(
            f"The tensors have several dtypes, {names}, and a model has one: choose it by dtype."
        )
    return found.pop()


def _special(said: dict[str, Any]) -> dict[str, Any]:
    """Which tokens begin, end and fill up a text."""
    return {name: said[name] for name in SPECIAL if said.get(name) is not None}


def _copy(source: Path, out: Path) -> None:
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def _total(parameters: stored.Parameters) -> int:
    return sum(map(stored.size_of, parameters.values()))


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    """Tells `progress` the sum of the sizes it is given."""
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    return advance


def _new(out: Path) -> NewFolder:
    return NewFolder(out, ".unfinished", "coat convert")
