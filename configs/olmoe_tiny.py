"""OLMoE of 1.8 million parameters over bytes, 0.6 million of them active per token.

A mixture of experts that trains on a laptop in minutes, on the source of Python's standard library;
its losses are not for comparison. The log has `aux_loss`, 2 where the loads of experts are even,
and `load_imbalance`, how many times its even share the busiest expert has.

    coat train olmoe_tiny            COAT: FP8 layers, moments in 8 bits
    coat train olmoe_tiny:bf16       BF16 layers, optax's AdamW with FP32 moments
    coat train olmoe_tiny:biases     loads kept even by biases of the routers, without a penalty

Parameters and learning rate are as in llama_tiny.
"""

import dataclasses

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
        model=models.config_of("olmoe_tiny"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0.1),
        evaluation=EvaluationConfig(every=100),
        checkpoint=CheckpointConfig(every=100),
        total_steps=300,
        global_batch_size=8,
        sequence_length=128,
        out="out/olmoe_tiny",
    )


def biases() -> TrainConfig:
    """As DeepSeek-V3: scores are sigmoids, and biases follow the loads."""
    run = config()
    experts = models.Experts(count=8, chosen=2, scores="sigmoid", bias_rate=0.01)
    model = dataclasses.replace(run.model, experts=experts)
    return dataclasses.replace(run, model=model, out="out/olmoe_tiny_biases")
