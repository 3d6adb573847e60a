"""Folders with quantized models, for vLLM and transformers too: see `layout` for config.json.

    codes          ...q_proj.weight          I8 or F8_E4M3 [N, K], outputs first as here
                   ...q_proj.weight_packed   I32 [N, K / 4]: INT8 whose inputs are not rounded
                                             I32 [N, K / 8]: INT4
    scale          ...q_proj.weight_scale    F32 [N, 1], or of INT4 BF16 [N, K / 128]
    input_scale    ...q_proj.input_scale     F32 [1]

Everything else is as `coat.models.hf` reads and writes it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Int8, Int32, UInt8

from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import Config, Llama, hf, lazy_arrays
from coat_jax.models.hf.config import from_json as model_from_json
from coat_jax.models.hf.config import to_json as model_to_json
from coat_jax.models.hf.files import CODES, CONFIG, FLOATS, NewTensors, Spec, read_config_json
from coat_jax.models.hf.names import is_transposed, tensors_of
from coat_jax.models.hf.weights import DECODER, orient, tensors_in
from coat_jax.models.lazy_arrays import Index, LazyArray, Name, Parameters, dotted_name
from coat_jax.models.protocol import require_capability
from coat_jax.nn.quantized import QuantizedLinear
from coat_jax.numerics import eight_bits, four_bits
from coat_jax.ops import Quantized
from coat_jax.ops.quantized import require_groups
from coat_jax.quantization import foreign, layout
from coat_jax.quantization.calibration import Ranges
from coat_jax.quantization.projections import inference_config, is_quantized, plain_name
from coat_jax.quantization.quantize import abstract, choose_schemes, round_weight, schemes_of
from coat_jax.quantization.recipe import Recipe, Scheme

PER_INT32 = 4


def read_config(folder: str | Path) -> Config:
    """The Config of a quantized folder."""
    config_json = read_config_json(expand_user(folder))
    config_json.pop(layout.ENTRY, None)
    return inference_config(model_from_json(config_json))


def load(folder: str | Path, config: Config | None = None, *, mesh: Mesh | None = None) -> Llama:
    """The quantized model in a folder.

    Args:
        folder: written by `save`, or in the same layout by others; or by AWQ or GPTQ in INT4.
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
    config = read_config(folder) if config is None else inference_config(config)
    quantization, tensors = config_json[layout.ENTRY], tensors_in(folder, config, FLOATS | CODES)
    if isinstance(quantization, dict) and quantization.get("quant_method") in foreign.METHODS:
        schemes, tensors = foreign.read(quantization, config, tensors)
    else:
        schemes = layout.from_json(quantization, config)
    needed = _specs(config, schemes, np.dtype(np.float32))
    lazy_arrays.require_same(
        folder,
        {name: _describe(*spec) for name, spec in needed.items()},
        {name: _describe(one.shape, one.dtype) for name, one in tensors.items()},
    )
    for path, scheme in schemes.items():
        if scheme.format == "int4" and not scheme.zeros:
            scales = tensors[f"{layout.module_of(path)}.weight_scale"].whole()
            is_ours = four_bits.are_of_channel(jnp.asarray(scales))
            schemes[path] = scheme._replace(zeros=not is_ours)
    graph, state = abstract(config, schemes, mesh=mesh)
    return lazy_arrays.fill(graph, state, _arrays(state, config, tensors))


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
    if any(scheme.zeros for scheme in schemes_of(model).values()):
        raise UserError(
            "This model's INT4 weights have zeros, as AWQ and GPTQ make them, and the layout that "
            "save writes has none. Quantize the model that it was made from."
        )
    state, modules = nnx.state(model, nnx.Param), nnx.iter_modules(model)
    values = {plain_name(path): leaf[...] for path, leaf in nnx.to_flat_state(state)}
    values |= {path: m.weight() for path, m in modules if isinstance(m, QuantizedLinear)}
    _write(folder, model.config, schemes_of(model), values.items(), dtype, extra, file_bytes)


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
    lazy_arrays.require_parameters(config, parameters)
    parameters = lazy_arrays.arrange(parameters, scan=False)

    def parameter_at(name: Name) -> np.ndarray:
        return lazy_arrays.cast(parameters[name], np.dtype(config.param_dtype)).whole()

    def values() -> Iterator[tuple[Name, Any]]:
        for name, one in parameters.items():
            progress(one.nbytes)
            path, value = dotted_name(name), parameter_at(name)
            scheme = schemes.get(path)
            yield name, round_weight(path, value, scheme, recipe, ranges) if scheme else value

    schemes = choose_schemes(config, recipe, ranges, parameter_at)
    _write(folder, config, schemes, values(), dtype, extra, file_bytes)
    return schemes


