"""OLMoE: a mixture of experts with 6.9 billion parameters, 1.3 billion of them active per token.

    coat train olmoe_7b --train 'tokens/*.npy'           COAT
    coat train olmoe_7b:bf16 --train 'tokens/*.npy'      BF16, optax's AdamW
    coat train olmoe_7b:one_gpu                          COAT: throughput on one GPU

Hyper-parameters of OLMoE-1B-7B-0924 (Muennighoff et al. 2024): batches of 4 million tokens, a
learning rate of 4e-4, 2500 steps of warmup, a cosine down to a tenth, over 5 trillion tokens, with
a balance loss of 0.01 and a z-loss of 0.001. Unlike there, parameters are BF16, rounded
stochastically.

Made for 4 GPUs, with 4 sequences of a microbatch on each.
"""

import dataclasses

from coat_jax import models
from coat_jax.training.config import EvaluationConfig, OptimizerConfig, TrainConfig
from coat_jax.training.data import DataConfig

TOKENS, WARMUP_STEPS = 5_000_000_000_000, 2500
BATCH, SEQUENCE = 1024, 4096


def config() -> TrainConfig:
    """In COAT."""
    model = dataclasses.replace(models.config_of("olmoe_7b"), param_dtype="bfloat16")
    return TrainConfig(
        model=model,
        data=DataConfig(train=("tokens/*.npy",)),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=WARMUP_STEPS),
        evaluation=EvaluationConfig(every=1000),
        total_steps=TOKENS // (BATCH * SEQUENCE),
        global_batch_size=BATCH,
        sequence_length=SEQUENCE,
        gradient_accumulation_steps=64,
        out="out/olmoe_7b",
    )


def one_gpu() -> TrainConfig:
    """Throughput of COAT on one GPU."""
    coat = config()
    return dataclasses.replace(
        coat,
        model=dataclasses.replace(coat.model, scan=False),
        data=DataConfig(),
        optimizer=dataclasses.replace(
            coat.optimizer, schedule="constant", warmup_steps=0, learning_rate=1e-5
        ),
        evaluation=EvaluationConfig(every=0),
        checkpoint=dataclasses.replace(coat.checkpoint, every=0),
        total_steps=30,
        global_batch_size=4,
        gradient_accumulation_steps=1,
        out="out/olmoe_7b_one_gpu",
    )
