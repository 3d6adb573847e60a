"""Llama 2 with 7 billion parameters.

    coat train llama2_7b --train 'tokens/*.npy'          COAT
    coat train llama2_7b:bf16 --train 'tokens/*.npy'     BF16, optax's AdamW
    coat train llama2_7b:one_gpu                         COAT: throughput on one GPU

Hyper-parameters of Touvron et al. 2023 (Llama 2, section 2.2): batches of 4 million tokens, AdamW
with b2 = 0.95 and eps = 1e-5, 2000 steps of warmup, a cosine down to a tenth, over 2 trillion
tokens. Unlike in that paper, parameters are BF16, rounded stochastically.

Made for 4 GPUs, with 2 sequences of a microbatch on each. The run on one GPU corresponds to the
first row of table 7 of the COAT paper: full-parameter training on sequences of 2048 tokens. It
measures throughput alone, so the built-in corpus suffices. Choose --global_batch_size by the GPU's
memory, and BF16 by --precision bf16 --optimizer.name adamw. docs/benchmarks.md has the figures.
"""

import dataclasses

from coat_jax import models
from coat_jax.training.config import EvaluationConfig, OptimizerConfig, TrainConfig
from coat_jax.training.data import DataConfig

TOKENS, WARMUP_STEPS = 2_000_000_000_000, 2000
BATCH, SEQUENCE = 1024, 4096


def config() -> TrainConfig:
    """In COAT."""
    model = dataclasses.replace(models.config_of("llama2_7b"), param_dtype="bfloat16")
    return TrainConfig(
        model=model,
        data=DataConfig(train=("tokens/*.npy",)),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=WARMUP_STEPS, eps=1e-5),
        evaluation=EvaluationConfig(every=1000),
        total_steps=TOKENS // (BATCH * SEQUENCE),
        global_batch_size=BATCH,
        sequence_length=SEQUENCE,
        gradient_accumulation_steps=128,
        out="out/llama2_7b",
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
        sequence_length=2048,
        gradient_accumulation_steps=1,
        out="out/llama2_7b_one_gpu",
    )
