"""Reads and writes the weights of Hugging Face folders.

While a model is loaded, host memory holds one parameter at a time (on a mesh, each device's part of
it); while it is saved, one piece of a parameter. `read` and `write` are for parameters that are not
in memory: see `coat_jax.models.lazy_arrays`. Tokenizers are left out.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import lazy_arrays
from coat_jax.models.config import Config
from coat_jax.models.hf.config import Json, from_json, to_json
from coat_jax.models.hf.files import (
    CONFIG,
    FLOATS,
    STEM,
    NewTensors,
    read_config_json,
    read_tensors,
)
from coat_jax.models.hf.names import EMBEDDING, HEAD, Tensors, is_transposed, tensors_of
from coat_jax.models.lazy_arrays import (
    Index,
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


class Layout(NamedTuple):
    """How the parameters of a family of models are named in its folders.

    Attributes:
        module: the class of the models.
        to_json: makes config.json from a config and a dtype.
        tensors_of: the tensor of a parameter, or a list of those along its first axis, each of
            which may be a list in turn.
        is_transposed: whether a tensor has the axes of its parameter in reverse.
        tied: the names of the head and of the embedding.
        renamed: the name by which `tensors_of` knows a tensor that has another one in some folders.
        stem: of the names of files.
    """

    module: Callable[..., Any]
    to_json: Callable[[Any, Any], dict[str, Any]]
    tensors_of: Callable[[Name, Any], Tensors]
    is_transposed: Callable[[str], bool]
    tied: tuple[str, str]
    renamed: Callable[[str], str] = str
    stem: str = STEM

    def shapes_in_files(self, config: Any) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of a model."""
        found = {}

        def add(tensors: Tensors, shape: tuple[int, ...]) -> None:
            if isinstance(tensors, str):
                found[tensors] = shape[::-1] if self.is_transposed(tensors) else shape
                return
            for one in tensors:
                add(one, shape[1:])

        for path, shape in stacked_shapes(config, module=self.module).items():
            add(self.tensors_of(path, config), shape)
        return found


DECODER = Layout(Llama, to_json, tensors_of, is_transposed, (HEAD, EMBEDDING))


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


def read(folder: str | Path, config: Any, layout: Layout = DECODER) -> dict[Name, LazyArray]:
    """The parameters in a folder, to be read in parts, those of all layers stacked.

    Args:
        folder: with safetensors files.
        config: the model that they belong to.
        layout: of its family.
    """
    tensors, shapes = tensors_in(folder, config, layout=layout), layout.shapes_in_files(config)
    require_same(folder, shapes, {name: one.shape for name, one in tensors.items()})

    def joined(names: Tensors) -> LazyArray:
        if isinstance(names, str):
            return orient(names, tensors[names], layout)
        return stack_of([joined(one) for one in names])

    paths = stacked_shapes(config, module=layout.module)
    return {path: joined(layout.tensors_of(path, config)) for path in paths}


def tensors_in(
    folder: str | Path,
    config: Any,
    kinds: Mapping[str, str] = FLOATS,
    *,
    layout: Layout = DECODER,
) -> dict[str, LazyArray]:
    """The tensors in a folder, see `read_tensors`, without a head that is tied to the embedding."""
    stored = read_tensors(expand_user(folder), kinds, layout.stem)
    found = {layout.renamed(name): tensor for name, tensor in stored.items()}
    head, embedding = map(found.get, layout.tied)
    if config.tied and head and embedding:
        if not np.array_equal(head.whole(), embedding.whole()):
            raise UserError(
                f"config.json of {folder} ties head and embedding, and {layout.tied[0]} differs "
                f"from {layout.tied[1]}. Load it with a Config of tied=False."
            )
        del found[layout.tied[0]]
    return found


def orient(name: str, tensor: LazyArray, layout: Layout = DECODER) -> LazyArray:
    """A tensor as a parameter: the axes of weights are exchanged."""
    return tensor.transpose() if layout.is_transposed(name) else tensor


def write(
    folder: str | Path,
    config: Any,
    parameters: Parameters,
    *,
    layout: Layout = DECODER,
    beside: Mapping[str, Json] | None = None,
    dtype: DTypeLike | None = None,
    extra: Json | None = None,
    file_bytes: int = FILE_BYTES,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Writes config.json and parameters, of which one piece at a time is in memory.

    Args:
        config: the model.
        parameters: of it.
        layout: of its family.
        beside: other files of JSON in the folder, by name.
        folder, dtype, extra, file_bytes: see `save`.
        progress: called with the number of bytes read since its last call.
    """
    folder, kind = expand_user(folder), jnp.dtype(config.param_dtype if dtype is None else dtype)
    data = {**layout.to_json(config, kind), **(extra or {})}
    require_parameters(config, parameters, module=layout.module)
    parameters = lazy_arrays.arrange(parameters, scan=True)
    specs = {name: (shape, kind) for name, shape in layout.shapes_in_files(config).items()}
    new = NewTensors(folder, specs, file_bytes, layout.stem)
    for path, one in parameters.items():
        for index in lazy_arrays.pieces(one):
            values = one.read(index)
            _write_parts(new, layout, layout.tensors_of(path, config), index, values)
            progress(values.nbytes)
    new.finish({CONFIG: data, **(beside or {})})


def _write_parts(
    new: NewTensors, layout: Layout, tensors: Tensors, index: Index, values: np.ndarray
) -> None:
    """Fills in a part of the tensors of a parameter."""
    if isinstance(tensors, str):
        if layout.is_transposed(tensors):
            index, values = index[::-1], values.T
        new.write(tensors, index, values)
        return
    for one, part in zip(tensors[index[0]], values, strict=True):
        _write_parts(new, layout, one, index[1:], part)
