"""config.json of Hugging Face, to and from `Config`.

What a Config cannot say is refused by name, never dropped: biases beside those of queries, keys
and values, other activations, dropout, layers that differ, scalings of rotary positions other
than linear and Llama 3.1's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from coat_jax.models.config import Config
from coat_jax.ops import Llama3Scaling, Rotary

Json = Mapping[str, Any]


class Family(NamedTuple):
    """An architecture of transformers: what is fixed in it, and its defaults."""

    model_type: str
    fixed: dict[str, Any]  # fields of Config
    defaults: dict[str, Any]  # entries of config.json that may be missing


OLMO_EPS = 1e-5  # written into transformers' code

FAMILIES = {
    "LlamaForCausalLM": Family("llama", {}, {}),
    "MistralForCausalLM": Family("mistral", {}, {"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", {"qkv_bias": True}, {}),
    "Qwen3ForCausalLM": Family("qwen3", {"qk_norm": "head"}, {"head_dim": 128}),
    "OlmoForCausalLM": Family("olmo", {"norm": "layer", "norm_eps": OLMO_EPS}, {}),
    "Olmo2ForCausalLM": Family(
        "olmo2", {"norms": "after", "qk_norm": "all"}, {"rms_norm_eps": 1e-5}
    ),
}
STRUCTURE = ("norm", "norms", "qkv_bias", "qk_norm")
SIZES = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
}
# Where these have another value, the model is not one that a Config can describe.
REQUIRED = {
    "hidden_act": ("silu", "swish", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "clip_qkv": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
}
WINDOWED = ("mistral", "qwen2", "qwen3")


# --- From config.json ------------------------------------------------------------------------


def from_json(data: Json) -> Config:
    """The Config of a config.json; dtypes are those of its weights."""
    architecture = (data.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise ValueError(
            f"config.json names the architecture {architecture!r}. There are {', '.join(FAMILIES)}."
        )
    family = FAMILIES[architecture]
    for name, allowed in REQUIRED.items():
        if data.get(name) not in allowed:
            raise ValueError(
                f"config.json has {name}={data[name]!r}, which coat_jax does not support: it can "
                f"only be {' or '.join(repr(value) for value in allowed)}."
            )
    data = {**family.defaults, **data}
    if missing := [name for name in SIZES.values() if name not in data]:
        raise ValueError(f"config.json of {architecture} lacks {', '.join(missing)}.")
    sizes = {ours: data[theirs] for ours, theirs in SIZES.items()}
    heads = sizes["heads"]
    dtype = jnp.dtype(data.get("dtype") or data.get("torch_dtype") or "float32")
    fields = {
        **sizes,
        "kv_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or sizes["width"] // heads,
        "norm_eps": data.get("rms_norm_eps", 1e-6),
        "rotary": _rotary(data),
        "window": _window(data, family, sizes["layers"]),
        "tied": bool(data.get("tie_word_embeddings", False)),
        "param_dtype": dtype,
        "dtype": dtype,
    }
    return Config(**{**fields, **family.fixed})


def _rotary(data: Json) -> Rotary:
    """From rope_theta and rope_scaling, or from rope_parameters, which hold both since 2025."""
    rope: Json = data.get("rope_scaling") or data.get("rope_parameters") or {}
    theta = rope.get("rope_theta", data.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(
            f"config.json has different rotary positions for {', '.join(rope)}. All layers of a "
            "Config have the same."
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"config.json has partial_rotary_factor={rope['partial_rotary_factor']}, and coat_jax "
            "turns whole heads."
        )
    if kind == "default":
        return Rotary(float(theta))
    if kind == "linear":
        return Rotary(float(theta), float(rope["factor"]))
    if kind == "llama3":
        scaling = Llama3Scaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            rope.get("original_max_position_embeddings", data["max_position_embeddings"]),
        )
        return Rotary(float(theta), scaling)
    raise ValueError(
        f"config.json scales rotary positions by {kind!r}, and coat_jax has default, linear and "
        "llama3."
    )


def _window(data: Json, family: Family, layers: int) -> int | None:
    """The sliding window that all layers have, or None where none has one."""
    if family.model_type not in WINDOWED:
        return None
    window = data.get("sliding_window")
    if family.model_type != "mistral" and not data.get("use_sliding_window", False):
        window = None
    if window is None:
        return None
    kinds = data.get("layer_types")
    if kinds is None:
        # In Qwen the first layers see everything, and these are how many.
        first = 0 if family.model_type == "mistral" else data.get("max_window_layers", 28)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(set(kinds)) > 1:
        raise ValueError(
            f"config.json gives a window of {window} to {kinds.count('sliding_attention')} of "
            f"{layers} layers. All layers of a Config have the same."
        )
    return window if kinds[0] == "sliding_attention" else None


# --- To config.json --------------------------------------------------------------------------


def architecture_of(config: Config) -> str:
    """The architecture of transformers that computes what `config` says."""
    structure = {name: getattr(config, name) for name in STRUCTURE}
    default = {"norm": "rms", "norms": "before", "qkv_bias": False, "qk_norm": None}
    for name, family in FAMILIES.items():
        fixed = {key: value for key, value in family.fixed.items() if key in STRUCTURE}
        windows = config.window is None or family.model_type in WINDOWED
        eps = family.fixed.get("norm_eps", config.norm_eps)
        if windows and structure == {**default, **fixed} and config.norm_eps == eps:
            return name
    given = {**structure, "window": config.window, "norm_eps": config.norm_eps}
    raise ValueError(
        f"No architecture of transformers computes {given}. There are {', '.join(FAMILIES)}; "
        f"OLMo has norm_eps={OLMO_EPS}, and Mistral and Qwen alone have windows."
    )


def to_json(config: Config, dtype: Any) -> dict[str, Any]:
    """The config.json of a model whose weights are stored as `dtype`."""
    architecture = architecture_of(config)
    family = FAMILIES[architecture]
    data: dict[str, Any] = {"architectures": [architecture], "model_type": family.model_type}
    data |= {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    data |= {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary.theta,
        "rope_scaling": _scaling(config.rotary),
        "torch_dtype": jnp.dtype(dtype).name,
        # Which tokens begin and end a text only the tokenizer knows.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.norm == "rms":
        data["rms_norm_eps"] = config.norm_eps
    if family.model_type in WINDOWED:
        data["sliding_window"] = config.window
    if family.model_type in ("qwen2", "qwen3"):
        data |= {"use_sliding_window": config.window is not None, "max_window_layers": 0}
    return data


def _scaling(rotary: Rotary) -> dict[str, Any] | None:
    if rotary.scaling is None:
        return None
    if not isinstance(rotary.scaling, Llama3Scaling):
        return {"rope_type": "linear", "factor": rotary.scaling}
    return {
        "rope_type": "llama3",
        "factor": rotary.scaling.factor,
        "low_freq_factor": rotary.scaling.low_freq_factor,
        "high_freq_factor": rotary.scaling.high_freq_factor,
        "original_max_position_embeddings": rotary.scaling.original_context,
    }
