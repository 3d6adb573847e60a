"""Llama 2 with 13 billion parameters.

    coat train llama2_13b --train 'tokens/*.npy'         COAT
    coat train llama2_13b:bf16 --train 'tokens/*.npy'    BF16, optax's AdamW

Hyper-parameters as in llama2_7b.py: Touvron et al. 2023 (Llama 2) train both alike. Parameters are
BF16, rounded stochastically.

Parameters and moments are sharded over all GPUs. A microbatch is 8 sequences: 2 on each of 4 GPUs.
It takes 61.8 GB of each GPU in COAT and 94.7 in BF16 (XLA's account of the step,
experiments/config_memory.py).
"""

import dataclasses

from coat_jax import models
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
    in_bf16,
)
from coat_jax.training.data import DataConfig

TOKENS, WARMUP_STEPS = 2_000_000_000_000, 2000
BATCH, SEQUENCE = 1024, 4096
STEPS = TOKENS // (BATCH * SEQUENCE)


def config() -> TrainConfig:
    """In COAT."""
    model = dataclasses.replace(models.config_of("llama2_13b"), param_dtype="bfloat16")
    return TrainConfig(
        model=model,
        data=DataConfig(train=("tokens/*.npy",)),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=WARMUP_STEPS, eps=1e-5),
        evaluation=EvaluationConfig(every=1000),
        checkpoint=CheckpointConfig(every=1000),
        total_steps=STEPS,
        global_batch_size=BATCH,
        sequence_length=SEQUENCE,
        gradient_accumulation_steps=128,
        out="out/llama2_13b",
    )


def bf16() -> TrainConfig:
    """In BF16, with optax's AdamW."""
    return in_bf16(config())
