"""The config of a whole run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax.numpy as jnp

from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import ModelConfig
from coat_jax.nn import MeshAxes
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.precision import BF16, precision_of
from coat_jax.training.config.optimizer import (
    OptimizerConfig,
    StepsOrShare,
    count_steps,
    function_name,
    is_optimizer,
)
from coat_jax.training.config.parts import (
    CheckpointConfig,
    EvaluationConfig,
    MeshConfig,
    TelemetryConfig,
)
from coat_jax.training.data import DataConfig
from coat_jax.training.families import family_of, name_of
from coat_jax.validation import Count, Seed, brief, require_fields

WriterName = Literal["tensorboard", "wandb"]
Metric: TypeAlias = Callable[[Any], Any]
# The names of the trainer's own metrics.
LOGGED = {"step", "tokens", "seconds", "loss", "learning_rate", "gradient_norm", "labels"}
LOGGED |= {"skipped", "tokens_per_second", "mfu", "memory", "held_out_loss", "perplexity"}

AXES = MeshAxes("fsdp", "tensor", "expert")
BATCH_AXES = ("data", "fsdp", "expert")
CACHE = "~/.cache/coat_jax/xla"


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
        max_skipped_steps: how many steps in a row may be skipped, because their loss or gradients
            are not finite, before the run ends with code 4.
        out: the folder of the run: checkpoints, metrics, its config.
        resume: whether to continue a run that is in the folder. If not, the folder of that run is
            renamed.
        init_from: the folder of a Hugging Face model or of another run, from whose parameters this
            run begins.
        log_every: steps between records of the metrics.
        frozen: globs of parameters that do not change, as in "*.attention.*": they have
            neither gradients nor moments.
        metrics: more quantities to log, by name: functions of a `step.FinishedStep`, which has
            parameters, gradients and moments; only in a config file.
        writers: where metrics are written besides metrics.jsonl: "tensorboard", "wandb".
        cache: the folder of JAX's compilation cache, unless JAX_COMPILATION_CACHE_DIR names
            another; None for none.
    """

    model: ModelConfig
    data: Any = DataConfig()
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
    max_skipped_steps: Count = 100
    out: str = "out/run"
    resume: bool = True
    init_from: str | None = None
    log_every: Count = 1
    frozen: tuple[str, ...] = ()
    metrics: Mapping[str, Metric] = dataclasses.field(default_factory=dict, hash=False)
    writers: tuple[WriterName, ...] = ()
    cache: str | None = CACHE

    def __post_init__(self) -> None:
        given: Any = self.optimizer
        if is_optimizer(given):
            object.__setattr__(self, "optimizer", OptimizerConfig(transformation=given))
        data = family_of(self.model).data
        if not isinstance(self.data, data):
            raise UserError(f"data={brief(self.data)} must be a {data.__name__}.")
        require_fields(self)
        for part in ("mesh", "evaluation", "checkpoint", "telemetry"):
            require_fields(getattr(self, part), f"{part}.")
        self.optimizer.require_fitting(self.total_steps)
        context = getattr(self.model, "context", self.sequence_length)
        if self.sequence_length > context:
            raise UserError(
                f"sequence_length={self.sequence_length} is longer than model.context={context}. "
                "Lower the one or raise the other."
            )
        if self.global_batch_size % self.gradient_accumulation_steps:
            raise UserError(
                f"global_batch_size={self.global_batch_size} cannot be divided into "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} equal "
                "microbatches. Make it a multiple."
            )
        dtype = jnp.dtype(self.model.param_dtype)
        if self.optimizer.round_params == "24_bits" and dtype != jnp.bfloat16:
            raise UserError(
                'optimizer.round_params="24_bits" is for BF16 parameters, and model.param_dtype='
                f"{dtype.name}. Set --param_dtype bfloat16, or leave round_params out."
            )
        if self.optimizer.release_gradients:
            self._require_releasable()
        for name, measure in self.metrics.items():
            named = isinstance(name, str) and name not in LOGGED and "/" not in name
            if not named or not callable(measure) or isinstance(measure, type):
                raise UserError(
                    f"metrics={{{name!r}: {brief(measure)}}} must be a function of a step, under a "
                    "name without a slash that the trainer does not log itself."
                )
        for name in ("out", "init_from", "cache"):
            if getattr(self, name) == "":
                raise UserError(f"{name}='' names no folder.")
        object.__setattr__(self, "out", str(expand_user(self.out)))
        if self.init_from is not None:
            object.__setattr__(self, "init_from", str(expand_user(self.init_from)))

    def _require_releasable(self) -> None:
        """Raises where something needs the gradients that the backward pass frees."""
        module = family_of(self.model).module
        if not hasattr(module, "stages"):
            raise UserError(
                "optimizer.release_gradients=True needs a model that its backward pass divides, "
                f"and a {module.__name__} has no method `stages`: leave release_gradients out."
            )
        if getattr(self.model, "experts", None) is not None:
            raise UserError(
                "optimizer.release_gradients=True is for models without experts, whose penalties "
                "depend on all layers: leave release_gradients out."
            )
        users = {
            "gradient_accumulation_steps": self.gradient_accumulation_steps > 1,
            "model.scan": self.model.scan,
            "metrics": self.metrics,
            "telemetry.every": self.telemetry.every,
            "frozen": self.frozen,
        }
        if names := [name for name, uses in users.items() if uses]:
            raise UserError(
                "optimizer.release_gradients=True keeps no gradients, and those of all layers are "
                f"needed for {', '.join(names)}: leave out the one or the other."
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
        return min(count_steps(self.bf16_steps, self.total_steps), self.total_steps)

    @property
    def bf16_phase(self) -> "TrainConfig":
        """The config of the first steps in BF16, if `bf16_steps` asks for any."""
        # If the inputs of layers are saved in FP8, their rounding does not change.
        stochastic = precision_of(self.model.precision).stochastic
        precision = dataclasses.replace(BF16, stochastic=stochastic)
        remat = self.model.remat or "layer"
        model = dataclasses.replace(self.model.in_precision(precision), remat=remat)
        return dataclasses.replace(self, model=model)

    @property
    def model_on_mesh(self) -> Any:
        """The model, its parameters and its batch sharded along the axes of `mesh`."""
        return dataclasses.replace(self.model, axes=AXES, batch_axes=BATCH_AXES)


def in_bf16(config: TrainConfig) -> TrainConfig:
    """Returns the run in BF16 with optax's AdamW, in another folder: the baseline of COAT."""
    return dataclasses.replace(
        config,
        model=config.model.in_precision("bf16"),
        optimizer=dataclasses.replace(
            config.optimizer, name="adamw", moments="directions", transformation=None
        ),
        out=f"{config.out}_bf16",
    )


def to_json(value: Any) -> Any:
    """Returns a config, or a part of one, in JSON's types; that of a model names its family."""
    if isinstance(value, TrainConfig):
        return _to_json(value) | {"model": to_json(value.model)}
    family = {"family": name_of(value)} if isinstance(value, ModelConfig) else {}
    return family | _to_json(value) if family else _to_json(value)


def _to_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, Minifloat):
        fields = dataclasses.fields(value)
        return {field.name: _to_json(getattr(value, field.name)) for field in fields}
    if isinstance(value, Mapping):  # functions by name
        return {name: function_name(item) for name, item in value.items()}
    if is_optimizer(value):
        return function_name(value)
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return value.name if isinstance(value, Minifloat) else jnp.dtype(value).name
