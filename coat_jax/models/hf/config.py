"""config.json of Hugging Face, to and from `Config`.

A setting that a Config cannot express raises an error that names it: biases besides those of
queries, keys and values, activations that `ACTIVATION_NAMES` lacks, dropout, layers that differ,
scalings of rotary positions other than linear and Llama 3.1's.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from coat_jax.errors import UserError
from coat_jax.models.config import Config
from coat_jax.ops import Llama3Scaling, Rotary
from coat_jax.precision import BF16
from coat_jax.validation import CountOrZero, annotations, brief, require

Json = Mapping[str, Any]


class Architecture(NamedTuple):
    """An architecture of transformers: the settings that it implies, and its defaults."""

    model_type: str
    fixed: dict[str, Any]  # fields of Config
    defaults: dict[str, Any]  # entries of config.json that may be missing


OLMO_EPS = 1e-5  # written into transformers' code

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", {}, {}),
    "MistralForCausalLM": Architecture(
        "mistral", {}, {"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "Qwen2ForCausalLM": Architecture("qwen2", {"qkv_bias": True}, {"num_key_value_heads": 32}),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", {"qk_norm": "head"}, {"head_dim": 128, "num_key_value_heads": 32}
    ),
    "OlmoForCausalLM": Architecture("olmo", {"norm": "layer", "norm_eps": OLMO_EPS}, {}),
    "Olmo2ForCausalLM": Architecture(
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
# Activations by their names in config.json; of several, the first is written.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
# Where these have another value, the model is not one that a Config can describe.
REQUIRED = {
    "hidden_act": (*ACTIVATION_NAMES, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "clip_qkv": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
}
WINDOWED = ("mistral", "qwen2", "qwen3")
SLIDING = "sliding_attention"
LAYER_TYPES = ("full_attention", SLIDING)
DTYPES = ("float32", "bfloat16", "float16")


# --- From config.json ------------------------------------------------------------------------


def from_json(data: Json) -> Config:
    """The Config of a config.json; it computes in the dtype of the stored weights, not in FP8."""
    architecture = ARCHITECTURES[architecture_in(data, ARCHITECTURES)]
    for name, allowed in REQUIRED.items():
        if data.get(name) not in allowed:
            raise UserError(
                f"config.json has {name}={brief(data[name])}, which coat_jax does not support: it "
                f"can only be {' or '.join(repr(value) for value in allowed)}."
            )
    lacks_key_heads = "num_key_value_heads" not in data
    data = {**architecture.defaults, **data}
    if missing := [name for name in SIZES.values() if name not in data]:
        raise UserError(f"config.json of {architecture.model_type} lacks {', '.join(missing)}.")
    sizes = {ours: _read(Config, ours, theirs, data[theirs]) for ours, theirs in SIZES.items()}
    optional = {
        "kv_heads": ("num_key_value_heads", sizes["heads"]),
        "head_dim": ("head_dim", sizes["width"] // sizes["heads"]),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "tied": ("tie_word_embeddings", False),
    }
    for ours, (theirs, default) in optional.items():
        value = data.get(theirs)
        sizes[ours] = _read(Config, ours, theirs, default if value is None else value)
    if lacks_key_heads and sizes["heads"] % sizes["kv_heads"]:
        raise UserError(
            f"config.json lacks num_key_value_heads, which means {sizes['kv_heads']} in "
            f"{architecture.model_type}, and num_attention_heads={sizes['heads']} is no multiple "
            "of that: add it."
        )
    fields = {
        **sizes,
        "activation": ACTIVATION_NAMES[data.get("hidden_act") or "silu"],
        "rotary": _rotary(data),
        "window": _window(data, architecture.model_type, sizes["layers"]),
        "precision": BF16,
        "param_dtype": _dtype(data),
        "dtype": _dtype(data),
    }
    return Config(**{**fields, **architecture.fixed})


def architecture_in(data: Json, known: Collection[str]) -> str:
    """The architecture that a config.json names; raises unless it is a known one."""
    names = data.get("architectures") or ["none"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in known:
        raise UserError(
            f"config.json names the architecture {brief(name)}. There are {', '.join(known)}."
        )
    return name


def _read(kind: type, ours: str, theirs: str, value: Any) -> Any:
    """A value of config.json; raises unless it is valid for the field of `kind`."""
    return require(f"config.json: {theirs}", value, annotations(kind)[ours])


def _dtype(data: Json) -> Any:
    """The dtype of the weights."""
    given = [data[name] for name in ("dtype", "torch_dtype") if data.get(name) is not None]
    name = given[0] if given else "float32"
    if name not in DTYPES:
        raise UserError(
            f"config.json: dtype={brief(name)} must be one of {', '.join(DTYPES)}. Load the model "
            "with transformers, and save it in one of these."
        )
    return jnp.dtype(name)


def _rotary(data: Json) -> Rotary:
    """From rope_theta and rope_scaling, or from rope_parameters, which since 2025 holds both."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(data.get(name), Mapping | None):
            raise UserError(
                f"config.json scales rotary positions by {brief(data[name])}: {name} must be an "
                "object, or null for no scaling."
            )
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    theta = _read(
        Rotary, "theta", "rope_theta", rope.get("rope_theta", data.get("rope_theta", 1e4))
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if any(isinstance(value, dict) for value in rope.values()):
        raise UserError(
            f"config.json has different rotary positions for {', '.join(rope)}. All layers of a "
            "Config have the same."
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(
            f"config.json has partial_rotary_factor={brief(rope['partial_rotary_factor'])}, and "
            "coat_jax rotates whole heads."
        )
    if kind not in ("default", "linear", "llama3"):
        raise UserError(
            f"config.json scales rotary positions by {brief(kind)}, and coat_jax has default, "
            "linear and llama3."
        )

    def factor(name: str) -> float:
        if name not in rope:
            raise UserError(f"config.json: rope_scaling lacks {name}.")
        return float(_read(Llama3Scaling, name, f"rope_scaling.{name}", rope[name]))

    scaling: float | Llama3Scaling | None = None
    if kind == "linear":
        scaling = factor("factor")
    elif kind == "llama3":
        name = "original_max_position_embeddings"  # transformers reads it outside of rope first
        outside = data.get(name)
        inside = rope.get(name, data["max_position_embeddings"])
        context = inside if outside is None else outside
        scaling = Llama3Scaling(
            **{part: factor(part) for part in ("factor", "low_freq_factor", "high_freq_factor")},
            original_context=_read(Llama3Scaling, "original_context", name, context),
        )
    return Rotary(float(theta), scaling)


def _window(data: Json, model_type: str, layers: int) -> int | None:
    """The sliding window that all layers have, or None where none has one."""
    if model_type not in WINDOWED:
        return None
    window = _read(Config, "window", "sliding_window", data.get("sliding_window"))
    is_mistral, kinds = model_type == "mistral", data.get("layer_types")
    if not is_mistral:
        used = data.get("use_sliding_window")
        used = require("config.json: use_sliding_window", False if used is None else used, bool)
        window = window if used else None
    if kinds is None:
        # In Qwen this many of the first layers have full attention.
        first = 0 if is_mistral else data.get("max_window_layers", 28)
        first = require("config.json: max_window_layers", first, CountOrZero)
        windowed = 0 if window is None else max(layers - first, 0)
    elif isinstance(kinds, list) and all(kind in LAYER_TYPES for kind in kinds):
        windowed = kinds.count(SLIDING)
    else:
        raise UserError(
            f"config.json: layer_types={brief(kinds)} must be a list of "
            f"{' and '.join(LAYER_TYPES)}."
        )
    if kinds is not None and len(kinds) != layers:
        raise UserError(
            f"config.json: layer_types names {len(kinds)} layers, and num_hidden_layers={layers}."
        )
    # In Mistral transformers ignores layer_types: sliding_window is that of all layers.
    possible = (layers if window else 0,) if is_mistral else (0, layers) if window else (0,)
    if windowed not in possible:
        raise UserError(
            f"config.json gives a window of {window} to {windowed} of {layers} layers, and all "
            f"layers of a {model_type} here have the same window or none: correct sliding_window, "
            "use_sliding_window or layer_types."
        )
    return window if windowed else None


# --- To config.json --------------------------------------------------------------------------


def architecture_of(config: Config) -> str:
    """The architecture of transformers that computes what `config` says."""
    structure = {name: getattr(config, name) for name in STRUCTURE}
    default = {"norm": "rms", "norms": "before", "qkv_bias": False, "qk_norm": None}
    for name, (model_type, fixed, _) in ARCHITECTURES.items():
        own = {**default, **{key: value for key, value in fixed.items() if key in STRUCTURE}}
        windows = config.window is None or model_type in WINDOWED
        eps = fixed.get("norm_eps", config.norm_eps)
        # transformers refuses other widths in a Llama. Mistral without a window computes the same.
        width = model_type != "llama" or config.width % config.heads == 0
        if windows and width and structure == own and config.norm_eps == eps:
            return name
    given = {**structure, "window": config.window, "norm_eps": config.norm_eps}
    raise UserError(
        f"No architecture of transformers computes {given}. There are {', '.join(ARCHITECTURES)}; "
        f"OLMo has norm_eps={OLMO_EPS}, and Mistral and Qwen alone have windows."
    )


def to_json(config: Config, dtype: Any) -> dict[str, Any]:
    """The config.json of a model whose weights are stored as `dtype`."""
    architecture = architecture_of(config)
    model_type = ARCHITECTURES[architecture].model_type
    named = [theirs for theirs, ours in ACTIVATION_NAMES.items() if ours == config.activation]
    if not named:
        raise UserError(
            f"transformers cannot compute activation={brief(config.activation)}: a model to be "
            f"exported has one of {', '.join(dict.fromkeys(ACTIVATION_NAMES.values()))}."
        )
    data: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    data |= {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}
    data |= {
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": named[0],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary.theta,
        "rope_scaling": _scaling(config.rotary),
        "torch_dtype": jnp.dtype(dtype).name,
        # Only the tokenizer knows which tokens begin and end a text.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.norm == "rms":
        data["rms_norm_eps"] = config.norm_eps
    if model_type in WINDOWED:
        data["sliding_window"] = config.window
    if model_type in ("qwen2", "qwen3"):
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
