"""Reads and writes the weights of Hugging Face folders.

While a model is loaded, host memory holds one parameter at a time (on a mesh, each device's part of
it); while it is saved, one piece of a parameter. `read` and `write` are for parameters that are not
in memory: see `coat_jax.models.lazy_arrays`. Tokenizers are left out.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import lazy_arrays
from coat_jax.models.config import Config
from coat_jax.models.creation import abstract
from coat_jax.models.hf.config import Json, from_json, to_json
from coat_jax.models.hf.files import NewTensors, Tensors, read_config_json
from coat_jax.models.hf.names import EMBEDDING, HEAD, file_order, is_transposed, tensors_of
from coat_jax.models.lazy_arrays import Index, LazyArray, Name, Parameters
from coat_jax.models.llama import Llama
from coat_jax.models.protocol import require_capability
from coat_jax.nn import MeshAxes

FILE_BYTES = 5 * 10**9


def read_config(folder: str | Path) -> Config:
    """The Config of a config.json; it computes in the dtype of the stored weights, not in FP8."""
    return from_json(read_config_json(expand_user(folder)))


def load(folder: str | Path, config: Config | None = None, *, mesh: Mesh | None = None) -> Llama:
    """The model in a folder.

    Args:
        folder: with config.json and safetensors files.
        config: of the model; by default what config.json says. A variant of that may
            have other dtypes (the weights are cast), precision, axes, scan or remat.
        mesh: to load it onto; by default the one that is set, if any.
    """
    config = read_config(folder) if config is None else config
    return lazy_arrays.load(config, read(folder, config), mesh=mesh)


def save(
    folder: str | Path,
    model: Llama,
    *,
    dtype: DTypeLike | None = None,
    extra: Json | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes config.json and the weights, for transformers and for `load`.

    Args:
        folder: without a model or a run in it; made if it is not there.
        model: the model.
        dtype: of the weights in the files; that of the parameters by default.
        extra: entries of config.json that a Config does not have, such as eos_token_id.
        file_bytes: how large a file may become.
    """
    require_capability("hf.save(folder, model)", model, "layers", "head_weight")
    parameters = lazy_arrays.parameters_of(model)
    write(folder, model.config, parameters, dtype=dtype, extra=extra, file_bytes=file_bytes)


def read(folder: str | Path, config: Config) -> dict[Name, LazyArray]:
    """The parameters in a folder, to be read in parts, those of all layers stacked.

    Args:
        folder: with safetensors files.
        config: the model that they belong to.
    """
    tensors = Tensors(expand_user(folder))
    config = dataclasses.replace(config, scan=True, axes=MeshAxes())
    _, state = abstract(config)
    names = {path: tensors_of(path, config) for path, _ in nnx.to_flat_state(state)}
    require_names({name for of_path in names.values() for name in of_path}, tensors, config)
    found = {}
    for path, leaf in nnx.to_flat_state(state):
        is_stacked = config.STACK in path
        ones = [_in_file(tensors, name, leaf.shape[is_stacked:]) for name in names[path]]
        found[path] = lazy_arrays.stack_of(ones) if is_stacked else ones[0]
    return found


def write(
    folder: str | Path,
    config: Config,
    parameters: Parameters,
    *,
    dtype: DTypeLike | None = None,
    extra: Json | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Writes config.json and parameters, of which one piece at a time is in memory.

    Args:
        folder: see `save`.
        config: the model.
        parameters: of it.
        dtype: see `save`.
        extra: see `save`.
        file_bytes: see `save`.
        progress: called with the number of bytes read since its last call.
    """
    folder, kind = expand_user(folder), jnp.dtype(config.param_dtype if dtype is None else dtype)
    data = {**to_json(config, kind), **(extra or {})}
    lazy_arrays.require_same(config, parameters)
    parameters = lazy_arrays.arrange(parameters, scan=True)
    specs = {}
    for path, one in parameters.items():
        shape = one.shape[config.STACK in path :]
        for name in tensors_of(path, config):
            specs[name] = shape[::-1] if is_transposed(name) else shape, kind
    folder.mkdir(parents=True, exist_ok=True)
    new = NewTensors(folder, dict(sorted(specs.items(), key=file_order)), file_bytes)
    for path, one in parameters.items():
        names = tensors_of(path, config)
        for index in lazy_arrays.pieces(one):
            values = one.read(index)
            layers, inside = [(names[0], values)], index
            if config.STACK in path:
                layers, inside = [*zip(names[index[0]], values, strict=True)], index[1:]
            for name, layer in layers:
                if is_transposed(name):
                    new.write(name, inside[::-1], layer.T)
                else:
                    new.write(name, inside, layer)
            progress(values.nbytes)
    new.finish(data)


def _in_file(tensors: Tensors, name: str, shape: tuple[int, ...]) -> LazyArray:
    """A parameter of one layer; raises where its tensor has another shape or is not a float."""
    is_turned = is_transposed(name)
    expected, (found, dtype) = shape[::-1] if is_turned else shape, tensors.spec(name)
    if found != expected:
        raise UserError(f"{name} in {tensors.folder} is {found}, and the Config says {expected}.")

    def read(index: Index) -> np.ndarray:
        return tensors.read(name, index[::-1]).T if is_turned else tensors.read(name, index)

    piece = lazy_arrays.piece_of(shape, dtype.itemsize, stacked=False)
    return LazyArray(shape, dtype, piece, read)


def require_names(needed: set[str], tensors: Tensors, config: Config) -> None:
    """Raises unless the folder has the tensors that the model needs, and no others."""
    # Old checkpoints store the rotary frequencies too, which follow from the Config.
    there = {name for name in tensors.names() if not name.endswith("rotary_emb.inv_freq")}
    if config.tied and HEAD in there:
        there.remove(HEAD)
        _require_equal(tensors)
    for kind, names in (("lacks", needed - there), ("has unexpected", there - needed)):
        if names:
            listed = ", ".join(sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise UserError(
                f"{tensors.folder} {kind} tensors: {listed}{more}. Its config.json or the Config "
                "describes another model."
            )


def _require_equal(tensors: Tensors) -> None:
    everything = (slice(None), slice(None))
    head, embedding = (tensors.read(name, everything) for name in (HEAD, EMBEDDING))
    if head.shape != embedding.shape or not np.array_equal(head, embedding):
        raise UserError(
            f"config.json of {tensors.folder} ties head and embedding, and {HEAD} differs from "
            f"{EMBEDDING}. Load it with a Config of tied=False."
        )
