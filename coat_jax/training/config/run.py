"""The config of a whole run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import jax.numpy as jnp

from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.files import expanded
from coat_jax.limits import INT32_MAX, Between, Count, Seed, require_fields, shown
from coat_jax.nn import MeshAxes
from coat_jax.precision import BF16, precision_of
from coat_jax.training import compilation_cache
from coat_jax.training.config.optimizer import (
    OptimizerConfig,
    StepsOrShare,
    in_steps,
    is_optimizer,
)
from coat_jax.training.config.parts import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    TelemetryConfig,
)
from coat_jax.training.data import DataConfig

WriterName = Literal["tensorboard", "wandb"]
Metric: TypeAlias = Callable[[Any], Any]
# The names of the trainer's own metrics.
LOGGED = {"step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm", "labels"}
LOGGED |= {"skipped", "tokens_per_second", "mfu", "memory", "held_out_loss", "perplexity"}

AXES = MeshAxes("fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The config of a run.

    Attributes:
        model: what is trained.
        data: what it is trained on.
        optimizer: how it is trained. In a config file, an optax transformation, or a function from
            the learning rate's schedule to one, may stand for OptimizerConfig(transformation=...).
        mesh: how devices share the work.
        evaluation: when the loss on held-out data is measured.
        checkpoint: when the run is saved.
        telemetry: what is recorded of tensors in FP8.
        total_steps: how many times the parameters are updated.
        bf16_steps: how many of the first steps are in BF16; a number with a decimal point is a
            share of the run. In a run from random parameters, rounding costs most in the first
            steps. The BF16 steps recompute each layer in the backward pass, so they need less
            memory than the steps after them, but more time. With `remat="layer_fp8"` they save the
            layers' inputs in FP8, as the steps after them do.
        global_batch_size: the number of sequences in a step, over all devices.
        sequence_length: the number of tokens in a sequence.
        gradient_accumulation_steps: the number of microbatches in a step. They are computed one
            after the other, so that memory holds the activations of one; gradients are then summed
            in FP32.
        seed: the seed of the initial parameters, the order of the data, and rounding.
        z_loss: the weight of the squared log-sum-exp of the logits, a part of the loss which keeps
            logits from drifting.
        max_skipped_steps: how many steps in a row may be skipped, because their loss or gradients
            are not finite, before the run ends with code 4.
        out: the folder of the run: checkpoints, metrics, its config.
        resume: whether to continue a run that is in the folder. If not, the folder of that run is
            renamed.
        init_from: the folder of a Hugging Face model or of another run, from whose parameters this
            run begins.
        log_every: steps between records of the metrics.
        metrics: more quantities to log, by name: functions of a `step.FinishedStep`, which has
            parameters, gradients and moments; only in a config file.
        writers: where metrics are written besides metrics.jsonl: "tensorboard", "wandb".
        cache: the folder of JAX's compilation cache; None for none.
    """

    model: models.Config
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    total_steps: Count
    bf16_steps: StepsOrShare = 0
    global_batch_size: Count
    sequence_length: Count
    gradient_accumulation_steps: Count = 1
    seed: Seed = 0
    z_loss: Annotated[float, Between(least=0, most=1)] = 0.0
    max_skipped_steps: Count = 100
    out: str = "out/run"
    resume: bool = True
    init_from: str | None = None
    log_every: Count = 1
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict, hash=False)
    writers: tuple[WriterName, ...] = ()
    cache: str | None = compilation_cache.FOLDER

    def __post_init__(self) -> None:
        given: Any = self.optimizer
        if is_optimizer(given):
            object.__setattr__(self, "optimizer", OptimizerConfig(transformation=given))
        self._require_parts()
        require_fields(self)
        self.optimizer.require_fitting(self.total_steps)
        if self.steps_in_bf16 > self.total_steps:
            raise UserError(
                f"bf16_steps={self.bf16_steps} is more than total_steps={self.total_steps}. Lower "
                "it, or give a share of the run with a decimal point, as in 0.05."
            )
        self._require_batch()
        param_dtype = jnp.dtype(self.model.param_dtype)
        if self.optimizer.correct_params and param_dtype != jnp.bfloat16:
            raise UserError(
                f"optimizer.correct_params=True corrects parameters in BF16, and model.param_dtype="
                f"{param_dtype.name}. Set --param_dtype bfloat16, or leave correct_params out."
            )
        if (self.model.axes, self.model.batch_axes) != (MeshAxes(), ()):
            raise UserError(
                "model.axes and model.batch_axes are set from `mesh`: leave them at their defaults."
            )
        if self.optimizer.release_gradients:
            self._require_releasable()
        self._require_metrics()
        if len(set(self.writers)) < len(self.writers):
            raise UserError(f"writers={self.writers} names a writer twice: name each once.")
        for name in ("out", "init_from", "cache"):
            path = getattr(self, name)
            if path == "":
                raise UserError(f"{name}={path!r} names no folder.")
            if path is not None and name != "cache":
                object.__setattr__(self, name, str(expanded(path)))

    def _require_parts(self) -> None:
        """Raises where a name stands for the model or the optimizer."""
        if isinstance(self.model, str):
            raise UserError(
                f"model={shown(self.model)} must be a models.Config. Published ones have names: "
                "models.config_of('llama2_7b')."
            )
        if isinstance(self.optimizer, str):
            raise UserError(
                f"optimizer={shown(self.optimizer)} must be an OptimizerConfig, as in "
                "OptimizerConfig(name='adamw'), or an optax transformation, as in "
                "optax.lion(1e-4)."
            )

    def _require_batch(self) -> None:
        """Raises unless there can be batches of these sizes."""
        if self.sequence_length > self.model.context:
            raise UserError(
                f"sequence_length={self.sequence_length} is longer than model.context="
                f"{self.model.context}. Lower the one or raise the other."
            )
        if self.global_batch_size % self.gradient_accumulation_steps:
            raise UserError(
                f"global_batch_size={self.global_batch_size} cannot be divided into "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} equal "
                "microbatches. Make it a multiple."
            )
        if self.tokens_per_step > INT32_MAX:
            raise UserError(
                f"global_batch_size={self.global_batch_size} times sequence_length="
                f"{self.sequence_length} is more than the {INT32_MAX:,} tokens that a step can "
                "count. Lower one."
            )

    def _require_metrics(self) -> None:
        """Raises unless metrics are functions, under names that the trainer does not use."""
        for name, measure in self.metrics.items():
            if not isinstance(name, str) or not callable(measure) or isinstance(measure, type):
                raise UserError(
                    f"metrics={{{name!r}: {shown(measure)}}} must be a function of a step, as in "
                    "{'weight_norm': lambda step: coat.optax.global_norm(step.params)}."
                )
            if name in LOGGED or "/" in name:
                raise UserError(
                    f"metrics has {name!r}, which the trainer uses itself, like every name with a "
                    "slash: choose another."
                )

    def _require_releasable(self) -> None:
        """Raises where something needs the gradients that the backward pass frees."""
        obstacles = {
            f"gradient_accumulation_steps={self.gradient_accumulation_steps} sums all gradients: "
            "make it 1": self.gradient_accumulation_steps > 1,
            "model.scan=True computes the gradients of all layers as one array: set model.scan to "
            "False": self.model.scan,
            "optimizer.transformation may need all gradients at once: take a named optimizer, "
            "fp8_adamw or adamw": self.optimizer.transformation is not None,
            "metrics are functions of all gradients: leave them out": bool(self.metrics),
            f"telemetry.every={self.telemetry.every} records all gradients: make it 0": (
                self.telemetry.every > 0
            ),
        }
        for obstacle, stands in obstacles.items():
            if stands:
                raise UserError(
                    f"optimizer.release_gradients=True keeps no gradients, and {obstacle}."
                )

    @property
    def microbatch(self) -> int:
        """Sequences in a microbatch, over all devices."""
        return self.global_batch_size // self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch, with labels or without."""
        return self.global_batch_size * self.sequence_length

    @property
    def steps_in_bf16(self) -> int:
        """How many of the first steps are in BF16."""
        return in_steps(self.bf16_steps, self.total_steps)

    @property
    def at_start(self) -> "TrainConfig":
        """The config of the first steps in BF16, if `bf16_steps` asks for any."""
        # If the inputs of layers are saved in FP8, their rounding does not change.
        stochastic = precision_of(self.model.precision).stochastic
        precision = dataclasses.replace(BF16, stochastic=stochastic)
        remat = self.model.remat or "layer"
        model = dataclasses.replace(self.model, precision=precision, remat=remat)
        return dataclasses.replace(self, model=model)

    @property
    def model_on_mesh(self) -> models.Config:
        """The model, its parameters and its batch sharded along the axes of `mesh`."""
        return dataclasses.replace(self.model, axes=AXES, batch_axes=BATCH_AXES)


def in_bf16(config: TrainConfig) -> TrainConfig:
    """The same run in BF16 with optax's AdamW, in another folder: what COAT is compared with."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, precision="bf16"),
        optimizer=dataclasses.replace(config.optimizer, name="adamw", transformation=None),
        out=f"{config.out}_bf16",
    )
