"""Llama of 0.9 million parameters over bytes, on the source of Python's standard library.

This shows that everything works on a laptop in minutes; its losses are not for comparison. A CPU
has no FP8 products, so FP8 saves memory on it, but no time.

    coat train llama_tiny            COAT: FP8 layers, moments in 8 bits
    coat train llama_tiny:bf16       BF16 layers, optax's AdamW with FP32 moments

Parameters are FP32, because the model is small and learns quickly. The learning rate suits small
models; there is no published one for this size.
"""

from coat_jax import models
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> TrainConfig:
    """In COAT."""
    return TrainConfig(
        model=models.config_of("tiny"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0.1),
        evaluation=EvaluationConfig(every=100),
        checkpoint=CheckpointConfig(every=100),
        total_steps=300,
        global_batch_size=8,
        sequence_length=128,
        out="out/llama_tiny",
    )
