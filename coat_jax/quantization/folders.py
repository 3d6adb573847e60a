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
from coat_jax.files import expand_user
from coat_jax.models import Config, Llama, hf, lazy_arrays
from coat_jax.models.hf.config import from_json as model_from_json
from coat_jax.models.hf.config import to_json as model_to_json
from coat_jax.models.hf.files import CODES, FLOATS, NewTensors, Tensors, read_config_json
from coat_jax.models.hf.names import file_order, is_transposed, tensors_of
from coat_jax.models.hf.weights import require_names
from coat_jax.models.lazy_arrays import Index, LazyArray, Name, Parameters
from coat_jax.models.protocol import require_capability
from coat_jax.numerics import eight_bits
from coat_jax.quantization import layout
from coat_jax.quantization.calibration import Ranges
from coat_jax.quantization.projections import (
    inference_config,
    is_quantized,
    plain_name,
    projection_of,
)
from coat_jax.quantization.quantize import abstract, choose_schemes, quantized_arrays, schemes_of
from coat_jax.quantization.recipe import Recipe, Scheme

PER_INT32 = 4


def read_config(folder: str | Path) -> Config:
    """The Config of a quantized folder."""
    return _config(read_config_json(expand_user(folder)))


def load(folder: str | Path, config: Config | None = None, *, mesh: Mesh | None = None) -> Llama:
    """The quantized model in a folder.

    Args:
        folder: written by `save`, or in the same layout by others.
        config: of the model; by default what config.json says. A variant may have another
            dtype, axes or context.
        mesh: to load it onto; by default the one that is set, if any.
    """
    folder = expand_user(folder)
    config_json = read_config_json(folder)
    if layout.ENTRY not in config_json:
        raise UserError(
            f"{folder} holds no quantized model: its config.json has no {layout.ENTRY}. "
            "`coat convert` makes a quantized model from others."
        )
    config = _config(config_json) if config is None else inference_config(config)
    tensors = Tensors(folder, FLOATS | CODES)
    last = f"model.layers.{config.layers - 1}."
    if not any(name.startswith(last) for name in tensors.names()):  # building layers takes long
        raise UserError(
            f"{folder} has no tensors {last}*, and its config.json or the Config describes a model "
            f"of {config.layers:,} layers."
        )
    schemes = layout.from_json(config_json.get(layout.ENTRY), config)
    graph, state = abstract(config, schemes, mesh=mesh)
    return lazy_arrays.fill(graph, state, _read(tensors, config, schemes, state))


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
    require_capability("quantization.save(folder, model)", model, "layers", "head_weight")
    if not is_quantized(model):
        raise ValueError("save writes a model that quantize() returned; hf.save writes others.")
    arrays = ((path, leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(model)))
    _write(folder, model.config, schemes_of(model), arrays, dtype, extra, file_bytes)


def save_quantized(
    folder: str | Path,
    config: Config,
    parameters: Parameters,
    recipe: Recipe,
    ranges: Ranges | None = None,
    *,
    dtype: DTypeLike | None = None,
    extra: Mapping[str, Any] | None = None,
    file_bytes: int = hf.FILE_BYTES,
    progress: Callable[[int], object] = lambda size: None,
) -> dict[str, Scheme]:
    """Quantizes and writes parameters, of which one at a time is in memory; returns the schemes.

    Args:
        folder: see `save`.
        config: of the model that is not quantized.
        parameters: of that model, in files or on devices.
        recipe, ranges: see `quantize`.
        dtype, extra, file_bytes: see `save`.
        progress: called with the number of bytes quantized since its last call.
    """
    config = inference_config(config)
    parameters = lazy_arrays.arrange(parameters, scan=False)
    lazy_arrays.require_same(config, parameters)
    kind = np.dtype(config.param_dtype)

    def parameter_at(name: Name) -> np.ndarray:
        return lazy_arrays.cast(parameters[name], kind).whole()

    def read(name: Name) -> np.ndarray:
        progress(lazy_arrays.size_of(parameters[name]))
        return parameter_at(name)

    schemes = choose_schemes(config, recipe, ranges, parameter_at)
    _, state = abstract(config, schemes)
    arrays = quantized_arrays(state, read, schemes, recipe, ranges)
    _write(folder, config, schemes, arrays, dtype, extra, file_bytes)
    return schemes


