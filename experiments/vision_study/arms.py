"""The arms of the study, and the sizes of model that they are measured at."""

import dataclasses
from typing import Any

import coat_jax as coat
from coat_jax.models import Config as Decoder
from coat_jax.models import vision_language as vl
from coat_jax.precision import BF16, Precision
from experiments.study.study import setting


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. The default is BF16.

    Attributes:
        precision: of decoder and projector.
        tower_precision: of the tower; None is that of the rest.
        perturbed: whether each initial parameter moves by one unit in the last place.
    """

    precision: Precision = BF16
    tower_precision: Precision | None = None
    perturbed: bool = False


ARMS: dict[str, Arm] = {
    "bf16": Arm(),
    "bf16_ulp": Arm(perturbed=True),
    # The known way: linear layers of the decoder in FP8, the tower as it was.
    "decoder_alone": Arm(coat.FP8_LINEAR, BF16),
    "coat": Arm(coat.COAT),
    "coat_int8": Arm(coat.COAT_INT8),
    "coat_bf16_forward": Arm(coat.COAT_BF16_FORWARD),
    "coat_lean": Arm(coat.COAT_LEAN),
}
BASELINES = ("bf16", "bf16_ulp")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; runs are compared under equal settings."""

    steps: int = setting("steps of a run, a whole cosine")
    batch: int = setting("pictures of a step, each with six questions")
    sequence: int = setting("tokens of a picture and its questions")
    learning_rate: float = setting("the highest learning rate")
    held_out: int = setting("scenes of each held-out kind, with six questions each")


@dataclasses.dataclass(frozen=True)
class Size:
    """A model and the settings to train it with."""

    model: vl.Config
    settings: Settings


def _model(tower: dict[str, int], decoder: dict[str, int], **more: Any) -> vl.Config:
    images = vl.ImageFormat(size=192, mean=(0.9,) * 3, std=(0.3,) * 3)
    sizes = {"vocab": 256, "context": 512, **decoder}
    return vl.Config(
        tower=vl.TowerConfig(images=images, last_norm=True, **tower),  # type: ignore[arg-type]
        decoder=Decoder(kv_heads=decoder["heads"], **sizes),  # type: ignore[arg-type]
        image_token=255,
        scan=False,
        **more,
    )


SIZES: dict[str, Size] = {
    "tiny": Size(
        _model(
            {"patch": 32, "width": 64, "layers": 2, "heads": 2, "ffn": 128},
            {"width": 64, "layers": 2, "heads": 2, "head_dim": 32, "ffn": 128},
            shuffle=2,
        ),
        Settings(20, 8, 448, 1e-3, held_out=8),
    ),
    "40M": Size(
        _model(
            {"patch": 16, "width": 512, "layers": 8, "heads": 8, "ffn": 2048},
            {"width": 384, "layers": 8, "heads": 6, "head_dim": 64, "ffn": 1024},
            shuffle=2,
        ),
        Settings(3000, 64, 448, 1e-3, held_out=256),
    ),
}
