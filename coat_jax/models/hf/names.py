"""Names of parameters, and of the tensors in a Hugging Face folder that they are made of.

A weight is [outputs, inputs] in the files and [inputs, outputs] here; with `Config.scan` a
parameter is the tensors of all layers, stacked.
"""

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
HEAD, EMBEDDING = OUTSIDE[("head",)], OUTSIDE[("embed",)]


def tensors_of(path: Name, config: Config) -> list[str]:
    """The tensors of a parameter: one, or one for each layer if it is stacked."""
    if path[0] != config.STACK:
        return [OUTSIDE[path]]
    is_one = isinstance(path[1], int)
    layers, name = (path[1:2], path[2:]) if is_one else (range(config.layers), path[1:])
    return [f"model.layers.{layer}.{IN_LAYER[name]}" for layer in layers]


def is_transposed(tensor: str) -> bool:
    """Whether a tensor is a weight, [outputs, inputs]; the parameter is [inputs, outputs]."""
    return tensor == HEAD or tensor.endswith("_proj.weight")


def file_order(name: str) -> tuple[int, str]:
    """Sorts embeddings first, then the layers in order, then the rest."""
    _, _, after = name.partition(".layers.")
    if after:
        return int(after.partition(".")[0]), name
    return (-1 if name.endswith(("embed_tokens.weight", "_embedding.weight")) else 10**9), name
