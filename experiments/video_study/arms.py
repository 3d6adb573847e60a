"""The arms of the study, and the sizes of model that they are measured at."""

import dataclasses
from typing import Literal

import coat_jax as coat
from coat_jax.models.video import Config, TiledAttention
from coat_jax.precision import BF16, Precision
from experiments.drawn_videos import WORDS
from experiments.study.study import setting

Lists = Literal["all", "window", "coarse_early", "coarse_late"]


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to train. The default is BF16 with dense attention.

    Attributes:
        precision: of layers.
        attention: the format of attention between tiles; None for the usual dense one.
        lists: which tiles it sees. Denoising is early where a video is mostly noise.
        perturbed: whether each initial parameter moves by one unit in the last place.
    """

    precision: Precision = BF16
    attention: Literal["fp8", "bf16"] | None = None
    lists: Lists = "all"
    perturbed: bool = False


ARMS: dict[str, Arm] = {
    "bf16": Arm(),
    "bf16_ulp": Arm(perturbed=True),
    "fp8": Arm(coat.COAT, "fp8"),
    "sparse": Arm(BF16, "bf16", "window"),
    "both": Arm(coat.COAT, "fp8", "window"),
    "both_coarse_early": Arm(coat.COAT, "fp8", "coarse_early"),
    "both_coarse_late": Arm(coat.COAT, "fp8", "coarse_late"),
}
BASELINES = ("bf16", "bf16_ulp")
# What a network of a baseline is also evaluated with, after training.
AFTERWARDS = {"fp8": ARMS["fp8"], "sparse": ARMS["sparse"], "both": ARMS["both"]}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run; runs are compared under equal settings."""

    steps: int = setting("steps of a run, a whole cosine")
    batch: int = setting("videos of a step")
    learning_rate: float = setting("the highest learning rate")
    held_out: int = setting("videos that are held out")


Window = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Size:
    """A model, the settings to train it with, and windows in tiles.

    Attributes:
        model: a video transformer with dense attention.
        settings: of a run.
        tile: in tokens; None for the best ones.
        window: for all times.
        coarse, fine: for times at either side of `SWITCH`. At the times of training, they compute
            as much as `window` does.
    """

    model: Config
    settings: Settings
    tile: Window | None
    window: Window
    coarse: Window
    fine: Window

    def model_of(self, arm: Arm) -> Config:
        """The model of an arm."""
        attention = None
        if arm.attention is not None:
            windows: tuple[Window | None, ...] = {
                "all": (None,),
                "window": (self.window,),
                "coarse_early": (self.fine, self.coarse),
                "coarse_late": (self.coarse, self.fine),
            }[arm.lists]
            until = (SWITCH,) if len(windows) > 1 else ()
            attention = TiledAttention(self.tile, windows, until, arm.attention)
        return dataclasses.replace(self.model, precision=arm.precision, attention=attention)


SHIFT = 3.0
SWITCH = SHIFT / (1 + SHIFT)  # half of the times in training are above it
SHAPES = 2


def _model(frames: int, side: int, heads: int, head_dim: int, layers: int) -> Config:
    return Config(
        latents=(frames, side, side),
        channels=3,
        heads=heads,
        head_dim=head_dim,
        layers=layers,
        ffn=4 * heads * head_dim,
        text_width=len(WORDS),
        shift=SHIFT,
    )


SIZES: dict[str, Size] = {
    "tiny": Size(
        _model(4, 16, 1, 64, 2), Settings(4, 2, 1e-3, 4),
        tile=(2, 4, 4), window=(2, 1, 2), coarse=(1, 1, 1), fine=(2, 2, 2),
    ),
    # Of 4 x 4 x 4 tiles they see 0.28; 0.13 and 0.42.
    "35M": Size(
        _model(16, 64, 4, 128, 8), Settings(1000, 2, 1e-3, 32),
        tile=None, window=(2, 3, 3), coarse=(2, 2, 2), fine=(3, 3, 3),
    ),
}  # fmt: skip
