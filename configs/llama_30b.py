"""The first LLaMA, with 33 billion parameters.

    coat train llama_30b --train 'tokens/*.npy'          COAT
    coat train llama_30b:bf16 --train 'tokens/*.npy'     BF16, optax's AdamW

Hyper-parameters of Touvron et al. 2023 (LLaMA, table 2 and section 2.3): batches of 4 million
tokens, a learning rate of 1.5e-4, AdamW with b2 = 0.95, 2000 steps of warmup, a cosine down to a
tenth, over 1.4 trillion tokens. Unlike in that paper, parameters are BF16, rounded stochastically.

Parameters and moments are sharded over all GPUs. A microbatch is 8 sequences: 2 on each of 4 GPUs.
It takes 109.7 GB of each GPU in COAT and 174.4 in BF16 (XLA's account of the step,
experiments/memory.py): it needs H200s, and fits them in COAT alone.
"""

import dataclasses

from coat_jax import models
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)
from coat_jax.training.data import DataConfig

TOKENS, WARMUP_STEPS = 1_400_000_000_000, 2000
BATCH, SEQUENCE = 2048, 2048
STEPS = TOKENS // (BATCH * SEQUENCE)


def config() -> TrainConfig:
    """In COAT."""
    model = dataclasses.replace(models.config_of("llama_30b"), param_dtype="bfloat16")
    return TrainConfig(
        model=model,
        data=DataConfig(train=("tokens/*.npy",)),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=WARMUP_STEPS),
        evaluation=EvaluationConfig(every=1000),
        checkpoint=CheckpointConfig(every=1000),
        total_steps=STEPS,
        global_batch_size=BATCH,
        sequence_length=SEQUENCE,
        gradient_accumulation_steps=256,
        out="out/llama_30b",
    )
