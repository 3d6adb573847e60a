"""The first LLaMA, with 33 billion parameters.

    coat train llama_30b --train 'tokens/*.npy'          COAT
    coat train llama_30b:bf16 --train 'tokens/*.npy'     BF16, optax's AdamW

Hyper-parameters of Touvron et al. 2023 (LLaMA, table 2 and section 2.3): batches of 4 million
tokens, a learning rate of 1.5e-4, AdamW with b2 = 0.95, 2000 steps of warmup, a cosine down to a
tenth, over 1.4 trillion tokens. Unlike in that paper, parameters are BF16, rounded stochastically.

Made for 4 H200s, with 2 sequences of a microbatch on each; docs/benchmarks.md lists the memory. In
BF16 it does not fit them.
"""

import dataclasses

from coat_jax import models
from coat_jax.training.config import EvaluationConfig, OptimizerConfig, TrainConfig
from coat_jax.training.data import DataConfig

TOKENS, WARMUP_STEPS = 1_400_000_000_000, 2000
BATCH, SEQUENCE = 2048, 2048


def config() -> TrainConfig:
    """In COAT."""
    model = dataclasses.replace(models.config_of("llama_30b"), param_dtype="bfloat16")
    return TrainConfig(
        model=model,
        data=DataConfig(train=("tokens/*.npy",)),
        optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=WARMUP_STEPS),
        evaluation=EvaluationConfig(every=1000),
        total_steps=TOKENS // (BATCH * SEQUENCE),
        global_batch_size=BATCH,
        sequence_length=SEQUENCE,
        gradient_accumulation_steps=256,
        out="out/llama_30b",
    )
