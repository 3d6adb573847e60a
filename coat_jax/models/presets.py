"""Published models by name, and a tiny one.

Sizes are those of the models' config.json on Hugging Face. What a run chooses (dtypes, precision,
mesh axes, scan, remat) is left at its default: use `dataclasses.replace`.
"""

from typing import Any

from coat_jax.errors import UserError
from coat_jax.models.config import Config
from coat_jax.ops import Llama3Scaling, Rotary

SIZES = ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")


def _preset(*sizes: int, **features: Any) -> Config:
    """A config from its SIZES and the features in which it differs from Llama 2."""
    return Config(**features, **dict[str, Any](zip(SIZES, sizes, strict=True)))


LLAMA3, LLAMA31 = Rotary(5e5), Rotary(5e5, Llama3Scaling())
QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rotary": Rotary(1e6)}
QWEN2, QWEN3 = QWEN | {"qkv_bias": True}, QWEN | {"qk_norm": "head"}
OLMO2: dict[str, Any] = {"norm_eps": 1e-6, "norms": "after", "qk_norm": "all"}

PRESETS = {
    # 0.9 million parameters, over bytes. Every matrix is large enough for FP8 optimizer states.
    "tiny": _preset(256, 128, 4, 4, 4, 32, 384, 1024),
    "llama2_7b": _preset(32000, 4096, 32, 32, 32, 128, 11008, 4096),
    "llama2_13b": _preset(32000, 5120, 40, 40, 40, 128, 13824, 4096),
    # The first LLaMA's 33B: Llama 2 has no such size.
    "llama_30b": _preset(32000, 6656, 60, 52, 52, 128, 17920, 2048, norm_eps=1e-6),
    "llama3_8b": _preset(128256, 4096, 32, 32, 8, 128, 14336, 8192, rotary=LLAMA3),
    "llama3.1_8b": _preset(128256, 4096, 32, 32, 8, 128, 14336, 131072, rotary=LLAMA31),
    "mistral_7b": _preset(32000, 4096, 32, 32, 8, 128, 14336, 32768, window=4096),
    "qwen2_0.5b": _preset(151936, 896, 24, 14, 2, 64, 4864, 131072, **QWEN2, tied=True),
    "qwen2_7b": _preset(152064, 3584, 28, 28, 4, 128, 18944, 131072, **QWEN2),
    "qwen3_0.6b": _preset(151936, 1024, 28, 16, 8, 128, 3072, 40960, **QWEN3, tied=True),
    "qwen3_8b": _preset(151936, 4096, 36, 32, 8, 128, 12288, 40960, **QWEN3),
    "olmo_1b": _preset(50304, 2048, 16, 16, 16, 128, 8192, 2048, norm="layer", tied=True),
    "olmo_7b": _preset(50304, 4096, 32, 32, 32, 128, 11008, 2048, norm="layer"),
    "olmo2_7b": _preset(100352, 4096, 32, 32, 32, 128, 11008, 4096, **OLMO2, rotary=LLAMA3),
}


def config_of(name: str | Config) -> Config:
    """The preset of this name, in any case; a Config passes through."""
    config = name if isinstance(name, Config) else PRESETS.get(str(name).lower())
    if config is None:
        raise UserError(
            f"There is no model {name!r}. Use one of {', '.join(PRESETS)}, or a coat.models.Config."
        )
    return config
