"""The config of a video transformer: its sizes, its grid of tokens, and where attention looks."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.models.config import Epsilon, Layers, SmallSize, Width
from coat_jax.models.protocol import ModelConfig
from coat_jax.validation import Between, Count, require_fields

Triple = tuple[Count, Count, Count]  # along time, height and width
Shift = Annotated[float, Between(least=0.01, most=100)]  # of times


@dataclasses.dataclass(frozen=True)
class TiledAttention:
    """Attention between tiles of tokens: see `coat.ops.tile_attention`.

    Attributes:
        tile: tokens of a tile; None for the best ones of the grid.
        windows: how many tiles each tile sees, for each level: None for all.
        until: ascending times that divide the levels; the first level serves times below the
            first of them. A video of time 1 is noise, so the last windows may be the smallest.
        format: "fp8" or "bf16".
    """

    tile: Triple | None = None
    windows: tuple[Triple | None, ...] = (None,)
    until: tuple[Annotated[float, Between(least=0, most=1)], ...] = ()
    format: Literal["fp8", "bf16"] = "fp8"

    def __post_init__(self) -> None:
        require_fields(self)
        if len(self.windows) != len(self.until) + 1 or list(self.until) != sorted(self.until):
            raise UserError(
                f"until={self.until} must be {len(self.windows) - 1} ascending times, between the "
                f"{len(self.windows)} windows."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A transformer that denoises the latents of videos, given a text. Wan 2.1's by default.

    Attributes:
        latents: frames, height and width of the latents.
        channels: of the latents.
        patch: latents of a token; divides `latents`.
        heads: of attention; the width is heads * head_dim.
        head_dim: the width of a head.
        layers: the number of layers.
        ffn: the hidden width of the MLP.
        text_width: of the text's states.
        time_width: numbers that a time is first made of, cosines and sines.
        cross_norm: whether attention to the text has a norm before it.
        norm_eps: a number that norms add to the variance.
        attention: between tiles; None for dense attention in 16 bits.
        shift: of times in training and sampling: larger ones mean more noise.
    """

    STACK: ClassVar[str] = "layers"
    tied: ClassVar[bool] = False

    latents: Triple
    channels: SmallSize = 16
    patch: Triple = (1, 2, 2)
    heads: SmallSize
    head_dim: SmallSize = 128
    layers: Layers
    ffn: Width
    text_width: Width = 4096
    time_width: SmallSize = 256
    cross_norm: bool = True
    norm_eps: Epsilon = 1e-6
    attention: TiledAttention | None = None
    shift: Shift = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(n % p for n, p in zip(self.latents, self.patch, strict=True)):
            raise UserError(f"patch={self.patch} must divide latents={self.latents}.")
        if self.head_dim % 2 or self.time_width % 2:
            raise UserError(
                f"head_dim={self.head_dim} and time_width={self.time_width} must be even: angles "
                "have a cosine and a sine."
            )
        if self.attention is not None:
            _ = self.tiles  # raises if they do not divide the grid

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self.heads * self.head_dim

    @property
    def grid(self) -> tuple[int, ...]:
        """Tokens along time, height and width."""
        return tuple(n // p for n, p in zip(self.latents, self.patch, strict=True))

    @property
    def tiles(self) -> ops.Tiles:
        """The tiles of the grid."""
        tile = None if self.attention is None else self.attention.tile
        return ops.Tiles.best(self.grid) if tile is None else ops.Tiles(self.grid, tile)


# Wan 2.1's two sizes, for videos of 81 frames in 480 x 832.
_LATENTS = (21, 60, 104)
PRESETS: dict[str, Config] = {
    "wan2.1_1.3b": Config(latents=_LATENTS, heads=12, layers=30, ffn=8960),
    "wan2.1_14b": Config(latents=_LATENTS, heads=40, layers=40, ffn=13824),
}


def config_of(name: Any) -> Config:
    """The preset of this name, in any case; a Config passes through."""
    config = name if isinstance(name, Config) else PRESETS.get(str(name).lower())
    if config is None:
        raise UserError(
            f"There is no model {name!r}. Use one of {', '.join(PRESETS)}, or a "
            "coat.models.video.Config."
        )
    return config
