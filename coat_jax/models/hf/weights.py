"""Reads and writes the weights of Hugging Face folders.

While a model is loaded, host memory holds one parameter at a time (on a mesh, each device's part of
it); while it is saved, one piece of a parameter. `read` and `write` are for parameters that are not
in memory: see `coat_jax.models.lazy_arrays`. Tokenizers are left out.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import lazy_arrays
from coat_jax.models.config import Config
from coat_jax.models.hf.config import Json, from_json, to_json
from coat_jax.models.hf.files import FLOATS, NewTensors, read_config_json, read_tensors
from coat_jax.models.hf.names import EMBEDDING, HEAD, is_transposed, shapes_in_files, tensors_of
from coat_jax.models.lazy_arrays import (
    LazyArray,
    Name,
    Parameters,
    require_parameters,
    require_same,
    stack_of,
    stacked_shapes,
)
from coat_jax.models.llama import Llama
from coat_jax.models.protocol import require_capability

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
    tensors = tensors_in(folder, config)
    require_same(folder, shapes_in_files(config), {n: one.shape for n, one in tensors.items()})
    found = {}
    for path in stacked_shapes(config):
        layers = [orient(name, tensors[name]) for name in tensors_of(path, config)]
        found[path] = stack_of(layers) if config.STACK in path else layers[0]
    return found


def tensors_in(
    folder: str | Path, config: Config, kinds: Mapping[str, str] = FLOATS
) -> dict[str, LazyArray]:
    """The tensors in a folder, see `read_tensors`, without a head that is tied to the embedding."""
    found = read_tensors(expand_user(folder), kinds)
    head, embedding = found.get(HEAD), found.get(EMBEDDING)
    if config.tied and head and embedding:
        if not np.array_equal(head.whole(), embedding.whole()):
            raise UserError(
                f"config.json of {folder} ties head and embedding, and {HEAD} differs from "
                f"{EMBEDDING}. Load it with a Config of tied=False."
            )
        del found[HEAD]
    return found


def orient(name: str, tensor: LazyArray) -> LazyArray:
    """A tensor as a parameter: the axes of weights are exchanged."""
    return tensor.transpose() if is_transposed(name) else tensor


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
        config: the model.
        parameters: of it.
        folder, dtype, extra, file_bytes: see `save`.
        progress: called with the number of bytes read since its last call.
    """
    folder, kind = expand_user(folder), jnp.dtype(config.param_dtype if dtype is None else dtype)
    data = {**to_json(config, kind), **(extra or {})}
    require_parameters(config, parameters)
    parameters = lazy_arrays.arrange(parameters, scan=True)
    specs = {name: (shape, kind) for name, shape in shapes_in_files(config).items()}
    new = NewTensors(folder, specs, file_bytes)
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