def _write(
    folder: str | Path,
    config: Config,
    schemes: Mapping[str, Scheme],
    values: Iterable[tuple[Name, Any]],
    dtype: DTypeLike | None,
    extra: Mapping[str, Any] | None,
    file_bytes: int,
) -> None:
    """Writes the weights of a model, those that have a scheme `Quantized`; see `save`."""
    kind = jnp.dtype(config.dtype if dtype is None else dtype)
    data = {**model_to_json(config, kind), **(extra or {})}
    data[layout.ENTRY] = layout.to_json(config, schemes)
    specs = _specs(config, schemes, kind)
    new = NewTensors(expand_user(folder), specs, file_bytes)
    for name, value in values:
        tensor = tensors_of(name, config)
        assert isinstance(tensor, str)  # there are neither stacks nor experts
        for stored, array in _tensors(tensor, value, specs).items():
            new.write(stored, (slice(None),) * array.ndim, np.asarray(array))
    new.finish({CONFIG: data})


# --- Tensors ---------------------------------------------------------------------------------


def _specs(config: Config, schemes: Mapping[str, Scheme], kind: np.dtype) -> dict[str, Spec]:
    """Shapes and dtypes of the tensors in files; `kind` is the dtype of what is not quantized."""
    scheme_of = {layout.module_of(path): scheme for path, scheme in schemes.items()}
    found: dict[str, Spec] = {}
    for name, shape in DECODER.shapes_in_files(config).items():
        module = name.removesuffix(".weight")
        scheme = scheme_of.get(module)
        if scheme is None:
            found[name] = shape, kind
            continue
        if in_int4 := scheme.format == "int4":
            require_groups(module, shape[1])
        groups = shape[1] // four_bits.GROUP if in_int4 else 1
        kind_of_scale = np.dtype(jnp.bfloat16 if in_int4 else np.float32)
        found[f"{module}.weight_scale"] = (shape[0], groups), kind_of_scale
        if scheme.zeros:
            found[f"{module}.weight_zero"] = (shape[0], groups), np.dtype(np.uint8)
        if scheme.activations == "static":
            found[f"{module}.input_scale"] = (1,), np.dtype(np.float32)
        if scheme.format == "int4" or layout.storage_of(scheme) == layout.PACKED:
            packed = shape[0], math.ceil(shape[1] / (2 * PER_INT32 if in_int4 else PER_INT32))
            found[f"{module}.weight_packed"] = packed, np.dtype(np.int32)
            found[f"{module}.weight_shape"] = (2,), np.dtype(np.int64)
        else:
            found[name] = shape, jnp.dtype(eight_bits.DTYPES[scheme.format])
    return found


def _describe(shape: tuple[int, ...], dtype: np.dtype) -> str:
    """A spec in errors; all floats are alike, since they are cast."""
    return f"{'float' if dtype.name in FLOATS.values() else dtype.name} {shape}"


