"""The layers of a transformer as functions on arrays that save little for the backward pass.

    linear, norm_linear              linear layers, alone or with the norm before them
    gated_mlp, mlp                   the MLP, from its norm to the residual sum; see ACTIVATIONS
    router_logits, route             the router of a mixture of experts; its load and penalties are
                                     expert_load, balance_loss and router_z_loss
    grouped_mlp, ExpertAxes          the MLPs of experts, each for the tokens that chose it
    norm_qkv                         from the residual stream to queries, keys and values
    attention, attention_linear      attention, alone or with its output projection
    attention_to_past                attention of one new token, for generation
    tile_attention, Tiles            attention between tiles of a video's tokens, sparse and in FP8
    norm, activate                   a norm or an activation by itself
    modulated_norm, gate             what a vector for each sample does to a norm and to a result
    embedding, rotate, cross_entropy lookup, rotary embeddings, the loss
    freeze, adapted_linear           a weight in FP8 that does not train, with an adapter that does
    quantize_weight, quantized_linear  a layer for inference, its weight in INT8 or FP8
    recompute                        saves only a function's input, in FP8
    DotGeneral, Einsum               drop-ins for `lax.dot_general` and `jnp.einsum`

Linear layers, MLPs, attention, norms and activations take a `coat.Precision`. All work on
arrays, so any framework can call them, under `jit` and on any mesh.
Inside `jax.shard_map` they need `check_vma=False`.
"""

from coat_jax.kernels.activation import ACTIVATIONS
from coat_jax.kernels.attention_to_past import Past, Visible
from coat_jax.kernels.norm import Norm
from coat_jax.ops.activation import activate
from coat_jax.ops.attention import attention, attention_linear
from coat_jax.ops.attention_to_past import attention_to_past
from coat_jax.ops.cross_entropy import cross_entropy, cross_entropy_sum
from coat_jax.ops.dot_general import DotGeneral, Einsum
from coat_jax.ops.embedding import embedding
from coat_jax.ops.expert_axes import ExpertAxes
from coat_jax.ops.frozen import Frozen, adapted_linear, freeze
from coat_jax.ops.grouped_mlp import grouped_mlp
from coat_jax.ops.linear import linear, norm_linear
from coat_jax.ops.mlp import gated_mlp, mlp
from coat_jax.ops.modulation import gate, modulated_norm
from coat_jax.ops.norm import norm
from coat_jax.ops.qkv import norm_qkv
from coat_jax.ops.quantized import Quantized, quantize_weight, quantized_linear
from coat_jax.ops.recompute import recompute
from coat_jax.ops.rotary import Llama3Scaling, Rotary, rotate
from coat_jax.ops.routing import (
    balance_loss,
    expert_load,
    route,
    router_logits,
    router_z_loss,
)
from coat_jax.ops.tile_attention import tile_attention
from coat_jax.ops.tiles import TileLists, Tiles

__all__ = [
    "ACTIVATIONS",
    "DotGeneral",
    "Einsum",
    "ExpertAxes",
    "Frozen",
    "Llama3Scaling",
    "Norm",
    "Past",
    "Quantized",
    "Rotary",
    "TileLists",
    "Tiles",
    "Visible",
    "activate",
    "adapted_linear",
    "attention",
    "attention_linear",
    "attention_to_past",
    "balance_loss",
    "cross_entropy",
    "cross_entropy_sum",
    "embedding",
    "expert_load",
    "freeze",
    "gate",
    "gated_mlp",
    "grouped_mlp",
    "linear",
    "mlp",
    "modulated_norm",
    "norm",
    "norm_linear",
    "norm_qkv",
    "quantize_weight",
    "quantized_linear",
    "recompute",
    "rotate",
    "route",
    "router_logits",
    "router_z_loss",
    "tile_attention",
]
