"""What a training run is: one frozen dataclass, which a config file returns.

    config = TrainConfig(
        model=models.config_of("tiny"), total_steps=300, global_batch_size=8, sequence_length=256
    )
    config = dataclasses.replace(config, seed=1)

A config is checked when it is constructed, before any work is lost; `cluster.mesh` checks what
depends on the machine. `coat train --help-all` prints the sentences of the docstrings.
"""

from coat_jax.training.config.optimizer import OptimizerConfig as OptimizerConfig
from coat_jax.training.config.parts import CheckpointConfig as CheckpointConfig
from coat_jax.training.config.parts import EvaluationConfig as EvaluationConfig
from coat_jax.training.config.parts import MeshConfig as MeshConfig
from coat_jax.training.config.parts import TelemetryConfig as TelemetryConfig
from coat_jax.training.config.run import TrainConfig as TrainConfig
from coat_jax.training.config.run import in_bf16 as in_bf16
from coat_jax.training.config.run import to_json as to_json