def _tensors(name: str, value: Any, specs: Mapping[str, Spec]) -> dict[str, Any]:
    """The tensors in which a parameter is stored."""
    if not isinstance(value, Quantized):
        return {name: value.T if is_transposed(name) else value}
    module = name.removesuffix(".weight")
    in_int4 = value.format == "int4"
    found = {f"{module}.weight_scale": value.scale if in_int4 else value.scale[:, None]}
    if value.input_scale is not None:
        found[f"{module}.input_scale"] = value.input_scale[None]
    if name in specs:
        return found | {name: value.codes}
    codes = np.asarray(value.codes)
    rows, columns = codes.shape
    packed = _pack_int4(codes) if in_int4 else _pack(codes)
    size = np.array([rows, 2 * columns if in_int4 else columns])
    return found | {f"{module}.weight_packed": packed, f"{module}.weight_shape": size}


def _arrays(state: Any, config: Config, tensors: Mapping[str, LazyArray]) -> dict[Name, LazyArray]:
    """The inverse of `_tensors`: the arrays of a quantized model, to be read in parts."""
    found = {}
    for path, leaf in nnx.to_flat_state(state):
        name = plain_name(path)
        tensor = tensors_of(name, config)
        assert isinstance(tensor, str)  # there are neither stacks nor experts
        module = tensor.removesuffix(".weight")
        match path[-1] if name != path else "":
            case "scale" if len(leaf.shape) == 2:
                one = tensors[f"{module}.weight_scale"]
            case "zero" if f"{module}.weight_zero" in tensors:
                one = tensors[f"{module}.weight_zero"]
            case "zero":  # that of symmetric codes
                zeros = np.full(leaf.shape, four_bits.ZERO, np.uint8)
                one = LazyArray(zeros.shape, zeros.dtype, zeros.shape, zeros.__getitem__)
            case "scale" | "input_scale" as scale:
                one = tensors[f"{module}.{'weight_scale' if scale == 'scale' else scale}"]
                one = one._replace(read=partial(_read_scales, one))
            case "codes" if tensor not in tensors:
                one = tensors[f"{module}.weight_packed"]
                read = partial(_read_packed, one, leaf.shape[1])
                if leaf.dtype == np.uint8:
                    read = partial(_read_int4, one)
                one = one._replace(dtype=np.dtype(leaf.dtype), read=read)
            case "codes":
                one = tensors[tensor]
            case _:
                one = orient(tensor, tensors[tensor])
        found[path] = one._replace(shape=leaf.shape)
    return found


def _read_scales(scales: LazyArray, index: Index) -> np.ndarray:
    return np.asarray(scales.read((*index, slice(None)))[..., 0])


def _read_packed(packed: LazyArray, columns: int, index: Index) -> np.ndarray:
    return _unpack(packed.read((index[0], slice(None))), columns)[:, index[1]]


def _read_int4(packed: LazyArray, index: Index) -> np.ndarray:
    return _unpack_int4(packed.read((index[0], slice(None))))[:, index[1]]


def _pack_int4(codes: UInt8[np.ndarray, "N K/2"]) -> Int32[np.ndarray, "N P"]:
    return layout.pack_eight(np.asarray(four_bits.unpack(jnp.asarray(codes))))


def _unpack_int4(packed: Int32[np.ndarray, "N P"]) -> UInt8[np.ndarray, "N K/2"]:
    """The inverse of `_pack_int4`."""
    pairs = np.ascontiguousarray(packed, "<i4").view(np.uint8)
    u = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
    return np.asarray(four_bits.pack(jnp.asarray(u)))


def _pack(codes: Int8[np.ndarray, "N K"]) -> Int32[np.ndarray, "N P"]:
    """Four codes in each number, the first in its lowest byte; 128 is added to each."""
    raised = (codes.astype(np.int16) + 128).astype(np.uint8)
    return np.pad(raised, ((0, 0), (0, -codes.shape[1] % PER_INT32))).view("<i4")


def _unpack(packed: Int32[np.ndarray, "N P"], columns: int) -> Int8[np.ndarray, "N K"]:
    """The inverse of `_pack`."""
    raised = np.ascontiguousarray(packed, "<i4").view(np.uint8)[:, :columns]
    return (raised.astype(np.int16) - 128).astype(np.int8)
