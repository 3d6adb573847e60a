"""Which tensors of a Hugging Face folder a parameter is made of: their names and shapes.

A weight is [outputs, inputs] in the files and [inputs, outputs] here; with `Config.scan` a
parameter is the tensors of all layers, stacked.
"""

from typing import Any, NamedTuple

import numpy as np

from coat_jax.models.config import Config
from coat_jax.models.lazy_arrays import Index, Name

OUTSIDE: dict[Name, str] = {
    ("embed",): "model.embed_tokens.weight",
    ("norm", "scale"): "model.norm.weight",
    ("head",): "lm_head.weight",
}
IN_LAYER: dict[Name, str] = {
    ("attention", "norm", "scale"): "input_layernorm.weight",
    ("attention", "query"): "self_attn.q_proj.weight",
    ("attention", "key"): "self_attn.k_proj.weight",
    ("attention", "value"): "self_attn.v_proj.weight",
    ("attention", "query_bias"): "self_attn.q_proj.bias",
    ("attention", "key_bias"): "self_attn.k_proj.bias",
    ("attention", "value_bias"): "self_attn.v_proj.bias",
    ("attention", "query_norm", "scale"): "self_attn.q_norm.weight",
    ("attention", "key_norm", "scale"): "self_attn.k_norm.weight",
    ("attention", "out"): "self_attn.o_proj.weight",
    ("attention_norm", "scale"): "post_attention_layernorm.weight",
    ("mlp", "norm", "scale"): "post_attention_layernorm.weight",
    ("mlp", "gate"): "mlp.gate_proj.weight",
    ("mlp", "up"): "mlp.up_proj.weight",
    ("mlp", "down"): "mlp.down_proj.weight",
    ("mlp_norm", "scale"): "post_feedforward_layernorm.weight",
}
HEAD, EMBEDDING = OUTSIDE[("head",)], OUTSIDE[("embed",)]


class Source(NamedTuple):
    """Where a parameter comes from: one tensor, or one per layer, stacked."""

    names: tuple[str, ...]
    shape: tuple[int, ...]  # of the parameter
    stacked: bool
    transposed: bool

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of each tensor in the files."""
        own = self.shape[1:] if self.stacked else self.shape
        return own[::-1] if self.transposed else own

    def stack(self, values: np.ndarray) -> np.ndarray:
        """A part of the parameter, with an axis over tensors."""
        return values if self.stacked else values[None]


def source_of(path: Name, shape: tuple[int, ...], config: Config) -> Source:
    """The tensors of one parameter of a model."""
    if path[0] != "layers":
        return Source((OUTSIDE[path],), shape, False, path == ("head",))
    if config.scan:
        name = IN_LAYER[path[1:]]
        names = tuple(f"model.layers.{i}.{name}" for i in range(config.layers))
        return Source(names, shape, True, len(shape) == 3)
    name = f"model.layers.{path[1]}.{IN_LAYER[path[2:]]}"
    return Source((name,), shape, False, len(shape) == 2)


def split(source: Source, index: Index) -> tuple[slice, Index]:
    """Which tensors a part of a parameter is in, and its index in each, before transposition."""
    return (index[0], index[1:]) if source.stacked else (slice(None), index)


def layer_of(tensor: str) -> str | None:
    """The number of the layer that a tensor is in, as its name says it; None outside of layers."""
    parts = tensor.split(".")
    return parts[2] if parts[:2] == ["model", "layers"] and len(parts) > 3 else None


def file_order(tensor: tuple[str, Any]) -> tuple[int, str]:
    """The embedding, the layers in order, the rest."""
    name, _ = tensor
    parts = name.split(".")
    if parts[1] == "layers":
        return int(parts[2]), name
    return (-1 if name == EMBEDDING else 10**9), name
