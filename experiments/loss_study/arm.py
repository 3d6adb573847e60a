"""What a run is made of: an arm, a size of model, and settings.

An arm is a way to train: a precision, the storage of the moments, and the optimizer settings that
differ. A size is a model with sensible settings. Together they make the trainer's config and
optimizer.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp

from coat_jax import BF16, Precision, models
from coat_jax.errors import UserError
from coat_jax.optax import InPlaceOptimizer, fp8_adamw, in_place
from coat_jax.optax.rounding import RoundParams
from coat_jax.storage import Storage
from coat_jax.training.config import EvaluationConfig, OptimizerConfig, TrainConfig
from coat_jax.training.optimizer import decay_mask, learning_rate, make_optimizer
from experiments.loss_study import operands
from experiments.loss_study.muon import Muon, muon
from experiments.loss_study.saved import Saved
from experiments.study.study import setting

# How parameters in BF16 are rounded, by the names in results.
PARAMS: Mapping[str, RoundParams] = {
    "bf16": "nearest",
    "bf16_stochastic": "stochastic",
    "24_bits_stochastic": "24_bits",
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. The default is BF16 with optax's AdamW, its moments in FP32.

    Attributes:
        precision: of the model.
        moments: a `Storage` takes coat_jax's fused step, a `Muon` another optimizer; None is
            optax's AdamW.
        params: "fp32", or how parameters in BF16 are rounded. Those have gradients in BF16.
        optimizer: fields of `OptimizerConfig` to replace.
        rounded: the operands of products that are rounded to FP8 although the precision is BF16.
        products: the products whose operands these are.
        saved: what is rounded of the arrays that layers save although the precision is BF16.
        start: the precision of the first steps; None is that of all steps.
        start_share: the share of the run that these steps take.
        microbatches: how many times more microbatches a batch is divided into. More than one
            changes only the order in which gradients are summed.
        perturbed: whether each initial parameter moves by one unit in the last place.
        baseline: whether this arm differs from the default, or from that of its optimizer, by
            rounding only.
    """

    precision: Precision = BF16
    moments: Storage | Muon | None = None
    params: Literal["fp32", "bf16", "bf16_stochastic", "24_bits_stochastic"] = "fp32"
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rounded: tuple[operands.Name, ...] = ()
    products: tuple[operands.Product, ...] = operands.ALL
    saved: Saved | None = None
    start: Precision | None = None
    start_share: float = 0.25
    microbatches: int = 1
    perturbed: bool = False
    baseline: bool = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; runs are compared under equal settings."""

    steps: int = setting("steps of a run, a whole cosine")
    batch: int = setting("sequences of a step")
    sequence: int = setting("tokens of a sequence")
    accumulation: int = setting("microbatches of a batch")
    learning_rate: float = setting("the highest learning rate")
    held_out: int = setting("rows of held-out text that are evaluated at the end")

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not value > 0:
                raise UserError(f"--{name.replace('_', '-')} {value} must be above 0.")

    @property
    def rows(self) -> int:
        """Sequences of the whole run."""
        return self.steps * self.batch

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.rows * self.sequence


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the settings to train it with.

    Attributes:
        model: its vocabulary is learnt from the text; 256 stands for bytes.
        settings: unless the command line says otherwise.
        tokens_per_second: in BF16 on one H200, over all processes on it; for estimates.
    """

    model: models.Config
    settings: Settings
    tokens_per_second: float


def precisions_of(arm: Arm, steps: int) -> dict[int, Precision]:
    """Precisions by the step from which each applies, in order."""
    first = round(arm.start_share * steps)
    if arm.start is None or first == 0:
        return {0: arm.precision}
    return {0: arm.start, first: arm.precision}


def train_config(arm: Arm, size: Size, settings: Settings, seed: int) -> TrainConfig:
    """The trainer's config of a run, in the precision of its last step."""
    optimizer = OptimizerConfig(learning_rate=settings.learning_rate, warmup_steps=0.08, b2=0.95)
    param_dtype = jnp.float32
    if arm.params != "fp32":
        param_dtype, optimizer = jnp.bfloat16, replace(optimizer, round_params=PARAMS[arm.params])
    return TrainConfig(
        model=replace(size.model, precision=arm.precision, param_dtype=param_dtype),
        optimizer=replace(optimizer, name="adamw", **arm.optimizer),
        evaluation=EvaluationConfig(every=0),
        total_steps=settings.steps,
        global_batch_size=settings.batch,
        sequence_length=settings.sequence,
        gradient_accumulation_steps=settings.accumulation * arm.microbatches,
        seed=seed,
    )


def optimizer_of(arm: Arm, config: TrainConfig) -> InPlaceOptimizer:
    """The optimizer of a run. It does not depend on the seed: seeds share a compiled program."""
    if isinstance(arm.moments, Muon):
        return muon(config, arm.moments)
    if arm.moments is None:
        return make_optimizer(replace(config, seed=0))
    of_run = config.optimizer
    adamw = fp8_adamw(
        partial(learning_rate, of_run, config.total_steps),
        b1=of_run.b1,
        b2=of_run.b2,
        eps=of_run.eps,
        weight_decay=of_run.weight_decay,
        mask=partial(decay_mask, config),
        storage=arm.moments,
    )
    return in_place(adamw, round_params=of_run.round_params)
