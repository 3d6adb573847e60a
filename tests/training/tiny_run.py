"""A config for tests of the loop: a run of seconds, in COAT.

With SIGNALS="3:9" in its environment the process sends itself signal 9 when it has written the
record of step 3: how fast it is makes no difference.
"""

import os

from coat_jax import models
from coat_jax.training.config import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
)
from coat_jax.training.report.metrics import Metrics


def config() -> TrainConfig:
    if os.environ.get("SIGNALS"):
        send_itself(*map(int, os.environ["SIGNALS"].split(":")))
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
            scan=False,
            param_dtype="bfloat16",
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0.1),
        mesh=MeshConfig(data=1, fsdp=1, tensor=1),
        evaluation=EvaluationConfig(every=8, batches=2),
        checkpoint=CheckpointConfig(every=4, keep=4),
        total_steps=10,
        global_batch_size=8,
        sequence_length=32,
    )


def send_itself(step: int, number: int) -> None:
    """A signal, after the record of a step."""
    write = Metrics.write

    def write_and_send(metrics, record):
        write(metrics, record)
        if "loss" in record and record["step"] == step:
            os.kill(os.getpid(), number)

    Metrics.write = write_and_send
