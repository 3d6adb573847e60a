"""Llama 2 with 13 billion parameters.

    coat train llama2_13b --train 'tokens/*.npy'         COAT
    coat train llama2_13b:bf16 --train 'tokens/*.npy'    BF16, optax's AdamW

Hyper-parameters as in llama2_7b.py: Touvron et al. 2023 (Llama 2) train both alike. Parameters are
BF16, rounded stochastically.

Made for 4 GPUs, with 2 sequences of a microbatch on each; docs/benchmarks.md lists the memory.
"""

import dataclasses

from coat_jax import models
from coat_jax.training.config import TrainConfig
from coat_jax.training.config_files import load_config


def config() -> TrainConfig:
    """In COAT."""
    model = dataclasses.replace(models.config_of("llama2_13b"), param_dtype="bfloat16")
    return dataclasses.replace(load_config("llama2_7b"), model=model, out="out/llama2_13b")
