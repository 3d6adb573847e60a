"""Reads and writes the weights of Hugging Face folders.

While a model is loaded, host memory holds one parameter at a time (on a mesh, each device's part of
it); while it is saved, one piece of a parameter. `read` and `write` are for parameters that are not
in memory: see `coat_jax.models.lazy_arrays`. Tokenizers are left out.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
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
from coat_jax.models.hf.names import (
    EMBEDDING,
    HEAD,
    Source,
    file_order,
    layer_of,
    source_of,
    split,
)
from coat_jax.models.lazy_arrays import Index, LazyArray, Name, Parameters
from coat_jax.models.llama import Llama
from coat_jax.models.protocol import require_capability
from coat_jax.nn import MeshAxes
from coat_jax.printable import amount

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
    parameters = {
        path: _on_devices(path, leaf[...], model.config)
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    write(folder, model.config, parameters, dtype=dtype, extra=extra, file_bytes=file_bytes)


def read(folder: str | Path, config: Config) -> dict[Name, LazyArray]:
    """The parameters in a folder, to be read in parts.

    Args:
        folder: with safetensors files.
        config: the model that they belong to.
    """
    tensors = Tensors(expand_user(folder))
    require_layers(tensors, config)
    _, state = abstract(dataclasses.replace(config, axes=MeshAxes()))
    sources = {path: source_of(path, leaf.shape, config) for path, leaf in nnx.to_flat_state(state)}
    require_names({name for source in sources.values() for name in source.names}, tensors, config)
    return {path: _in_files(source, tensors) for path, source in sources.items()}


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
    sources = {path: source_of(path, one.shape, config) for path, one in parameters.items()}
    specs = {
        name: (source.file_shape, kind) for source in sources.values() for name in source.names
    }
    folder.mkdir(parents=True, exist_ok=True)
    new = NewTensors(folder, dict(sorted(specs.items(), key=file_order)), file_bytes)
    for path, one in parameters.items():
        source = sources[path]
        for index in lazy_arrays.pieces(one):
            values = one.read(index)
            layers, inner = split(source, index)
            in_file = inner[::-1] if source.transposed else inner
            for name, layer in zip(source.names[layers], source.stack(values), strict=True):
                new.write(name, in_file, layer.T if source.transposed else layer)
            progress(values.nbytes)
    new.finish(data)


def _in_files(source: Source, tensors: Tensors) -> LazyArray:
    """A parameter in a folder; raises where a tensor has another shape or is not a float."""
    for name in source.names:
        if tensors.shape(name) != source.file_shape:
            raise UserError(
                f"{name} in {tensors.folder} is {tensors.shape(name)}, and the Config says "
                f"{source.file_shape}."
            )
    dtype = np.result_type(*{jnp.dtype(tensors.dtype(name)) for name in source.names})

    def read(index: Index) -> np.ndarray:
        layers, inner = split(source, index)
        in_file = inner[::-1] if source.transposed else inner
        names = source.names[layers]
        values: Any = None
        for i, name in enumerate(names):
            tensor = tensors.read(name, in_file)
            tensor = tensor.T if source.transposed else tensor
            if values is None:
                values = np.empty((len(names), *tensor.shape), dtype)
            values[i] = tensor
        part: np.ndarray = values if source.stacked else values[0]
        return part

    piece = lazy_arrays.piece_of(source.shape, dtype.itemsize, stacked=source.stacked)
    return LazyArray(source.shape, dtype, piece, read)


def _on_devices(path: Name, value: jax.Array, config: Config) -> LazyArray:
    if not value.is_fully_addressable:
        raise UserError(
            f"{'.'.join(map(str, path))} is spread over several hosts. Save a checkpoint with "
            "orbax, and convert that on one host."
        )
    stacked = path[0] == "layers" and config.scan
    piece = lazy_arrays.piece_of(value.shape, value.dtype.itemsize, stacked=stacked)
    return LazyArray(value.shape, value.dtype, piece, lambda index: np.asarray(value[index]))


def require_layers(tensors: Tensors, config: Config) -> None:
    """Raises unless the folder has as many layers as the model.

    Called before a model is built, which takes long if the config claims thousands of layers.
    """
    numbers = map(layer_of, tensors.names())
    there = len({number for number in numbers if number is not None})
    if there != config.layers:
        raise UserError(
            f"{tensors.folder} has the tensors of {amount(there, 'layer')}, and its config.json "
            f"or the Config describes a model of {config.layers:,}."
        )


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
