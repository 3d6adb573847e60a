"""AWQ's and GPTQ's folders: INT4 weights with zeros, in orders of their own.

              each I32 has eight codes, the first one in its lowest bits
    AWQ       qweight [K, N / 8]         of the outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight
    GPTQ      qweight [K / 8, N]         of eight inputs
    both      qzeros [K / 128, N / 8]    of outputs in the order of the method
              scales [K / 128, N]        F16

GPTQ stores zeros less by one, unless its checkpoint_format is "gptq_v2". Here tensors become those
of compressed-tensors, and `weight_zero`, U8 [N, K / 128].
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coat_jax.errors import UserError
from coat_jax.models import Config
from coat_jax.models.hf.weights import DECODER
from coat_jax.models.lazy_arrays import Index, LazyArray
from coat_jax.numerics.four_bits import GROUP
from coat_jax.ops.quantized import require_groups
from coat_jax.quantization.layout import ENTRY, module_of, pack_eight
from coat_jax.quantization.projections import paths_of
from coat_jax.quantization.recipe import Scheme
from coat_jax.validation import brief

METHODS = ("awq", "gptq")
ORDER = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # of AWQ's outputs
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "awq": {"bits": (4,), "group_size": (GROUP,), "version": ("gemm", "GEMM")},
    "gptq": {
        "bits": (4,),
        "group_size": (GROUP,),
        "checkpoint_format": ("gptq", "gptq_v2", None),
    },
}


def read(
    data: Mapping[str, Any], config: Config, tensors: Mapping[str, LazyArray]
) -> tuple[dict[str, Scheme], dict[str, LazyArray]]:
    """The scheme of each quantized projection, and tensors as compressed-tensors has them."""
    method = data["quant_method"]
    for name, allowed in SETTINGS[method].items():
        if data.get(name) not in allowed:
            raise UserError(
                f"config.json: {ENTRY} of {method} has {name}={brief(data.get(name))}; coat_jax "
                f"reads {allowed[0]!r}."
            )
    found, schemes = dict(tensors), {}
    shapes = DECODER.shapes_in_files(config)
    for path in paths_of(config):
        module = module_of(path)
        if f"{module}.qweight" not in found:
            continue
        outputs, inputs = shapes[f"{module}.weight"]
        require_groups(module, inputs)
        groups = inputs // GROUP
        is_awq = method == "awq"
        needed = {
            "qweight": ((inputs, outputs // 8) if is_awq else (inputs // 8, outputs), "int32"),
            "qzeros": ((groups, outputs // 8), "int32"),
            "scales": ((groups, outputs), "float16"),
        }
        order, bias = (found.pop(f"{module}.{name}", None) for name in ("g_idx", "bias"))
        parts: dict[str, LazyArray] = {}
        for name, (shape, kind) in needed.items():
            one = found.pop(f"{module}.{name}", None)
            if one is None or one.shape != shape or (kind == "int32") != (one.dtype == np.int32):
                there = "none" if one is None else f"{one.dtype.name} {one.shape}"
                raise UserError(f"{module}.{name} is {there}, and INT4 needs {kind} {shape}.")
            parts[name] = one
        neighbours = np.arange(inputs) // GROUP
        in_order = not data.get("desc_act")
        if order is not None:
            in_order = np.array_equal(order.whole(), neighbours)
        if not in_order:
            raise UserError(
                f"{module} has groups of inputs that are no neighbours (desc_act, g_idx), which "
                "coat_jax does not read. Quantize the model without activation order."
            )
        # Some tools write biases for all modules, zeros where the model has none.
        if bias is not None and (f"{module}.bias" in shapes or bias.whole().any()):
            found[f"{module}.bias"] = bias
        schemes[path] = Scheme("int4", "none", zeros=True)
        if method == "gptq" and data.get("checkpoint_format") != "gptq_v2":
            parts["qzeros"] = _plus_one(parts["qzeros"])
        made = _as_packed(method, **parts)
        found |= {f"{module}.{name}": one for name, one in made.items()}
    return schemes, found


def _as_packed(
    method: str, qweight: LazyArray, qzeros: LazyArray, scales: LazyArray
) -> dict[str, LazyArray]:
    """The tensors of a projection as compressed-tensors has them."""
    unpack_codes, unpack_zeros = _UNPACK[method]
    groups, outputs = scales.shape
    shape = np.array([outputs, groups * GROUP])
    of_groups = outputs, groups
    return {
        "weight_packed": _made(
            (outputs, groups * GROUP // 8), np.int32, lambda: pack_eight(unpack_codes(qweight))
        ),
        "weight_scale": _made(of_groups, np.float32, lambda: scales.whole().T),
        "weight_zero": _made(of_groups, np.uint8, lambda: unpack_zeros(qzeros)),
        "weight_shape": _made((2,), np.int64, lambda: shape),
    }


def _made(shape: tuple[int, ...], kind: Any, whole: Callable[[], np.ndarray]) -> LazyArray:
    """An array that is made as a whole when a part of it is read."""

    def read(index: Index) -> np.ndarray:
        return whole().astype(kind, copy=False)[index]

    return LazyArray(shape, np.dtype(kind), shape, read)


def _plus_one(packed: LazyArray) -> LazyArray:
    """Eight codes plus one each: GPTQModel subtracts all ones from a word, and a 0 borrows."""
    return packed._replace(read=lambda index: packed.read(index) + np.int32(0x11111111))


def _nibbles(packed: LazyArray) -> np.ndarray:
    """[A, B] of I32 as [A, B, 8] codes."""
    eight = np.ascontiguousarray(packed.whole(), "<i4").view(np.uint8)[..., None]
    return np.concatenate([eight & 15, eight >> 4], axis=-1).reshape(*packed.shape, 8)


def _outputs_in_order(packed: LazyArray) -> np.ndarray:
    """[N, A] of [A, N / 8] with outputs in order."""
    return _nibbles(packed).reshape(packed.shape[0], -1).T


def _outputs_of_awq(packed: LazyArray) -> np.ndarray:
    """[N, A] of [A, N / 8] with outputs in AWQ's order."""
    of_eight = _nibbles(packed)[..., np.argsort(ORDER)]
    return of_eight.reshape(packed.shape[0], -1).T


def _inputs_in_order(packed: LazyArray) -> np.ndarray:
    """[N, K] of [K / 8, N]."""
    return _nibbles(packed).transpose(1, 0, 2).reshape(packed.shape[1], -1)


_UNPACK = {
    "awq": (_outputs_of_awq, _outputs_of_awq),
    "gptq": (_inputs_in_order, _outputs_in_order),
}
