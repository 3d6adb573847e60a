"""The parameters in the folder of a run or of Hugging Face, without the rest of a run's state.

A checkpoint stores each array in chunks. One chunk at a time is in memory, so a model may be larger
than memory. Files are checked before they are read: see `coat_jax.manifest`.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from coat_jax import files
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import lazy_arrays
from coat_jax.models.lazy_arrays import Index, LazyArray, Name
from coat_jax.numerics.corrections import join
from coat_jax.optax.states.checkpoint import stored_metadata
from coat_jax.quantization import folders as quantized_folders
from coat_jax.quantization.layout import ENTRY
from coat_jax.training import families
from coat_jax.training.checkpoint.checkpoints import STATE
from coat_jax.training.checkpoint.step_folders import StepFolders
from coat_jax.training.families import family_of, hf_of

CONFIG, CHECKPOINTS = "config.json", "checkpoints"
OF_HUGGING_FACE = {"architectures", "_class_name"}  # one of them is in a config.json of theirs
PARAMETERS, VALUE = ("params",), "value"  # the first parts and the last of the arrays' names
CORRECTIONS = ("moments", "corrections")  # see `CorrectedState`


# --- Configs ---------------------------------------------------------------------------------


def read_config_json(folder: str | Path) -> dict[str, Any]:
    """Returns the config.json in a folder with a model: a run's, or one of Hugging Face.

    That of a run is read from its newest checkpoint, which has a checksum of it.
    """
    path = expand_user(folder) / CONFIG
    record = None
    if (path.parent / CHECKPOINTS).is_dir():
        record = _checkpoints_of(path.parent).newest_record()
    config_json: dict[str, Any] | None = None if record is None else record["extra"].get("config")
    if config_json is None and not os.path.lexists(path):
        there = "no config.json in it" if path.parent.is_dir() else "no such folder"
        raise UserError(
            f"{folder} is neither the folder of a run nor one of Hugging Face: there is {there}."
        )
    config_json = config_json or files.read_json(path)
    if not {"model", *OF_HUGGING_FACE} & config_json.keys():
        raise UserError(
            f"{path} has neither the `model` of a run nor the `architectures` or the `_class_name` "
            "of Hugging Face."
        )
    return config_json


def is_run(config_json: Mapping[str, Any]) -> bool:
    """Returns whether this is the config.json of a run."""
    return "model" in config_json


def is_quantized(config_json: Mapping[str, Any]) -> bool:
    """Returns whether this is the config.json of a quantized model."""
    return not is_run(config_json) and config_json.get(ENTRY) is not None


def require_not_quantized(folder: str | Path, purpose: str) -> None:
    """Raises if the model in a folder is quantized, and cannot be used for a purpose."""
    if is_quantized(read_config_json(folder)):
        raise UserError(
            f"{folder} is already quantized. {purpose} needs the original parameters: name the "
            "folder of the model that it was made from."
        )


def model_config(folder: str | Path) -> Any:
    """Returns the config of a folder's model; one of Hugging Face computes in its stored dtype."""
    folder = expand_user(folder)
    config_json = read_config_json(folder)
    if is_run(config_json):
        return families.from_json(config_json["model"], f"{folder / CONFIG}: model")
    if is_quantized(config_json):
        return quantized_folders.read_config(folder)
    return families.hf_named_in(config_json).read_config(folder)


# --- Reading ---------------------------------------------------------------------------------


