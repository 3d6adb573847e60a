"""What a run of `loss_study` is made of: an arm, a model size, and the settings of the run.

An arm is a way to train: a precision, the storage of the moments, and the optimizer settings that
differ. A size is a model with sensible settings. Together they make the trainer's config and
optimizer.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import jax.numpy as jnp

from coat_jax import BF16, Precision, models
from coat_jax.optax import FusedOptimizer, fused_fp8_adamw
from coat_jax.precision import PRESETS
from coat_jax.storage import Storage
from coat_jax.training.config import EvaluationConfig, OptimizerConfig, TrainConfig
from coat_jax.training.optimizer import decayed, make_optimizer
from coat_jax.training.schedule import learning_rate
from experiments.loss_study import operands, sums
from experiments.loss_study.moments import Separately, adamw
from experiments.loss_study.muon import Muon, muon

# How parameters are stored and rounded: fields of `OptimizerConfig` for those in BF16.
PARAMS: Mapping[str, Mapping[str, bool]] = {
    "fp32": {},
    "bf16": {"round_stochastically": False},
    "bf16_stochastic": {"round_stochastically": True},
    "24_bits": {"round_stochastically": False, "correct_params": True},
    "24_bits_stochastic": {"round_stochastically": True, "correct_params": True},
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. The default is BF16 with optax's AdamW, its moments in FP32.

    Attributes:
        precision: of the model.
        moments: a `Storage` takes coat_jax's fused step, a `Separately` a format for each
            moment, a `Muon` another optimizer; None is optax's AdamW.
        params: in FP32, in BF16, or in BF16 with corrections, rounded to nearest or stochastically.
            BF16 parameters have gradients in BF16.
        optimizer: fields of `OptimizerConfig` to replace.
        rounded: the operands of products that are rounded to FP8 although the precision is BF16.
        accurate: the FP8 products that are summed in FP32.
        start: the precision of the first steps; None is that of all steps.
        start_share: the share of the run that these steps take.
        microbatches: how many times more microbatches a batch is divided into. More than one
            changes only the order in which gradients are summed.
        perturbed: whether each initial parameter moves by one unit in the last place.
        shaken: the number of the random change, by 1 %, of the initial parameters; 0 is none. Such
            runs are equally good, and end as far apart as chance makes them.
        baseline: whether this arm differs from the default, or from that of its optimizer, by
            rounding only.
    """

    precision: Precision = BF16
    moments: Storage | Separately | Muon | None = None
    params: Literal["fp32", "bf16", "bf16_stochastic", "24_bits", "24_bits_stochastic"] = "fp32"
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rounded: tuple[operands.Name, ...] = ()
    accurate: tuple[sums.Name, ...] = ()
    start: Precision | None = None
    start_share: float = 0.25
    microbatches: int = 1
    perturbed: bool = False
    shaken: int = 0
    baseline: bool = False


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line's settings of a run; runs are compared under equal settings.

    Attributes:
        steps: of the run, a whole cosine.
        batch: sequences of a step.
        sequence: tokens of a sequence.
        accumulation: microbatches of a batch.
        learning_rate: the highest.
        held_out: rows of held-out text that are evaluated at the end.
    """

    steps: int
    batch: int
    sequence: int
    accumulation: int
    learning_rate: float
    held_out: int

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
    param_dtype = jnp.float32 if arm.params == "fp32" else jnp.bfloat16
    return TrainConfig(
        model=dataclasses.replace(size.model, precision=arm.precision, param_dtype=param_dtype),
        optimizer=dataclasses.replace(
            optimizer, name="adamw", **PARAMS[arm.params], **arm.optimizer
        ),
        evaluation=EvaluationConfig(every=0),
        total_steps=settings.steps,
        global_batch_size=settings.batch,
        sequence_length=settings.sequence,
        gradient_accumulation_steps=settings.accumulation * arm.microbatches,
        seed=seed,
    )


def optimizer_of(arm: Arm, config: TrainConfig) -> FusedOptimizer:
    """The optimizer of a run. It does not depend on the seed: seeds share a compiled program."""
    if isinstance(arm.moments, Separately):
        if arm.params != "fp32":
            raise ValueError(f"Arm.params={arm.params!r}: separate moments need FP32 parameters.")
        return adamw(config, arm.moments)
    if isinstance(arm.moments, Muon):
        return muon(config, arm.moments)
    if arm.moments is None:
        return make_optimizer(dataclasses.replace(config, seed=0))
    of_run = config.optimizer
    return fused_fp8_adamw(
        partial(learning_rate, of_run, config.total_steps),
        b1=of_run.b1,
        b2=of_run.b2,
        eps=of_run.eps,
        weight_decay=of_run.weight_decay,
        mask=partial(decayed, config),
        round_params=of_run.round_stochastically,
        correct_params=of_run.correct_params,
        storage=arm.moments,
    )


def described(arm: Arm) -> dict[str, Any]:
    """An arm as JSON: every field with its value, so that a changed default is another arm."""
    return dict(json.loads(json.dumps(_plain(arm))))


def is_described(arm: Arm, by: Mapping[str, Any]) -> bool:
    """Whether a description, perhaps from a version where `Arm` had fewer fields, is this arm's."""
    now, default = described(arm), described(Arm())
    return by == {name: now[name] for name in by if name in now} and all(
        now[name] == default[name] for name in now if name not in by
    )


def differences(arm: Arm) -> str:
    """A description of what an arm changes."""
    default = Arm()
    changed = [
        f"{field.name}={_shown(getattr(arm, field.name))}"
        for field in dataclasses.fields(arm)
        if field.name != "baseline" and getattr(arm, field.name) != getattr(default, field.name)
    ]
    return ", ".join(changed) or "BF16, optax's AdamW"


def _shown(value: Any) -> str:
    """A dataclass by the fields that are not its own defaults."""
    preset = next((name for name, known in PRESETS.items() if known == value), None)
    if preset is not None:
        return preset.upper()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(_plain(value))
    fields = [
        f"{field.name}={_shown(getattr(value, field.name))}"
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(fields)})"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": type(value).__name__} | fields
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return getattr(value, "__name__", None) or str(value)
