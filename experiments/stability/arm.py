"""What a run is made of: an arm, a size of model, and settings.

An arm is a way to train, without learning rate and seed. Every format runs through XLA, because
Triton kernels have no rule for `vmap`: `in_xla` gives E4M3 and E5M2 another bias, which scales
compensate, so that they are simulated like all other formats. Their values are the same.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from coat_jax import BF16, Precision, models
from coat_jax.errors import UserError
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.storage import Storage
from experiments.study.study import setting

# The same values, shifted by a power of two.
IN_XLA = {E4M3: "E4M3:bias=8", E5M2: "E5M2:bias=16"}
PARTS = 10  # of a run, after each of which its progress is known


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. The default is BF16 with FP32 parameters and moments.

    Attributes:
        precision: of the layers.
        scaled: whether operands have scales. Without them, what is above the largest value of a
            format saturates, and what is below half the smallest becomes zero.
        params: in FP32; or in BF16, rounded to nearest or stochastically after each step.
        moments: how Adam's moments are stored in 8 bits; None leaves them in FP32.
    """

    precision: Precision = BF16
    scaled: bool = True
    params: Literal["fp32", "bf16", "bf16_stochastic"] = "fp32"
    moments: Storage | None = None

    def __post_init__(self) -> None:
        rounds_blocks = self.precision.block or self.precision.attention_block
        if not self.scaled and (rounds_blocks or not self.precision.fp8_linear):
            raise UserError(
                "scaled=False leaves out the scales of products, so the precision must round "
                "these and save nothing in blocks: use coat.Precision(block=None)."
            )


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; runs are compared under equal settings.

    The learning rate rises in a straight line, then falls in half a cosine.
    """

    steps: int = setting("steps of a run")
    batch: int = setting("sequences of a step")
    sequence: int = setting("bytes of a sequence")
    warmup: float = setting("share of the steps over which the learning rate rises", 0.1)
    final_ratio: float = setting("the last learning rate over the highest; 1 is constant", 0.0)
    clip_norm: float = setting("of gradients; 1e9 clips nothing", 1.0)
    weight_decay: float = setting("of matrices", 0.1)
    every: int = setting("one of so many steps is stored", 5)

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "sequence", "every"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1.")
        for name in ("warmup", "final_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"{name}={getattr(self, name)} must be from 0 to 1.")
        if self.steps % (PARTS * self.every):
            raise UserError(
                f"steps={self.steps} must be a multiple of {PARTS * self.every}: runs have "
                f"{PARTS} parts, and one in {self.every} of their steps is stored."
            )


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