def _write(
    folder: str | Path,
    config: Config,
    schemes: Mapping[str, Scheme],
    arrays: Iterable[tuple[Name, Any]],
    dtype: DTypeLike | None,
    extra: Mapping[str, Any] | None,
    file_bytes: int,
) -> None:
    """Writes the arrays of a quantized model, in any order; see `save`."""
    folder, kind = expand_user(folder), jnp.dtype(config.dtype if dtype is None else dtype)
    data = {**model_to_json(config, kind), **(extra or {})}
    data[layout.ENTRY] = layout.to_json(config, schemes)
    _, state = abstract(config, schemes)
    tensors = _tensors(state, config, schemes, kind)
    specs = {t.name: (t.shape, t.dtype) for of_path in tensors.values() for t in of_path}
    folder.mkdir(parents=True, exist_ok=True)
    new = NewTensors(folder, dict(sorted(specs.items(), key=file_order)), file_bytes)
    for path, array in arrays:
        value = np.asarray(array)
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
    """A tensor in the files, and the array that it holds."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    arrange: Callable[[np.ndarray], np.ndarray]  # makes the tensor from the array
    # A part of the array, from the files; None if the array is in another tensor.
    read: Callable[[Tensors, Index], np.ndarray] | None


def _tensors(
    state: Any, config: Config, schemes: Mapping[str, Scheme], kind: np.dtype
) -> dict[Name, list[_Tensor]]:
    """The tensors of each array; `kind` is the dtype of those that are not quantized."""
    return {
        path: _tensors_of(path, tuple(leaf.shape), schemes, config, kind)
        for path, leaf in nnx.to_flat_state(state)
    }


def _tensors_of(
    path: Name,
    shape: tuple[int, ...],
    schemes: Mapping[str, Scheme],
    config: Config,
    kind: np.dtype,
) -> list[_Tensor]:
    owner, single = projection_of(path), np.dtype(np.float32)
    module = layout.module_of(owner) if owner else ""
    match path[-1] if owner else "":
        case "codes":
            return _tensors_of_codes(module, shape, schemes[owner])
        case "scale" | "input_scale" as scale:
            scales = f"{module}.{'weight_scale' if scale == 'scale' else scale}"

            def read_scales(tensors: Tensors, index: Index) -> np.ndarray:
                return np.asarray(tensors.read(scales, (*index, slice(None)))[..., 0])

            return [_Tensor(scales, (*shape, 1), single, lambda x: x[..., None], read_scales)]
    (name,) = tensors_of(plain_name(path), config)
    if not is_transposed(name):
        return [_Tensor(name, shape, kind, np.asarray, lambda tensors, i: tensors.read(name, i))]

    def read(tensors: Tensors, index: Index) -> np.ndarray:
        return tensors.read(name, index[::-1]).T

    return [_Tensor(name, shape[::-1], kind, np.transpose, read)]


def _tensors_of_codes(module: str, shape: tuple[int, ...], scheme: Scheme) -> list[_Tensor]:
    if layout.storage_of(scheme) != layout.PACKED:
        name, dtype = f"{module}.weight", jnp.dtype(eight_bits.DTYPES[scheme.format])
        read = lambda tensors, index: tensors.read(name, index)  # noqa: E731
        return [_Tensor(name, shape, dtype, np.asarray, read)]
    packed, size = f"{module}.weight_packed", np.array(shape, np.int64)

    def unpacked(tensors: Tensors, index: Index) -> np.ndarray:
        return _unpack(tensors.read(packed, (index[0], slice(None))), shape[1])[:, index[1]]

    inside = (shape[0], math.ceil(shape[1] / PER_INT32))
    return [
        _Tensor(packed, inside, np.dtype(np.int32), _pack, unpacked),
        _Tensor(f"{module}.weight_shape", (2,), size.dtype, lambda _: size, None),
    ]


def _pack(codes: Int8[np.ndarray, "N K"]) -> Int32[np.ndarray, "N P"]:
    """Four codes in each number, the first in its lowest byte; 128 is added to each."""
    raised = (codes.astype(np.int16) + 128).astype(np.uint8)
    return np.pad(raised, ((0, 0), (0, -codes.shape[1] % PER_INT32))).view("<i4")


def _unpack(packed: Int32[np.ndarray, "N P"], columns: int) -> Int8[np.ndarray, "N K"]:
    """The inverse of `_pack`."""
    raised = np.ascontiguousarray(packed, "<i4").view(np.uint8)[:, :columns]
    return (raised.astype(np.int16) - 128).astype(np.int8)


# --- Reading ---------------------------------------------------------------------------------


def _read(
    everything: Tensors, config: Config, schemes: Mapping[str, Scheme], state: Any
) -> dict[Name, LazyArray]:
    """The parameters in a folder, to be read in parts."""
    expected = _tensors(state, config, schemes, jnp.dtype(config.param_dtype))
    needed = {tensor.name for tensors in expected.values() for tensor in tensors}
    require_names(needed, everything, config)
    found = {}
    for path, leaf in nnx.to_flat_state(state):
        tensor, *_ = expected[path]
        assert tensor.read is not None
        shape, dtype = everything.spec(tensor.name)
        are_floats = {dtype.name, tensor.dtype.name} <= set(FLOATS.values())  # which are cast
        if shape != tensor.shape or not (dtype == tensor.dtype or are_floats):
            raise UserError(
                f"{tensor.name} in {everything.folder} is {dtype.name} of shape {shape}, and "
                f"config.json says {tensor.dtype.name} of shape {tensor.shape}."
            )
        read, shape = partial(tensor.read, everything), tuple(leaf.shape)
        found[path] = LazyArray(shape, leaf.dtype, shape, read)
    return found
