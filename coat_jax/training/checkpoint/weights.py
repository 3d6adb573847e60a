"""The parameters of a run, without the rest of its state.

    load      a model, from a checkpoint of a run or from a Hugging Face folder, quantized or not
    read      the parameters in a checkpoint, in pieces; with their corrections, if they have some
    write     a folder like a run's, with one checkpoint that holds parameters only

A checkpoint stores each array in chunks. One chunk at a time is in memory, so a model may be larger
than memory. Files are checked before they are read: see `coat_jax.manifest`.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coat_jax import files, limits, quantization, writing
from coat_jax.errors import UserError
from coat_jax.files import expanded
from coat_jax.models import Config, Llama, hf, stored
from coat_jax.models.stored import Index, Name, Parameters, Stored
from coat_jax.numerics.corrections import join
from coat_jax.optax.states.checkpoint import stored_metadata
from coat_jax.quantization.layout import ENTRY
from coat_jax.training import resume_rules
from coat_jax.training.checkpoint.checkpoints import STATE
from coat_jax.training.checkpoint.step_folders import RECORD, StepFolders
from coat_jax.training.checkpoint.streamed import save_streamed
from coat_jax.writing import require_space, write_failures

CONFIG, CHECKPOINTS = "config.json", "checkpoints"
PARAMETERS, VALUE = "params", "value"  # the first and last parts of the arrays' names
# Where a state has corrections, see `CorrectedState`; the second with released gradients.
CORRECTIONS = ("moments", "corrections"), ("moments", "inner", "corrections")


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """The config.json in a folder with a model: a run's, or one of Hugging Face.

    That of a run is read from its newest checkpoint, which has a checksum of it.
    """
    path = expanded(folder) / CONFIG
    config_json = config_in_checkpoint(path.parent)
    if config_json is None and (path.is_file() or path.is_symlink()):
        config_json = files.read_json(path)
    if config_json is None:
        there = "it is a file" if path.parent.is_file() else "there is no such folder"
        there = "there is no config.json in it" if path.parent.is_dir() else there
        raise UserError(
            f"{folder} is neither the folder of a run nor one of Hugging Face: {there}."
        )
    if not {"model", "architectures"} & config_json.keys():
        raise UserError(
            f"{path} has neither the `model` of a run nor the `architectures` of Hugging Face."
        )
    return config_json


def parsed(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if it holds nothing of that kind."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def config_in_checkpoint(folder: Path) -> dict[str, Any] | None:
    """The config that the newest checkpoint of a run was saved with, if it has one."""
    if not (folder / CHECKPOINTS).is_dir():
        return None
    record = StepFolders(folder / CHECKPOINTS).newest_record()
    return None if record is None else record["extra"].get("config")


def is_run(config_json: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of a run."""
    return "model" in config_json


def is_quantized(config_json: Mapping[str, Any]) -> bool:
    """Whether this is the config.json of a quantized model."""
    return not is_run(config_json) and config_json.get(ENTRY) is not None


def require_not_quantized(folder: str | Path, purpose: str) -> None:
    """Raises if the model in a folder is quantized.

    Args:
        folder: of a run, or one of Hugging Face.
        purpose: what the model is for, as in "Training".
    """
    if is_quantized(read_config_json(folder)):
        raise UserError(
            f"{folder} is already quantized. {purpose} needs the original parameters: name the "
            "folder of the model that it was made from."
        )


def model_config(folder: str | Path) -> Config:
    """The config of a folder's model; one of Hugging Face computes in its stored dtype, not FP8."""
    folder = expanded(folder)
    config_json = read_config_json(folder)
    if is_run(config_json):
        return limits.from_json(Config, config_json["model"], f"{folder / CONFIG}: model")
    if is_quantized(config_json):
        return quantization.read_config(folder)
    return hf.read_config(folder)


def load(
    folder: str | Path,
    config: Config | None = None,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    note: Callable[[str], object] = warnings.warn,
) -> Llama:
    """The model in a folder.

    Args:
        folder: of a run, or one of Hugging Face.
        config: of the model; by default what `model_config` says. A variant of it may have other
            dtypes (parameters are cast), precision, axes, scan or remat. In FP32, parameters with
            corrections have all their 24 bits. Precision, scan and remat of a quantized model are
            fixed.
        step: of a run's checkpoint; by default the newest intact one.
        mesh: to load it onto; by default the one that is set, if any.
        note: called with a line about each checkpoint that is skipped.
    """
    folder = expanded(folder)
    config = model_config(folder) if config is None else config
    if is_quantized(read_config_json(folder)):
        _require_no_step(folder, step)
        return quantization.load(folder, config, mesh=mesh)
    return stored.load(config, parameters_of(folder, config, step=step, note=note), mesh=mesh)


def parameters_of(
    folder: str | Path,
    config: Config,
    *,
    step: int | None = None,
    note: Callable[[str], object] = warnings.warn,
) -> dict[Name, Stored]:
    """The parameters in a folder that is not quantized, to be read in parts.

    Args:
        folder: of a run, or one of Hugging Face.
        config: the model; see `load`.
        step: see `load`.
        note: see `load`.
    """
    folder = expanded(folder)
    if is_run(read_config_json(folder)):
        in_fp32 = jnp.dtype(config.param_dtype) == jnp.float32
        return read(folder, step, note=note, corrected=in_fp32)
    _require_no_step(folder, step)
    return hf.read(folder, config)


