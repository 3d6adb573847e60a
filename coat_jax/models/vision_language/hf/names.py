"""Names of parameters, and of the tensors in a Hugging Face folder that they are made of.

LLaVA's folders have four layouts: with transformers' old or new prefixes, and with the tower's
tensors under `vision_tower` or `vision_tower.vision_model`. All are read; the old prefixes with
`vision_model` are written.
"""

from coat_jax.models.hf import names as decoders
from coat_jax.models.hf.names import Tensors
from coat_jax.models.lazy_arrays import Name
from coat_jax.models.vision_language.config import Config, TowerConfig
from coat_jax.models.vision_language.hf.config import LLAVA, SMOLVLM, family_of

TOWER = {SMOLVLM: "model.vision_model", LLAVA: "vision_tower.vision_model"}
DECODER = {SMOLVLM: ("model.", "model.text_model."), LLAVA: ("", "language_model.")}
TIED = {
    SMOLVLM: ("lm_head.weight", "model.text_model.embed_tokens.weight"),
    LLAVA: ("language_model.lm_head.weight", "language_model.model.embed_tokens.weight"),
}
NEW_PREFIXES = {  # of LLaVA, and the old ones
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "lm_head.": "language_model.lm_head.",
}
PROJECTOR: dict[Name, str] = {
    ("kernel",): "model.connector.modality_projection.proj.weight",
    ("up",): "multi_modal_projector.linear_1.weight",
    ("up_bias",): "multi_modal_projector.linear_1.bias",
    ("down",): "multi_modal_projector.linear_2.weight",
    ("down_bias",): "multi_modal_projector.linear_2.bias",
}
OUTSIDE: dict[Name, str] = {
    ("patch",): "embeddings.patch_embedding.weight",
    ("patch_bias",): "embeddings.patch_embedding.bias",
    ("positions",): "embeddings.position_embedding.weight",
    ("class_token",): "embeddings.class_embedding",
    ("first_norm", "scale"): "pre_layrnorm.weight",  # CLIP spells it so
    ("first_norm", "bias"): "pre_layrnorm.bias",
    ("last_norm", "scale"): "post_layernorm.weight",
    ("last_norm", "bias"): "post_layernorm.bias",
}
IN_LAYER: dict[Name, str] = {
    ("attention", "norm", "scale"): "layer_norm1.weight",
    ("attention", "norm", "bias"): "layer_norm1.bias",
    ("attention", "query"): "self_attn.q_proj.weight",
    ("attention", "key"): "self_attn.k_proj.weight",
    ("attention", "value"): "self_attn.v_proj.weight",
    ("attention", "out"): "self_attn.out_proj.weight",
    ("attention", "query_bias"): "self_attn.q_proj.bias",
    ("attention", "key_bias"): "self_attn.k_proj.bias",
    ("attention", "value_bias"): "self_attn.v_proj.bias",
    ("attention", "out_bias"): "self_attn.out_proj.bias",
    ("mlp", "norm", "scale"): "layer_norm2.weight",
    ("mlp", "norm", "bias"): "layer_norm2.bias",
    ("mlp", "up"): "mlp.fc1.weight",
    ("mlp", "up_bias"): "mlp.fc1.bias",
    ("mlp", "down"): "mlp.fc2.weight",
    ("mlp", "down_bias"): "mlp.fc2.bias",
}
TRANSPOSED = tuple(
    f"{name}.weight"
    for name in ("lm_head", "proj", "fc1", "fc2", "linear_1", "linear_2", "patch_embedding")
)


def tensors_of(path: Name, config: Config) -> Tensors:
    """The tensor of a parameter, or those of all layers if it is stacked."""
    family, (part, *inside) = family_of(config), path
    if part == "projector":
        return PROJECTOR[tuple(inside)]
    if part == "tower":
        return _with_prefix("", f"{TOWER[family]}.", _of_tower(tuple(inside), config.tower))
    return _with_prefix(*DECODER[family], decoders.tensors_of(tuple(inside), config.decoder))


def _with_prefix(old: str, new: str, tensors: Tensors) -> Tensors:
    """The names with a new prefix, where they have the old one."""
    if isinstance(tensors, str):
        return new + tensors.removeprefix(old) if tensors.startswith(old) else tensors
    return [_with_prefix(old, new, one) for one in tensors]


def _of_tower(path: Name, tower: TowerConfig) -> Tensors:
    if path[0] == "unused":
        return str(path[1])
    if path[0] != tower.STACK:
        return OUTSIDE[path]
    if isinstance(path[1], int):
        return f"encoder.layers.{path[1]}.{IN_LAYER[path[2:]]}"
    return [f"encoder.layers.{layer}.{IN_LAYER[path[1:]]}" for layer in range(tower.layers)]


def is_transposed(tensor: str) -> bool:
    """Whether a tensor has the axes of its parameter in reverse."""
    return tensor.endswith(TRANSPOSED)


def renamed(name: str) -> str:
    """The name of one of LLaVA's tensors with the old prefixes, and under `vision_model`."""
    for new, old in NEW_PREFIXES.items():
        if name.startswith(new):
            name = old + name.removeprefix(new)
    inside = name.removeprefix("vision_tower.")
    if inside != name and not inside.startswith("vision_model."):
        return f"{TOWER[LLAVA]}.{inside}"
    return name
