"""What a grid of `stability` is made of: an arm, a size of model, and settings.

An arm is a way to train, without learning rate and seed. Every format runs through XLA, because
Triton kernels have no rule for `vmap`: `in_xla` gives E4M3 and E5M2 another bias, which scales
compensate, so that they are simulated like all other formats. Their values are the same.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from coat_jax import BF16, Precision, models
from coat_jax.errors import UserError
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.minifloat import Minifloat
from coat_jax.precision import PRESETS
from coat_jax.storage import Storage

# The same values, shifted by a power of two.
IN_XLA = {E4M3: "E4M3:bias=8", E5M2: "E5M2:bias=16"}
REPORTS = 10  # parts of a run, after each of which its progress is known


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. The default is BF16 with FP32 parameters and moments.

    Attributes:
        precision: of the layers.
        scaled: whether operands have scales. Without them, what is above the largest value of a
            format saturates, and what is below half the smallest becomes zero.
        head: whether the product with the head is rounded as the layers' are.
        params: in FP32; or in BF16, rounded to nearest or stochastically after each step.
        moments: how Adam's moments are stored in 8 bits; None leaves them in FP32.
    """

    precision: Precision = BF16
    scaled: bool = True
    head: bool = False
    params: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    moments: Storage | None = None

    def __post_init__(self) -> None:
        rounds_blocks = self.precision.block or self.precision.attention_block
        if not self.scaled and (rounds_blocks or not self.precision.fp8_linear):
            raise UserError(
                "scaled=False leaves out the scales of products, so the precision must round "
                "these and save nothing in blocks: use coat.Precision(block=None)."
            )
        if self.head and not self.precision.fp8_linear:
            raise UserError("head=True rounds as the layers do, and these are not rounded.")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How each run of a grid is trained; runs are compared under equal settings.

    Attributes:
        steps: of a run.
        batch: sequences of a step.
        sequence: bytes of a sequence.
        warmup: share of the steps over which the learning rate rises; then half a cosine.
        final_ratio: the learning rate to which it falls, divided by the highest; 1 is constant.
        clip_norm: of gradients.
        weight_decay: of matrices.
        every: one of so many steps is drawn, and used to predict divergence.
    """

    steps: int
    batch: int
    sequence: int
    warmup: float = 0.1
    final_ratio: float = 0.0
    clip_norm: float = 1.0
    weight_decay: float = 0.1
    every: int = 5

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "sequence", "every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("warmup", "final_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} must be from 0 to 1.")
        if self.steps % (REPORTS * self.every):
            raise UserError(
                f"steps={self.steps} must be a multiple of {REPORTS * self.every}: runs report "
                f"{REPORTS} times, and one in {self.every} of their steps is drawn."
            )

    @property
    def title(self) -> str:
        """What distinguishes these settings, for tables and pictures."""
        title = f"{self.steps} steps of {self.batch} x {self.sequence} bytes"
        if self.final_ratio:
            share = f"down to {self.final_ratio:g} of the highest"
            title += f", learning rate {'constant' if self.final_ratio == 1 else share}"
        return title + (f", gradients clipped to {self.clip_norm:g}" if self.clip_norm != 1 else "")


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, how it is trained, and over which learning rates.

    Attributes:
        model: over bytes.
        settings: of its runs.
        learning_rates: the highest of a run; from too low to too high.
        together: seeds of one program, each at all learning rates; what memory allows.
    """

    model: models.Config
    settings: Settings
    learning_rates: tuple[float, ...]
    together: int


def in_xla(precision: Precision) -> Precision:
    """The same precision, simulated by XLA."""
    return dataclasses.replace(
        precision,
        forward=IN_XLA.get(precision.forward, precision.forward),
        backward=IN_XLA.get(precision.backward, precision.backward),
    )


def model_config(arm: Arm, size: Size) -> models.Config:
    """The model of an arm."""
    dtype = jnp.float32 if arm.params == "fp32" else jnp.bfloat16
    return dataclasses.replace(size.model, precision=in_xla(arm.precision), param_dtype=dtype)


def described(thing: Any) -> dict[str, Any]:
    """A dataclass as JSON: every field with its value, so that changed defaults show."""
    return dict(json.loads(json.dumps(_plain(thing))))


def _plain(value: Any) -> Any:
    if isinstance(value, Minifloat):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return getattr(value, "__name__", None) or str(value)


def differences(arm: Arm) -> str:
    """A description of what an arm changes."""
    changed = [
        f"{field.name}={_shown(getattr(arm, field.name))}"
        for field in dataclasses.fields(arm)
        if getattr(arm, field.name) != field.default
    ]
    return ", ".join(changed) or "BF16, FP32 parameters and moments"


def _shown(value: Any) -> str:
    """A preset by its name, another dataclass by the fields that are not its own defaults."""
    preset = next((name for name, known in PRESETS.items() if known == value), None)
    if preset is not None:
        return preset.upper()
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return str(value)
    own, usual = described(value), described(type(value)())
    fields = ", ".join(f"{name}={own[name]}" for name in own if own[name] != usual[name])
    return f"{type(value).__name__}({fields})"
