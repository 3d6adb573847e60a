"""Folders with quantized models, for vLLM and transformers too: see `layout` for config.json.

    codes          ...q_proj.weight          I8 or F8_E4M3 [N, K], outputs first as here
                   ...q_proj.weight_packed   I32 [N, K / 4]: INT8 whose inputs are not rounded
    scale          ...q_proj.weight_scale    F32 [N, 1]
    input_scale    ...q_proj.input_scale     F32 [1]

Everything else is as `coat.models.hf` reads and writes it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Int8, Int32

from coat_jax.errors import UserError
from coat_jax.files import expanded
from coat_jax.models import Config, Llama, hf, stored
from coat_jax.models.hf.config import from_json as model_from_json
from coat_jax.models.hf.config import to_json as model_to_json
from coat_jax.models.hf.files import CODES, FLOATS, NewTensors, Tensors, read_config_json
from coat_jax.models.hf.names import file_order, source_of
from coat_jax.models.hf.weights import require_layers, require_names
from coat_jax.models.llama import require_llama
from coat_jax.models.stored import Index, Name, Stored
from coat_jax.nn.modular import ATTENTION_PROJECTIONS, MLP_PROJECTIONS
from coat_jax.numerics import eight_bits
from coat_jax.quantization import layout
from coat_jax.quantization.projections import inference_config, is_quantized
from coat_jax.quantization.quantize import abstract, schemes_of
from coat_jax.quantization.recipe import Scheme

PER_INT32 = 4


def read_config(folder: str | Path) -> Config:
    """The Config of a quantized folder."""
    return _config(read_config_json(expanded(folder)))


def load(folder: str | Path, config: Config | None = None, *, mesh: Mesh | None = None) -> Llama:
    """The quantized model in a folder.

    Args:
        folder: written by `save`, or in the same layout by others.
        config: of the model; by default what config.json says. A variant may have another
            dtype, axes or context.
        mesh: to load it onto; by default the one that is set, if any.
    """
    folder = expanded(folder)
    config_json = read_config_json(folder)
    if layout.ENTRY not in config_json:
        raise UserError(
            f"{folder} holds no quantized model: its config.json has no {layout.ENTRY}. "
            "`coat convert` makes a quantized model from others."
        )
    config = _config(config_json) if config is None else inference_config(config)
    tensors = Tensors(folder, FLOATS | CODES)
    require_layers(tensors, config)
    schemes = layout.from_json(config_json.get(layout.ENTRY), config)
    graph, state = abstract(config, schemes, mesh=mesh)
    return stored.fill(graph, state, _read(tensors, config, schemes, state))


def save(
    folder: str | Path,
    model: Llama,
    *,
    dtype: DTypeLike | None = None,
    extra: Mapping[str, Any] | None = None,
    file_bytes: int = hf.FILE_BYTES,
) -> None:
    """Writes a quantized model: config.json and safetensors.

    Args:
        folder: without a model or a run in it; made if it is not there.
        model: from `quantize`.
        dtype: of what is not quantized; by default that in which the model computes.
        extra: entries of config.json that a Config does not have, such as eos_token_id.
        file_bytes: how large a file may become.
    """
    require_llama("quantization.save(folder, model)", model)
    if not is_quantized(model):
        raise ValueError("save writes a model that quantize() returned; hf.save writes others.")
    leaves = nnx.to_flat_state(nnx.state(model))
    shapes = {path: tuple(leaf[...].shape) for path, leaf in leaves}
    values = ((path, np.asarray(leaf[...])) for path, leaf in leaves)
    settings: dict[str, Any] = {"dtype": dtype, "extra": extra, "file_bytes": file_bytes}
    write(folder, model.config, schemes_of(model), shapes, values, **settings)


def write(
    folder: str | Path,
    config: Config,
    schemes: Mapping[str, Scheme],
    shapes: Mapping[Name, tuple[int, ...]],
    values: Iterable[tuple[Name, np.ndarray]],
    *,
    dtype: DTypeLike | None = None,
    extra: Mapping[str, Any] | None = None,
    file_bytes: int = hf.FILE_BYTES,
) -> None:
    """Writes the arrays of a quantized model, of which one at a time is in memory.

    Args:
        folder: see `save`.
        config: of the quantized model.
        schemes: of its projections.
        shapes: of its arrays, by their paths in its state.
        values: the arrays, each with its path, in any order.
        dtype: see `save`.
        extra: see `save`.
        file_bytes: see `save`.
    """
    folder, kind = expanded(folder), jnp.dtype(config.dtype if dtype is None else dtype)
    data = {**model_to_json(config, kind), **(extra or {})}
    data[layout.ENTRY] = layout.to_json(config, schemes)
    tensors = {
        path: _tensors_of(path, shape, schemes, config, kind) for path, shape in shapes.items()
    }
    specs = {t.name: (t.shape, t.dtype) for of_path in tensors.values() for t in of_path}
    folder.mkdir(parents=True, exist_ok=True)
    new = NewTensors(folder, dict(sorted(specs.items(), key=file_order)), file_bytes)
    for path, value in values:
        for tensor in tensors[path]:
            arranged = tensor.arrange(value)
            new.write(tensor.name, (slice(None),) * arranged.ndim, arranged)
    new.finish(data)


def _config(config_json: Mapping[str, Any]) -> Config:
    return inference_config(
        model_from_json({k: v for k, v in config_json.items() if k != layout.ENTRY})
    )


# --- Tensors ---------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A tensor in the files, and the parameter that it holds.

    Attributes:
        name: of the tensor.
        shape: of the tensor.
        dtype: of the tensor.
        arrange: makes the tensor from the parameter.
        read: a part of the parameter, from the files; None if the parameter is in another tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    arrange: Callable[[np.ndarray], np.ndarray]
    read: Callable[[Tensors, Index], np.ndarray] | None


def _tensors_of(
    path: Name,
    shape: tuple[int, ...],
    schemes: Mapping[str, Scheme],
    config: Config,
    kind: np.dtype,
) -> list[_Tensor]:
    """The tensors of a parameter; `kind` is the dtype of those that are not quantized."""
    owner, single = _projection(path), np.dtype(np.float32)
    module = layout.module_of(owner) if owner else ""
    scales, whole = f"{module}.weight_scale", (slice(None),)
    match path[-1] if owner else "":
        case "codes":
            return _tensors_of_codes(module, shape, schemes[owner])
        case "scale":
            return [
                _Tensor(
                    scales,
                    (*shape, 1),
                    single,
                    lambda x: x[:, None],
                    lambda tensors, index: tensors.read(scales, (*index, slice(None)))[:, 0],
                )
            ]
        case "input_scale":
            name = f"{module}.input_scale"
            first = lambda tensors, index: np.asarray(tensors.read(name, whole)[0])  # noqa: E731
            return [_Tensor(name, (1,), single, lambda x: x[None], first)]
    source = source_of(plain_name(path), shape, config)
    (name,) = source.names
    arrange = np.transpose if source.transposed else np.asarray

    def read(tensors: Tensors, index: Index) -> np.ndarray:
        return arrange(tensors.read(name, index[::-1] if source.transposed else index))

    return [_Tensor(name, source.file_shape, kind, arrange, read)]


def _tensors_of_codes(module: str, shape: tuple[int, ...], scheme: Scheme) -> list[_Tensor]:
    if layout.storage_of(scheme) != layout.PACKED:
        name, dtype = f"{module}.weight", jnp.dtype(eight_bits.DTYPES[scheme.format])
        read = lambda tensors, index: tensors.read(name, index)  # noqa: E731
        return [_Tensor(name, shape, dtype, np.asarray, read)]
    packed, size = f"{module}.weight_packed", np.array(shape, np.int64)

    def unpacked(tensors: Tensors, index: Index) -> np.ndarray:
        return _unpacked(tensors.read(packed, (index[0], slice(None))), shape[1])[:, index[1]]

    inside = (shape[0], math.ceil(shape[1] / PER_INT32))
    return [
        _Tensor(packed, inside, np.dtype(np.int32), _packed, unpacked),
        _Tensor(f"{module}.weight_shape", (2,), size.dtype, lambda _: size, None),
    ]


def _projection(path: Name) -> str:
    """The projection that a parameter belongs to; empty for those of other modules."""
    ours = len(path) == 5 and path[3] in (*ATTENTION_PROJECTIONS, *MLP_PROJECTIONS)
    return ".".join(map(str, path[:4])) if ours else ""


def plain_name(path: Name) -> Name:
    """The name that a parameter has in a model that is not quantized."""
    if not _projection(path):
        return path
    return (*path[:3], f"{path[3]}_bias") if path[-1] == "bias" else path[:4]


def _packed(codes: Int8[np.ndarray, "N K"]) -> Int32[np.ndarray, "N P"]:
    """Four codes in each number, the first in its lowest byte; 128 is added to each."""
    raised = (codes.astype(np.int16) + 128).astype(np.uint8)
    return np.pad(raised, ((0, 0), (0, -codes.shape[1] % PER_INT32))).view("<i4")


def _unpacked(packed: Int32[np.ndarray, "N P"], columns: int) -> Int8[np.ndarray, "N K"]:
    """The inverse of `_packed`."""
    raised = np.ascontiguousarray(packed, "<i4").view(np.uint8)[:, :columns]
    return (raised.astype(np.int16) - 128).astype(np.int8)


# --- Reading ---------------------------------------------------------------------------------


def _read(
    everything: Tensors, config: Config, schemes: Mapping[str, Scheme], state: Any
) -> dict[Name, Stored]:
    """The parameters in a folder, to be read in parts."""
    kind = jnp.dtype(config.param_dtype)
    expected = {
        path: _tensors_of(path, tuple(leaf.shape), schemes, config, kind)
        for path, leaf in nnx.to_flat_state(state)
    }
    needed = {tensor.name for tensors in expected.values() for tensor in tensors}
    require_names(needed, everything, config)
    found = {}
    for path, leaf in nnx.to_flat_state(state):
        tensor, *_ = expected[path]
        _require(tensor, everything)
        assert tensor.read is not None
        read = partial(tensor.read, everything)
        dtype = jnp.dtype(everything.dtype(tensor.name))
        dtype = leaf.dtype if tensor.dtype == np.int32 else dtype  # packed
        found[path] = Stored(tuple(leaf.shape), dtype, tuple(leaf.shape), read)
    return found


def _require(tensor: _Tensor, tensors: Tensors) -> None:
    """Raises unless a tensor in the files is what it should be; floats may be of another dtype."""
    shape, dtype = tensors.shape(tensor.name), tensors.dtype(tensor.name)
    alike = dtype == tensor.dtype.name or {dtype, tensor.dtype.name} <= set(FLOATS.values())
    if shape != tensor.shape or not alike:
        raise UserError(
            f"{tensor.name} in {tensors.folder} is {dtype} of shape {shape}, and config.json says "
            f"{tensor.dtype.name} of shape {tensor.shape}."
        )
