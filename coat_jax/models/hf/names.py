"""Names of parameters, and of the tensors in a Hugging Face folder that they are made of.

A weight is [outputs, inputs] in the files and [inputs, outputs] here; with `Config.scan` a
parameter is the tensors of all layers, stacked. The weights of a layer's experts are one parameter
here, and a tensor for each expert in the files.
"""

from typing import TypeAlias

from coat_jax.models.config import Config
from coat_jax.models.lazy_arrays import Name

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
# Instead of these, a layer with experts has:
EXPERTS: dict[Name, str] = {
    ("mlp", "router"): "mlp.gate.weight",
    ("mlp", "gate"): "mlp.experts.{}.gate_proj.weight",
    ("mlp", "up"): "mlp.experts.{}.up_proj.weight",
    ("mlp", "down"): "mlp.experts.{}.down_proj.weight",
}
MIXTRAL: dict[Name, str] = {
    ("mlp", "router"): "block_sparse_moe.gate.weight",
    ("mlp", "gate"): "block_sparse_moe.experts.{}.w1.weight",
    ("mlp", "up"): "block_sparse_moe.experts.{}.w3.weight",
    ("mlp", "down"): "block_sparse_moe.experts.{}.w2.weight",
}
HEAD, EMBEDDING = OUTSIDE[("head",)], OUTSIDE[("embed",)]


# The tensor of a parameter, or those along its first axis.
Tensors: TypeAlias = "str | list[Tensors]"


def tensors_of(path: Name, config: Config) -> Tensors:
    """The tensors of a parameter: a list for stacked layers, and in it or alone one for experts."""
    if path[0] != config.STACK:
        return OUTSIDE[path]
    if isinstance(path[1], int):
        return _in_layer(path[1], path[2:], config)
    return [_in_layer(layer, path[1:], config) for layer in range(config.layers)]


def _in_layer(layer: int, name: Name, config: Config) -> Tensors:
    names, experts = IN_LAYER, config.experts
    if experts is not None:
        names = IN_LAYER | (MIXTRAL if config.qk_norm is None else EXPERTS)
    tensor = f"model.layers.{layer}.{names[name]}"
    if experts is None or "{}" not in tensor:
        return tensor
    return [tensor.format(expert) for expert in range(experts.count)]


def is_transposed(tensor: str) -> bool:
    """Whether a tensor is a weight, [outputs, inputs]; the parameter is [inputs, outputs]."""
    of_product = ("_proj.weight", ".gate.weight", ".w1.weight", ".w2.weight", ".w3.weight")
    return tensor == HEAD or tensor.endswith(of_product)


def file_order(name: str) -> tuple[int, str]:
    """Sorts embeddings first, then the layers in order, then the rest."""
    _, _, after = name.partition(".layers.")
    if after:
        return int(after.partition(".")[0]), name
    return (-1 if name.endswith(("embed_tokens.weight", "_embedding.weight")) else 10**9), name
