"""config.json of Hugging Face, to and from `Config`.

A setting that a Config cannot express raises an error that names it: biases besides those of
queries, keys and values, activations that `ACTIVATION_NAMES` lacks, dropout, layers that differ,
scalings of rotary positions other than linear and Llama 3.1's, experts that all tokens share.
"""

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, get_type_hints

import jax.numpy as jnp

from coat_jax.errors import UserError
from coat_jax.models.config import Config, Experts
from coat_jax.ops import Llama3Scaling, Rotary
from coat_jax.precision import BF16
from coat_jax.validation import CountOrZero, brief, require

Json = Mapping[str, Any]


class Architecture(NamedTuple):
    """An architecture of transformers.

    Attributes:
        model_type: its name for transformers.
        fixed: fields of Config that it implies.
        defaults: entries of config.json that may be missing.
        experts: the entries for fields of Experts; None if it has none.
        ffn: the entry for `Config.ffn`.
    """

    model_type: str
    fixed: dict[str, Any]
    defaults: dict[str, Any]
    experts: dict[str, str] | None = None
    ffn: str = "intermediate_size"


OLMO_EPS = 1e-5  # written into transformers' code
PLAIN: dict[str, Any] = {"norm": "rms", "norms": "before", "qkv_bias": False, "qk_norm": None}
# Entries for fields of Experts. That of the z-loss is not one of transformers, which keeps it.
MIXTRAL = {"chosen": "num_experts_per_tok", "aux_loss": "router_aux_loss_coef"}
MIXTRAL |= {"count": "num_local_experts", "z_loss": "router_z_loss_coef"}
MOE = MIXTRAL | {"count": "num_experts", "normalized": "norm_topk_prob"}
OF_MOE = {"num_experts_per_tok": 8, "norm_topk_prob": False, "router_z_loss_coef": 0.0}

ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", PLAIN, {}),
    "MistralForCausalLM": Architecture(
        "mistral", PLAIN, {"sliding_window": 4096, "num_key_value_heads": 8}
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", PLAIN | {"qkv_bias": True}, {"num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", PLAIN | {"qk_norm": "head"}, {"head_dim": 128, "num_key_value_heads": 32}
    ),
    "OlmoForCausalLM": Architecture("olmo", PLAIN | {"norm": "layer", "norm_eps": OLMO_EPS}, {}),
    "Olmo2ForCausalLM": Architecture(
        "olmo2", PLAIN | {"norms": "after", "qk_norm": "all"}, {"rms_norm_eps": 1e-5}
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        PLAIN,
        OF_MOE
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        MIXTRAL,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        PLAIN | {"qk_norm": "head"},
        OF_MOE
        | {"num_key_value_heads": 4, "moe_intermediate_size": 768}
        | {"num_experts": 128, "router_aux_loss_coef": 0.001},
        MOE,
        ffn="moe_intermediate_size",
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        PLAIN | {"qk_norm": "all"},
        OF_MOE | {"rms_norm_eps": 1e-5, "num_experts": 64, "router_aux_loss_coef": 0.01},
        MOE,
    ),
}
FIELDS = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "context": "max_position_embeddings",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "tied": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
}
# Activations by their names in config.json; of several, the first is written.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
SCALINGS: dict[str, tuple[str, ...]] = {  # of rotary positions, and their numbers
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Where these have another value, the model is not one that a Config can describe.
REQUIRED = {
    "hidden_act": (*ACTIVATION_NAMES, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "swiglu_limit": (None,),
    "attention_dropout": (0, None),
    "clip_qkv": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
}
REQUIRED_OF_EXPERTS = {
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "router_jitter_noise": (0, None),
    "use_sliding_window": (False, None),
}
REQUIRED_OF_ROPE = {"rope_type": (*SCALINGS,), "partial_rotary_factor": (1, None)}
WINDOWED = ("mistral", "mixtral", "qwen2", "qwen3")
ALL_WINDOWED = ("mistral", "mixtral")  # sliding_window is that of all layers
FULL, SLIDING = "full_attention", "sliding_attention"
ORIGINAL = "original_max_position_embeddings"
Dtypes = Literal["float32", "bfloat16", "float16"]


# --- From config.json ------------------------------------------------------------------------


def from_json(data: Json) -> Config:
    """The Config of a config.json; it computes in the dtype of the stored weights, not in FP8."""
    architecture = ARCHITECTURES[architecture_in(data, ARCHITECTURES)]
    require_values("", data, REQUIRED)
    data = {**architecture.defaults, **data}
    fields: dict[str, Any] = {}
    for ours, theirs in (FIELDS | {"ffn": architecture.ffn}).items():
        value = data.get(theirs)
        if value is None and ours in ("kv_heads", "head_dim", "tied", "norm_eps"):
            each = fields["width"] // fields["heads"]
            value = {"kv_heads": fields["heads"], "head_dim": each, "tied": False}.get(ours, 1e-6)
        fields[ours] = read_field(Config, ours, theirs, value)
    dtype = dtype_in(data)
    return Config(
        **{**fields, **architecture.fixed},
        experts=_experts(data, architecture.experts),
        activation=ACTIVATION_NAMES[data.get("hidden_act") or "silu"],
        rotary=_rotary(data),
        window=_window(data, architecture.model_type, fields["layers"]),
        precision=BF16,
        param_dtype=dtype,
        dtype=dtype,
    )


def dtype_in(*places: Json) -> jnp.dtype:
    """The dtype of the stored weights, as the first of these says that has one; else FP32."""
    named = (data.get(name) for data in places for name in ("dtype", "torch_dtype"))
    first = next((name for name in named if name is not None), "float32")
    return jnp.dtype(require("config.json: dtype", first, Dtypes))


def architecture_in(data: Json, known: Collection[str]) -> str:
    """The architecture that a config.json names; raises unless it is a known one."""
    names = data.get("architectures") or data.get("_class_name") or ["none"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in known:
        raise UserError(
            f"config.json names the architecture {brief(name)}. There are {', '.join(known)}."
        )
    return name


def require_values(where: str, data: Json, required: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises unless each of these entries has one of its values."""
    for name, allowed in required.items():
        if data.get(name) not in allowed:
            raise UserError(
                f"config.json has {where}{name}={brief(data[name])}, which coat_jax does not "
                f"support: it can only be {' or '.join(repr(value) for value in allowed)}."
            )


def read_field(kind: type, ours: str, theirs: str, value: Any) -> Any:
    """A value of config.json; raises unless it is valid for the field of `kind`."""
    allowed = get_type_hints(kind, include_extras=True)[ours]
    return require(f"config.json: {theirs}", value, allowed)


def _rotary(data: Json) -> Rotary:
    """From rope_theta and rope_scaling, or from rope_parameters, which since 2025 holds both."""
    both = ("rope_scaling", "rope_parameters")
    old, new = (require(f"config.json: {name}", data.get(name), dict | None) for name in both)
    rope = old or new or {}
    theta = rope.get("rope_theta", data.get("rope_theta", 1e4))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if nested := [name for name, value in rope.items() if isinstance(value, dict)]:
        raise UserError(
            f"config.json has different rotary positions for {', '.join(nested)}. All layers of a "
            "Config have the same."
        )
    require_values("rope_scaling.", {**rope, "rope_type": kind}, REQUIRED_OF_ROPE)
    numbers = {
        name: float(read_field(Llama3Scaling, name, f"rope_scaling.{name}", rope.get(name)))
        for name in SCALINGS[kind]
    }
    scaling: float | Llama3Scaling | None = numbers.get("factor")
    if kind == "llama3":
        # transformers reads it outside of rope first.
        inside = rope.get(ORIGINAL, data["max_position_embeddings"])
        context = inside if data.get(ORIGINAL) is None else data[ORIGINAL]
        context = read_field(Llama3Scaling, "original_context", ORIGINAL, context)
        scaling = Llama3Scaling(**numbers, original_context=context)
    return Rotary(float(read_field(Rotary, "theta", "rope_theta", theta)), scaling)


def _experts(data: Json, entries: Mapping[str, str] | None) -> Experts | None:
    """The experts of each layer, None without any."""
    if entries is None:
        return None
    require_values("", data, REQUIRED_OF_EXPERTS)
    if "num_local_experts" in data:  # transformers writes either name, whatever the architecture
        entries = {**entries, "count": "num_local_experts"}
    fields = {
        ours: read_field(Experts, ours, theirs, data.get(theirs))
        for ours, theirs in entries.items()
    }
    return Experts(**fields)


def _window(data: Json, model_type: str, layers: int) -> int | None:
    """The sliding window that all layers have, or None where none has one."""
    if model_type not in WINDOWED:
        return None
    window: int | None = read_field(Config, "window", "sliding_window", data.get("sliding_window"))
    first, kinds = 0, data.get("layer_types")
    if model_type not in ALL_WINDOWED:
        used = data.get("use_sliding_window")
        if not require("config.json: use_sliding_window", used, bool | None):
            window = None
        if kinds is None:  # this many of the first layers have full attention
            first = data.get("max_window_layers", 28)
            first = require("config.json: max_window_layers", first, CountOrZero)
    if kinds is None:
        kinds = [SLIDING if window and i >= first else FULL for i in range(layers)]
    # In Mistral transformers ignores layer_types.
    possible = (
        [FULL] if window is None else [SLIDING] if model_type in ALL_WINDOWED else [FULL, SLIDING]
    )
    if kinds not in [[kind] * layers for kind in possible]:
        raise UserError(
            f"config.json gives the {layers} layers of a {model_type} {brief(kinds)} with a window "
            f"of {window}: here all have {' or '.join(possible)}. Correct sliding_window, "
            "use_sliding_window, max_window_layers or layer_types."
        )
    return window if kinds[0] == SLIDING else None


# --- To config.json --------------------------------------------------------------------------


def architecture_of(config: Config) -> str:
    """The architecture of transformers that computes what `config` says."""
    for name, architecture in ARCHITECTURES.items():
        model_type = architecture.model_type
        windows = config.window is None or model_type in WINDOWED
        # transformers refuses other widths in a Llama. Mistral without a window computes the same.
        width = model_type != "llama" or config.width % config.heads == 0
        width &= model_type != "olmoe" or config.width == config.heads * config.head_dim
        fixed = architecture.fixed.items()
        same = all(getattr(config, field) == value for field, value in fixed)
        if windows and width and same and _has_experts(architecture, config.experts):
            return name
    given = {name: getattr(config, name) for name in (*PLAIN, "window", "norm_eps", "experts")}
    raise UserError(
        f"No architecture of transformers computes {given}. There are {', '.join(ARCHITECTURES)}; "
        f"OLMo has norm_eps={OLMO_EPS}, Mistral, Mixtral and dense Qwen alone have windows, and "
        "experts have scores='softmax' and no biases."
    )


def _has_experts(architecture: Architecture, experts: Experts | None) -> bool:
    """Whether the layers of an architecture can have these experts, or None."""
    entries = architecture.experts
    if experts is None or entries is None:
        return experts is None and entries is None
    plain = experts.scores == "softmax" and not experts.bias_rate
    return plain and (experts.normalized or "normalized" in entries)


def to_json(config: Config, dtype: Any) -> dict[str, Any]:
    """The config.json of a model whose weights are stored as `dtype`."""
    name = architecture_of(config)
    architecture = ARCHITECTURES[name]
    model_type = architecture.model_type
    named = [theirs for theirs, ours in ACTIVATION_NAMES.items() if ours == config.activation]
    if not named:
        raise UserError(
            f"transformers cannot compute activation={brief(config.activation)}: a model to be "
            f"exported has one of {', '.join(dict.fromkeys(ACTIVATION_NAMES.values()))}."
        )
    if config.activation_limit is not None:
        raise UserError(
            f"transformers cannot compute a {model_type} with activation_limit="
            f"{config.activation_limit:g}: generate and evaluate from the folder of the run."
        )
    data: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    names = FIELDS | {"ffn": architecture.ffn}
    fields = {theirs: getattr(config, ours) for ours, theirs in names.items()}
    norm_eps, tied = fields.pop("rms_norm_eps"), fields.pop("tie_word_embeddings")
    data |= fields | {
        "hidden_act": named[0],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "rope_theta": config.rotary.theta,
        "rope_scaling": _scaling(config.rotary.scaling),
        "torch_dtype": jnp.dtype(dtype).name,
        # Only the tokenizer knows which tokens begin and end a text.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    for ours, theirs in (architecture.experts or {}).items():
        data[theirs] = getattr(config.experts, ours)
    if config.norm == "rms":
        data["rms_norm_eps"] = norm_eps
    if model_type in WINDOWED:
        data["sliding_window"] = config.window
    if model_type in ("qwen2", "qwen3"):
        data |= {"use_sliding_window": config.window is not None, "max_window_layers": 0}
    return data


def _scaling(scaling: float | Llama3Scaling | None) -> dict[str, Any] | None:
    if isinstance(scaling, Llama3Scaling):
        numbers = {name: getattr(scaling, name) for name in SCALINGS["llama3"]}
        return {"rope_type": "llama3", **numbers, ORIGINAL: scaling.original_context}
    return None if scaling is None else {"rope_type": "linear", "factor": scaling}
