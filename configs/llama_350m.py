"""Llama of 360 million parameters: the size of the second GPT-2, with its vocabulary.

    coat train llama_350m --train 'tokens/*.npy'          COAT
    coat train llama_350m:bf16 --train 'tokens/*.npy'     BF16, optax's AdamW

Hyper-parameters as in llama_124m.py, but half the learning rate, as in GPT-3 with 350 million
parameters. Parameters are FP32.

Made for one GPU; docs/benchmarks.md lists the memory that it takes.
"""

import dataclasses
from typing import Any

from coat_jax.training.config import TrainConfig
from coat_jax.training.config_files import load_config


def config() -> TrainConfig:
    """In COAT."""
    small = load_config("llama_124m")
    shape: dict[str, Any] = {"width": 1024, "layers": 24, "heads": 16, "kv_heads": 16, "ffn": 2816}
    return dataclasses.replace(
        small,
        model=dataclasses.replace(small.model, **shape),
        optimizer=dataclasses.replace(small.optimizer, learning_rate=3e-4),
        gradient_accumulation_steps=16,
        out="out/llama_350m",
    )
