"""A config for tests of the loop: a run of seconds, in COAT."""

from coat_jax import models
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)


def config() -> TrainConfig:
    return TrainConfig(
        model=models.Config(
            vocab=256,
            width=64,
            layers=1,
            heads=4,
            kv_heads=2,
            head_dim=16,
            ffn=128,
            context=64,
            param_dtype="bfloat16",
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0.1),
        mesh=MeshConfig(data=1, fsdp=1, tensor=1),
        evaluation=EvaluationConfig(every=20, batches=2),
        checkpoint=CheckpointConfig(every=10, keep=4),
        total_steps=40,
        global_batch_size=8,
        sequence_length=64,
    )
