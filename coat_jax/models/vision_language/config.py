"""The config of a vision-language model: a tower, a projector and a decoder.

    family     tower     resized    features of                  projector                 decoder
    SmolVLM    SigLIP    longest    the last layer, normalized   shuffled, one layer       Llama
    LLaVA      CLIP      crop       the last layer but one       two layers with a gelu    any
               SigLIP    squash

The precision is that of all three, unless `tower_precision` names another one for the tower.
"""

import dataclasses
from typing import Annotated, Any, Literal, Self

from coat_jax.errors import UserError
from coat_jax.models import config as text
from coat_jax.models.config import Epsilon, Layers, SmallSize, Width, require_activation
from coat_jax.models.protocol import ModelConfig, Work
from coat_jax.models.vision_language.images import ImageFormat
from coat_jax.nn import MeshAxes
from coat_jax.ops import Rotary
from coat_jax.precision import Precision, precision_of
from coat_jax.validation import Between, CountOrZero

Shuffle = Annotated[int, Between(least=1, most=64)]
COMPUTED = tuple(field.name for field in dataclasses.fields(ModelConfig))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig(ModelConfig):
    """A vision transformer. How it is computed follows from the `Config` that it is a part of.

    Attributes:
        images: how a picture becomes its pixels.
        patch: pixels on a side of a patch.
        width: the width of the residual stream.
        layers: the number of layers.
        heads: the number of heads.
        ffn: the hidden width of the MLP.
        activation: of the MLP, a name in `coat.ops.ACTIVATIONS`.
        norm_eps: a number that norms add to the variance.
        class_token: whether a vector of its own precedes the patches, as in CLIP. The decoder does
            not see it, unless `keeps_class_token`.
        keeps_class_token: whether the class token is one of the features.
        patch_bias: whether the patches' projection has a bias.
        first_norm: whether there is a norm before the first layer, as in CLIP.
        last_norm: whether there is a norm after the last layer.
        rounded_places: whether places in the grid are computed in FP32 as Idefics3 does, which
            gives some grids the same place twice.
        unused: tensors that a Hugging Face folder has and the model does not use: layers after the
            last one, and the norm after them. They are kept for export.
    """

    images: ImageFormat = ImageFormat()
    patch: SmallSize = 16
    width: Width
    layers: Layers
    heads: SmallSize
    ffn: Width
    activation: str = "gelu_tanh"
    norm_eps: Epsilon = 1e-6
    class_token: bool = False
    keeps_class_token: bool = False
    patch_bias: bool = True
    first_norm: bool = False
    last_norm: bool = False
    rounded_places: bool = False
    unused: tuple[Literal["layer", "last_norm", "head"], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        require_activation(self.activation)
        if self.images.size % self.patch:
            raise UserError(
                f"images.size={self.images.size} must be a multiple of patch={self.patch}: a tower "
                "sees whole patches."
            )
        if self.width % self.heads:
            raise UserError(f"width={self.width} must be a multiple of heads={self.heads}.")
        if self.keeps_class_token and not self.class_token:
            raise UserError("keeps_class_token=True needs class_token=True.")

    @property
    def side(self) -> int:
        """Patches on a side of an image."""
        return self.images.size // self.patch

    @property
    def length(self) -> int:
        """Tokens of the tower's sequence."""
        return self.side**2 + self.class_token

    @property
    def features(self) -> int:
        """Vectors that the tower makes of an image."""
        return self.side**2 + self.keeps_class_token

    def work_per_image(self) -> Work:
        """As `ModelConfig.work_per_token`, for an image."""
        linear = 2 * self.layers * self.length * (4 * self.width**2 + 2 * self.width * self.ffn)
        attention = 4 * self.layers * self.width * self.length**2
        patches = 2 * self.side**2 * 3 * self.patch**2 * self.width  # pixels need no gradient
        wide = 3 * attention + 2 * patches
        if precision_of(self.precision).fp8_linear:
            return Work(fp8=3 * linear, wide=wide)
        return Work(fp8=0.0, wide=3 * linear + wide)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A tower, a projector, and a decoder that sees an image as tokens.

    Attributes:
        tower: sees the images.
        decoder: reads and writes the text.
        image_token: stands in the text for each feature of an image.
        projector: from the tower's width to the decoder's: "linear" is one layer without a bias,
            "mlp" two layers with a gelu between them.
        projector_bias: whether the layers of the MLP have biases.
        shuffle: features on a side of the squares that become one feature, of as many times the
            width ("linear" only).
        tower_precision: of the tower, if it differs from `precision`.
    """

    EMBEDDINGS = ("embed", "positions")

    tower: TowerConfig
    decoder: text.Config
    image_token: CountOrZero
    projector: Literal["linear", "mlp"] = "linear"
    projector_bias: bool = True
    shuffle: Shuffle = 1
    tower_precision: Precision | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tower_precision is not None:
            object.__setattr__(self, "tower_precision", precision_of(self.tower_precision))
        # How the parts are computed is said once, here.
        of_all = {name: getattr(self, name) for name in COMPUTED}
        of_tower = of_all | {"precision": self.tower_precision or self.precision}
        if self.tower.ffn % 32:  # so400m's 4304: kernels would gather such columns
            of_tower["axes"] = MeshAxes(self.axes.fsdp)
        object.__setattr__(self, "decoder", dataclasses.replace(self.decoder, **of_all))
        object.__setattr__(self, "tower", dataclasses.replace(self.tower, **of_tower))
        if self.shuffle > 1 and self.projector != "linear":
            raise UserError(
                f"shuffle={self.shuffle} needs projector='linear', not {self.projector!r}."
            )
        if self.tower.side % self.shuffle or (self.shuffle > 1 and self.tower.keeps_class_token):
            raise UserError(
                f"shuffle={self.shuffle} must divide the {self.tower.side} patches on a side of an "
                "image, of which no class token is kept."
            )
        if self.decoder.experts is not None:
            raise UserError("decoder.experts must be None: a vision-language model has none.")
        if self.image_token >= self.decoder.vocab:
            raise UserError(
                f"image_token={self.image_token} is outside the decoder's vocabulary of "
                f"{self.decoder.vocab}."
            )

    @property
    def vocab(self) -> int:
        """The size of the decoder's vocabulary."""
        return self.decoder.vocab

    @property
    def tied(self) -> bool:
        """Whether the decoder's head has the weights of its embedding."""
        return self.decoder.tied

    @property
    def context(self) -> int:
        """The longest sequence of the decoder, in tokens."""
        return self.decoder.context

    @property
    def features(self) -> int:
        """Tokens of an image in the decoder."""
        return self.tower.features // self.shuffle**2

    def in_precision(self, precision: Precision | str) -> Self:
        """See `ModelConfig`."""
        return dataclasses.replace(self, precision=precision, tower_precision=None)

    def work_per_token(self, sequence: int) -> Work | None:
        """See `ModelConfig`; of the decoder alone."""
        return self.decoder.work_per_token(sequence)

    def work_per_image(self) -> Work:
        """That of tower and projector."""
        inputs, width = self.tower.width * self.shuffle**2, self.decoder.width
        hidden = width * width if self.projector == "mlp" else 0
        products = 6 * self.features * (inputs * width + hidden)
        fp8 = precision_of(self.precision).fp8_linear
        of_tower = self.tower.work_per_image()
        return Work(of_tower.fp8 + products * fp8, of_tower.wide + products * (not fp8))


def _tower(*sizes: int, **features: Any) -> TowerConfig:
    patch, width, layers, heads, ffn = sizes
    return TowerConfig(patch=patch, width=width, layers=layers, heads=heads, ffn=ffn, **features)


SMOLLM2: dict[str, Any] = {"rotary": Rotary(1e5), "context": 8192, "head_dim": 64, "vocab": 49280}

PRESETS = {
    # Over bytes, of which no text has 255, and drawings of 56 x 56 pixels on light paper.
    "vlm_tiny": Config(
        tower=_tower(
            14, 128, 2, 4, 384, last_norm=True,
            images=ImageFormat(size=56, mean=(0.85,) * 3, std=(0.2,) * 3),
        ),
        decoder=dataclasses.replace(text.PRESETS["tiny"], layers=2),
        image_token=255,
    ),
    "smolvlm_256m": Config(
        tower=_tower(
            16, 768, 12, 12, 3072, last_norm=True, rounded_places=True,
            images=ImageFormat(size=512, resize="longest", longest_edge=2048, resample="lanczos"),
        ),
        decoder=text.Config(width=576, layers=30, heads=9, kv_heads=3, ffn=1536, **SMOLLM2),
        shuffle=4,
        image_token=49190,
    ),
}  # fmt: skip


def config_of(name: str | Config) -> Config:
    """The preset of this name, in any case; a Config passes through."""
    config = name if isinstance(name, Config) else PRESETS.get(str(name).lower())
    if config is None:
        raise UserError(
            f"There is no vision-language model {name!r}. Use one of {', '.join(PRESETS)}, or a "
            "coat.models.vision_language.Config."
        )
    return config