def require_parameters(folder: str | Path, config: Config) -> None:
    """Raises unless a model's parameters are in a folder that is not quantized; reads none of them.

    Loading finds more: a checkpoint's other files are checked when it is read.
    """
    if not is_run(read_config_json(folder)):
        hf.read(folder, config)
        return
    folders = StepFolders(expanded(folder).absolute() / CHECKPOINTS)
    if folders.newest_record() is None:
        folders.newest_whole()  # raises, and says why


def _require_no_step(folder: Path, step: int | None) -> None:
    if step is not None:
        raise UserError(f"There is no step {step} in {folder}: it holds one model, and no steps.")


def read(
    folder: str | Path,
    step: int | None = None,
    *,
    note: Callable[[str], object] = warnings.warn,
    corrected: bool = False,
) -> dict[Name, Stored]:
    """The parameters in a checkpoint of a run, to be read in parts.

    Args:
        folder: of a run.
        step: see `load`.
        note: see `load`.
        corrected: whether parameters that have corrections are read with them, in FP32.
    """
    folders = StepFolders(expanded(folder).absolute() / CHECKPOINTS)
    if step is None:
        step, notes = folders.newest_whole()
        for text in notes:
            note(text)
    else:
        folders.check(step)
    path = folders.finished(step) / STATE
    try:
        metadata = stored_metadata(path)
    finally:
        _require_present(path)
    driver = "zarr3" if metadata.use_zarr3 else "zarr"

    def stored_at(*place: str) -> dict[Name, Stored]:
        tree = metadata.tree
        for key in place:  # where another optimizer has another state, perhaps a list
            tree = (tree.get(key) if isinstance(tree, Mapping) else None) or {}
        arrays = _flat(tree) if tree else {}
        return {name: _in_checkpoint(path, place, name, a, driver) for name, a in arrays.items()}

    parameters = stored_at(PARAMETERS)
    if not corrected:
        return parameters
    corrections = {name: one for place in CORRECTIONS for name, one in stored_at(*place).items()}
    return {
        name: _corrected(one, corrections[name]) if name in corrections else one
        for name, one in parameters.items()
    }


def write(
    folder: str | Path,
    config: Config,
    parameters: Parameters,
    *,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Writes config.json, and the parameters as the checkpoint of step 0.

    Args:
        folder: made if it is not there.
        config: of the model.
        parameters: of the model, stored one after the other; one piece is in memory at a time.
        progress: called with the number of bytes read since its last call.
    """
    stored.require_same(config, parameters)
    folder = expanded(folder).absolute()
    size = sum(map(stored.size_of, parameters.values()))
    what = "The model"
    folders = StepFolders(folder / CHECKPOINTS)
    saved = {"model": resume_rules.to_json(config)}
    with write_failures(folder, what, size):
        folders.clear()
        require_space(folder, what, size)
        folders.begin(0)
        unfinished = folders.unfinished(0)
        save_streamed(unfinished / STATE, _nested(parameters), progress)
        record = json.dumps({"step": 0, "loss": None, "extra": {"config": saved}})
        writing.write_durably(unfinished / RECORD, record)
        folders.finish(0)
        writing.write_durably(folder / CONFIG, json.dumps(saved, indent=2) + "\n")


def _corrected(parameter: Stored, correction: Stored) -> Stored:
    """A BF16 parameter with its corrections, in FP32; others have none, or a placeholder."""
    if parameter.dtype != jnp.bfloat16 or parameter.shape != correction.shape:
        return parameter

    def read(index: Index) -> np.ndarray:
        return np.asarray(join(parameter.read(index), correction.read(index)))

    return parameter._replace(dtype=np.dtype(np.float32), read=read)


def _in_checkpoint(path: Path, above: Sequence[str], name: Name, array: Any, driver: str) -> Stored:
    import tensorstore

    place = ".".join([*above, *map(str, name), VALUE])
    kvstore = {"driver": "ocdbt", "base": path.as_uri(), "path": f"{place}/"}
    opened = tensorstore.open({"driver": driver, "kvstore": kvstore}, read=True).result()

    def read(index: Index) -> np.ndarray:
        part: np.ndarray = opened[index].read().result()
        _require_present(path)  # tensorstore reads zeros where there is nothing
        return part

    return Stored(opened.shape, opened.dtype.numpy_dtype, tuple(array.storage.chunk_shape), read)


def _require_present(path: Path) -> None:
    """Raises if the run has removed this checkpoint in the meantime.

    A run renames a checkpoint before it deletes it, so whatever was read until now is intact.
    """
    if not path.exists():
        raise UserError(
            f"{path.parent} was removed while it was read: its run trains on, and keeps newer "
            "ones only. Read the newest one, or raise --checkpoint.keep of the run."
        )


def _flat(tree: Mapping[str, Any], above: Name = ()) -> dict[Name, Any]:
    """Arrays by their parameters' names; layers of a list are numbered, and in this order."""
    if VALUE in tree and not isinstance(tree[VALUE], Mapping):
        return {above: tree[VALUE]}
    flat: dict[Name, Any] = {}
    # Orbax sorts numbers as text.
    for key in sorted(tree, key=lambda key: int(key) if key.isdecimal() else -1):
        flat |= _flat(tree[key], (*above, int(key) if key.isdecimal() else key))
    return flat


def _nested(parameters: Parameters) -> dict[str, Any]:
    """A tree in which arrays have the names that they have in a run's state."""
    tree: dict[str, Any] = {}
    for name, one in parameters.items():
        inner = tree
        for key in (PARAMETERS, *map(str, name)):
            inner = inner.setdefault(key, {})
        inner[VALUE] = one
    return tree
