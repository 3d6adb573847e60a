"""Published models by name, and a tiny one.

Sizes are those of the models' config.json on Hugging Face. What a run chooses (dtypes, precision,
mesh axes, scan, remat) is left at its default: use `dataclasses.replace`.
"""

import dataclasses

from coat_jax.errors import UserError
from coat_jax.models.config import Config
from coat_jax.ops import Llama3Scaling, Rotary

# 0.9 million parameters, over bytes. Every matrix is large enough for FP8 optimizer states.
TINY = Config(
    vocab=256, width=128, layers=4, heads=4, kv_heads=4, head_dim=32, ffn=384, context=1024
)

LLAMA2_7B = Config(
    vocab=32000,
    width=4096,
    layers=32,
    heads=32,
    kv_heads=32,
    head_dim=128,
    ffn=11008,
    context=4096,
)
LLAMA2_13B = dataclasses.replace(LLAMA2_7B, width=5120, layers=40, heads=40, kv_heads=40, ffn=13824)
# The first LLaMA's 33B: Llama 2 has no such size.
LLAMA_30B = dataclasses.replace(
    LLAMA2_7B,
    width=6656,
    layers=60,
    heads=52,
    kv_heads=52,
    ffn=17920,
    context=2048,
    norm_eps=1e-6,
)
LLAMA3_8B = dataclasses.replace(
    LLAMA2_7B, vocab=128256, kv_heads=8, ffn=14336, context=8192, rotary=Rotary(5e5)
)
LLAMA31_8B = dataclasses.replace(LLAMA3_8B, context=131072, rotary=Rotary(5e5, Llama3Scaling()))

MISTRAL_7B = dataclasses.replace(LLAMA2_7B, kv_heads=8, ffn=14336, context=32768, window=4096)

QWEN2_7B = Config(
    vocab=152064,
    width=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18944,
    context=131072,
    norm_eps=1e-6,
    qkv_bias=True,
    rotary=Rotary(1e6),
)
QWEN2_05B = dataclasses.replace(
    QWEN2_7B,
    vocab=151936,
    width=896,
    layers=24,
    heads=14,
    kv_heads=2,
    head_dim=64,
    ffn=4864,
    tied=True,
)

QWEN3_8B = Config(
    vocab=151936,
    width=4096,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=12288,
    context=40960,
    norm_eps=1e-6,
    qk_norm="head",
    rotary=Rotary(1e6),
)
QWEN3_06B = dataclasses.replace(QWEN3_8B, width=1024, layers=28, heads=16, ffn=3072, tied=True)

OLMO_7B = dataclasses.replace(LLAMA2_7B, vocab=50304, context=2048, norm="layer")
OLMO_1B = dataclasses.replace(
    OLMO_7B, width=2048, layers=16, heads=16, kv_heads=16, ffn=8192, tied=True
)
OLMO2_7B = dataclasses.replace(
    LLAMA2_7B,
    vocab=100352,
    norm_eps=1e-6,
    norms="after",
    qk_norm="all",
    rotary=Rotary(5e5),
)

PRESETS = {
    "tiny": TINY,
    "llama2_7b": LLAMA2_7B,
    "llama2_13b": LLAMA2_13B,
    "llama_30b": LLAMA_30B,
    "llama3_8b": LLAMA3_8B,
    "llama3.1_8b": LLAMA31_8B,
    "mistral_7b": MISTRAL_7B,
    "qwen2_0.5b": QWEN2_05B,
    "qwen2_7b": QWEN2_7B,
    "qwen3_0.6b": QWEN3_06B,
    "qwen3_8b": QWEN3_8B,
    "olmo_1b": OLMO_1B,
    "olmo_7b": OLMO_7B,
    "olmo2_7b": OLMO2_7B,
}


def config_of(name: str | Config) -> Config:
    """The preset of this name, in any case; a Config passes through."""
    if isinstance(name, Config):
        return name
    try:
        return PRESETS[name.lower()]
    except (KeyError, AttributeError):
        raise UserError(
            f"There is no model {name!r}. Use one of {', '.join(PRESETS)}, or a coat.models.Config."
        ) from None