def load(
    folder: str | Path,
    config: Any = None,
    *,
    step: int | None = None,
    mesh: Mesh | None = None,
    note: Callable[[str], object] = warnings.warn,
) -> Any:
    """Returns the model in a folder.

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
    folder = expand_user(folder)
    config = model_config(folder) if config is None else config
    if is_quantized(read_config_json(folder)):
        _require_no_step(folder, step)
        return quantized_folders.load(folder, config, mesh=mesh)
    parameters = parameters_of(folder, config, step=step, note=note)
    return lazy_arrays.load(config, parameters, mesh=mesh, module=family_of(config).module)


def parameters_of(
    folder: str | Path,
    config: Any,
    *,
    step: int | None = None,
    note: Callable[[str], object] = warnings.warn,
) -> dict[Name, LazyArray]:
    """Returns the parameters in a folder that is not quantized, for the arguments of `load`."""
    folder = expand_user(folder)
    if not is_run(read_config_json(folder)):
        _require_no_step(folder, step)
        return dict(hf_of(config).read(folder, config))
    folders = _checkpoints_of(folder)
    path = folders.folder(folders.intact(step, note)) / STATE
    try:
        metadata = stored_metadata(path)
    finally:
        _require_present(path)
    driver = "zarr3" if metadata.use_zarr3 else "zarr"

    parameters: dict[Name, LazyArray] = {}
    corrections: dict[Name, LazyArray] = {}
    leaves = flatten_dict(metadata.tree)
    # Orbax sorts the numbers of layers as text.
    for keys in sorted(leaves, key=lambda keys: [int(k) if k.isdecimal() else -1 for k in keys]):
        for above in (PARAMETERS, CORRECTIONS):
            if keys[: len(above)] == above and keys[-1] == VALUE:
                name = tuple(int(k) if k.isdecimal() else k for k in keys[len(above) : -1])
                found = parameters if above == PARAMETERS else corrections
                found[name] = _in_checkpoint(path, ".".join(keys), leaves[keys], driver)
    if jnp.dtype(config.param_dtype) != jnp.float32:
        return parameters
    return {name: _add_corrections(one, corrections.get(name)) for name, one in parameters.items()}


def require_parameters(folder: str | Path, config: Any) -> None:
    """Raises unless a model's parameters are in a folder that is not quantized; reads none of them.

    Loading finds more: a checkpoint's other files are checked when it is read.
    """
    if not is_run(read_config_json(folder)):
        hf_of(config).read(expand_user(folder), config)
    elif _checkpoints_of(folder).newest_record() is None:
        _checkpoints_of(folder).intact(None, warnings.warn)  # raises, and says why


def _require_no_step(folder: Path, step: int | None) -> None:
    if step is not None:
        raise UserError(f"There is no step {step} in {folder}: it holds one model, and no steps.")


def _checkpoints_of(folder: str | Path) -> StepFolders:
    return StepFolders(expand_user(folder).absolute() / CHECKPOINTS)


def _add_corrections(parameter: LazyArray, correction: LazyArray | None) -> LazyArray:
    """Returns a BF16 parameter with its corrections, in FP32, and any other one as it is."""
    if correction is None or parameter.shape != correction.shape:
        return parameter
    if parameter.dtype != jnp.bfloat16:
        return parameter

    def read(index: Index) -> np.ndarray:
        return np.asarray(join(parameter.read(index), correction.read(index)))

    return parameter._replace(dtype=np.dtype(np.float32), read=read)


def _in_checkpoint(path: Path, name: str, array: Any, driver: str) -> LazyArray:
    import tensorstore

    kvstore = {"driver": "ocdbt", "base": path.as_uri(), "path": f"{name}/"}
    opened = tensorstore.open({"driver": driver, "kvstore": kvstore}, read=True).result()

    def read(index: Index) -> np.ndarray:
        part: np.ndarray = opened[index].read().result()
        _require_present(path)  # tensorstore reads zeros where there is nothing
        return part

    chunk = tuple(array.storage.chunk_shape)
    return LazyArray(opened.shape, opened.dtype.numpy_dtype, chunk, read)


def _require_present(path: Path) -> None:
    """Raises if the run has removed this checkpoint in the meantime.

    A run renames a checkpoint before it deletes it, so whatever was read until now is intact.
    """
    if not path.exists():
        raise UserError(
            f"{path.parent} was removed while it was read: its run trains on, and keeps newer "
            "ones only. Read the newest one, or raise --checkpoint.keep of the run."
        )
