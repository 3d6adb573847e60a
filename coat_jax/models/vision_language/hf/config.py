"""config.json of SmolVLM, Idefics3 and LLaVA, to and from `Config`.

Idefics3 is SmolVLM by another name, and is written as SmolVLM. What a Config cannot express raises
an error that names it: towers of other kinds, features of several layers, other projectors.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from coat_jax.errors import UserError
from coat_jax.models.hf import config as decoders
from coat_jax.models.hf.config import ACTIVATION_NAMES, Json, architecture_in
from coat_jax.models.vision_language.config import Config, TowerConfig
from coat_jax.models.vision_language.images import CLIP as CLIP_IMAGES
from coat_jax.models.vision_language.images import ImageFormat
from coat_jax.precision import BF16
from coat_jax.validation import CountOrZero, brief, require

SMOLVLM, LLAVA = "SmolVLMForConditionalGeneration", "LlavaForConditionalGeneration"
ARCHITECTURES = (SMOLVLM, "Idefics3ForConditionalGeneration", LLAVA)

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"
PRESENT = {"num_channels": (3, None), "attention_dropout": (0, None)}
REQUIRED: dict[str, dict[str, tuple[Any, ...]]] = {
    SMOLVLM: {"vision_config.model_type": ("smolvlm_vision", "idefics3_vision", "idefics3", None)},
    LLAVA: {
        "vision_config.model_type": (CLIP, SIGLIP),
        "projector_hidden_act": ("gelu", None),
        "vision_feature_select_strategy": ("default", "full", None),
    },
}
FIELDS = {
    "width": "hidden_size",
    "ffn": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "patch": "patch_size",
    "norm_eps": "layer_norm_eps",
}
# What transformers takes for an entry of vision_config or text_config that is missing.
IDEFICS: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 16, "image_size": 224, "patch_size": 32, "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
OF_SIGLIP = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
OF_CLIP = {"hidden_size": 768, "num_attention_heads": 12, "layer_norm_eps": 1e-5}
TOWERS = {SIGLIP: IDEFICS | OF_SIGLIP, CLIP: IDEFICS | OF_CLIP | {"hidden_act": "quick_gelu"}}
DECODER = dict(zip(decoders.FIELDS.values(), (32000, 4096, 32, 32, 11008, 2048), strict=False))
DECODERS: dict[str, dict[str, Any]] = {
    "llama": DECODER,
    "mistral": DECODER | {"intermediate_size": 14336, "max_position_embeddings": 131072},
    "qwen2": DECODER
    | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    "qwen3": DECODER
    | {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
}


def from_json(data: Json, preprocessor: Json | None = None) -> Config:
    """The Config of a config.json; it computes in the dtype of the stored weights, not in FP8.

    Args:
        data: the content of config.json.
        preprocessor: that of preprocessor_config.json; None if the folder has none.
    """
    named = architecture_in(data, ARCHITECTURES)
    family = LLAVA if named == LLAVA else SMOLVLM
    text, vision = (
        require(f"config.json: {name}", data.get(name), dict)
        for name in ("text_config", "vision_config")
    )
    kind = vision.get("model_type")
    decoders.require_values("", {**data, "vision_config.model_type": kind}, REQUIRED[family])
    decoders.require_values("vision_config.", vision, PRESENT)
    vision = {**TOWERS.get(kind, IDEFICS), **vision}
    fields: dict[str, Any] = {
        ours: decoders.read_field(TowerConfig, ours, f"vision_config.{theirs}", vision[theirs])
        for ours, theirs in FIELDS.items()
    }
    if vision["hidden_act"] not in tuple(ACTIVATION_NAMES):
        raise UserError(
            f"config.json has vision_config.hidden_act={brief(vision['hidden_act'])}. There are "
            f"{', '.join(ACTIVATION_NAMES)}."
        )
    fields["activation"] = ACTIVATION_NAMES[vision["hidden_act"]]
    size = require("config.json: vision_config.image_size", vision["image_size"], int)
    if preprocessor is not None:
        fields["images"] = ImageFormat.from_json(preprocessor)
        if fields["images"].size != size:
            raise UserError(
                f"preprocessor_config.json makes images of {fields['images'].size} pixels, and the "
                f"tower in config.json has image_size={size}. Correct the one or the other."
            )
    of_model: dict[str, Any] = {}
    if family == LLAVA:
        fields |= _llava_tower(data, vision, kind, fields["layers"])
        default = CLIP_IMAGES if kind == CLIP else ImageFormat()
        fields.setdefault("images", dataclasses.replace(default, size=size))
        bias = data.get("multimodal_projector_bias")
        of_model = {"projector": "mlp", "projector_bias": True if bias is None else bias}
    else:
        default = ImageFormat(
            size=size, resize="longest", longest_edge=4 * size, resample="lanczos"
        )
        fields |= {"last_norm": True, "rounded_places": True}
        fields.setdefault("images", default)
        of_model = {
            "shuffle": require("config.json: scale_factor", data.get("scale_factor", 2), int)
        }
    token = data.get("image_token_id", data.get("image_token_index"))
    dtype = decoders.dtype_in(data, text)
    return Config(
        tower=TowerConfig(**fields),
        decoder=_decoder(text, data, family),
        image_token=require("config.json: image_token_id", token, CountOrZero),
        precision=BF16,
        param_dtype=dtype,
        dtype=dtype,
        **of_model,
    )


def _decoder(text: Mapping[str, Any], data: Json, family: str) -> Any:
    """The decoder of text_config, which names a model_type instead of an architecture."""
    names = {one.model_type: name for name, one in decoders.ARCHITECTURES.items()}
    kind = text.get("model_type")
    if kind not in tuple(names):
        raise UserError(
            f"config.json has text_config.model_type={brief(kind)}. There are {', '.join(names)}."
        )
    # In LLaVA's folders either may say it.
    tied = data.get("tie_word_embeddings") or (family == LLAVA and text.get("tie_word_embeddings"))
    given = {**text, "architectures": [names[kind]], "tie_word_embeddings": tied or False}
    return decoders.from_json({**DECODERS.get(kind, {}), **given})


def _llava_tower(data: Json, vision: Json, kind: str, layers: int) -> dict[str, Any]:
    """What LLaVA takes of a tower, and what its folder has besides."""
    last = data.get("vision_feature_layer", -2)
    if not isinstance(last, int) or not 0 < abs(last) <= layers:
        raise UserError(
            f"config.json has vision_feature_layer={brief(last)}: the features can only be those "
            f"of one of the {layers} layers."
        )
    used = layers + 1 + last if last < 0 else last
    unused = ["layer"] * (layers - used) + ["last_norm"]
    whole = data.get("vision_feature_select_strategy") == "full"
    if kind == SIGLIP:
        if not whole:
            raise UserError(
                'config.json has vision_feature_select_strategy="default", which drops the first '
                'patch of an image in a SigLIP tower. Only "full" is supported there.'
            )
        head = vision.get("vision_use_head", True)
        return {"layers": used, "unused": (*unused, *(["head"] if head else []))}
    clip = {"class_token": True, "patch_bias": False, "first_norm": True}
    return clip | {"layers": used, "unused": tuple(unused), "keeps_class_token": whole}


def to_json(config: Config, dtype: Any) -> dict[str, Any]:
    """The config.json of a model whose weights are stored as `dtype`."""
    tower, family = config.tower, family_of(config)
    text = decoders.to_json(config.decoder, dtype)
    kind = "smolvlm_vision" if family == SMOLVLM else CLIP if tower.class_token else SIGLIP
    vision = {theirs: getattr(tower, ours) for ours, theirs in FIELDS.items()}
    named = [theirs for theirs, ours in ACTIVATION_NAMES.items() if ours == tower.activation]
    if not named:
        raise UserError(
            f"transformers cannot compute tower.activation={brief(tower.activation)}: a model to "
            f"be exported has one of {', '.join(dict.fromkeys(ACTIVATION_NAMES.values()))}."
        )
    further = tower.unused.count("layer")
    vision |= {
        "model_type": kind,
        "num_hidden_layers": tower.layers + further,
        "image_size": tower.images.size,
        "num_channels": 3,
        "hidden_act": named[0],
        "attention_dropout": 0.0,
    }
    data: dict[str, Any] = {
        "architectures": [family],
        "model_type": "smolvlm" if family == SMOLVLM else "llava",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": config.decoder.tied,
        "torch_dtype": jnp.dtype(dtype).name,
    }
    if family == SMOLVLM:
        return data | {"image_token_id": config.image_token, "scale_factor": config.shuffle}
    if kind == SIGLIP:
        vision["vision_use_head"] = "head" in tower.unused
    return data | {
        "image_token_index": config.image_token,
        "image_seq_length": config.features,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": config.projector_bias,
        "vision_feature_layer": -1 - further,
        "vision_feature_select_strategy": "full"
        if kind == SIGLIP or tower.keeps_class_token
        else "default",
    }


def family_of(config: Config) -> str:
    """The architecture of transformers that computes what `config` says."""
    tower = config.tower
    clip = tower.class_token, tower.first_norm, not tower.patch_bias
    is_siglip, whole = not any(clip), _places_are_whole(tower)
    if config.projector == "linear":
        if is_siglip and tower.last_norm and not tower.unused and (tower.rounded_places or whole):
            return SMOLVLM
    elif not tower.last_norm and (whole or not tower.rounded_places):
        unused = (*["layer"] * tower.unused.count("layer"), "last_norm")
        if is_siglip and tower.unused == (*unused, "head"):
            return LLAVA
        if (is_siglip or all(clip)) and tower.unused == unused:
            return LLAVA
    raise UserError(
        f"No architecture of transformers computes this tower with a projector of the kind "
        f"{config.projector!r}: SmolVLM has a linear one, and a norm after SigLIP's layers; LLaVA "
        "has an MLP, CLIP or SigLIP, no norm after the layers, and in tower.unused any number of "
        "'layer', then 'last_norm', then at most one 'head', of SigLIP."
    )


def _places_are_whole(tower: TowerConfig) -> bool:
    from coat_jax.models.vision_language.tower import rounded_places

    return bool((rounded_places(tower.side) == range(tower.side**2)).all())
