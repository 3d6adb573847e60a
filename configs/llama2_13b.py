"""Llama 2 with 13 billion parameters.

    coat train llama2_13b --train 'tokens/*.npy'         COAT
    coat train llama2_13b:bf16 --train 'tokens/*.npy'    BF16, optax's AdamW

Hyper-parameters as in llama2_7b.py: Touvron et al. 2023 (Llama 2) train both alike. Parameters are
BF16, rounded stochastically.

Parameters and moments are sharded over all GPUs. A microbatch is 8 sequences: 2 on each of 4 GPUs.
It takes 61.8 GB of each GPU in COAT and 94.7 in BF16 (XLA's account of the step,
experiments/memory.py).
"""

import dataclasses

from coat_jax import models
from coat_jax.training.config import TrainConfig
from coat_jax.training.config_files import load_config


def config() -> TrainConfig:
    """In COAT."""
    model = dataclasses.replace(models.config_of("llama2_13b"), param_dtype="bfloat16")
    return dataclasses.replace(load_config("llama2_7b"), model=model, out="out/llama2_13b")
