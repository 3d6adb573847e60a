"""The config of a decoder: its sizes, the features of its family, and how it is computed.

    family        norm    norms     qkv_bias    qk_norm    window      tied          experts
    Llama         rms     before                                       rarely
    Mistral       rms     before                           at times
    Mixtral       rms     before                           at times                  yes
    Qwen 2        rms     before    yes                    at times    small ones
    Qwen 3        rms     before                "head"     at times    small ones
    Qwen 3 MoE    rms     before                "head"                               yes
    OLMo          layer   before                                       small ones
    OLMo 2        rms     after                 "all"
    OLMoE         rms     before                "all"                                yes

All have rotary positions, gated MLPs (with silu unless `activation` says otherwise) and no other
biases. Left out: dropout, experts that all tokens share, layers that differ from each other.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.models.protocol import ModelConfig, Work
from coat_jax.ops.routing import Scores
from coat_jax.precision import precision_of
from coat_jax.validation import Between, Count, brief, require_fields

# Far more than any model has, and few enough that the bytes of any array fit in 64 bits.
Layers = Annotated[int, Between(least=1, most=10_000)]
SmallSize = Annotated[int, Between(least=1, most=1 << 14)]
Width = Annotated[int, Between(least=1, most=1 << 20)]
Vocab = Annotated[int, Between(least=1, most=1 << 24)]
Context = Annotated[int, Between(least=1, most=1 << 24)]
Epsilon = Annotated[float, Between(least=1e-30, most=1)]
Weight = Annotated[float, Between(least=0, most=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The MLPs of each layer, of which a router chooses some for each token.

    Attributes:
        count: the number of experts in a layer.
        chosen: the number of them that a token passes through.
        scores: how the router's logits become scores: "softmax" or "sigmoid".
        normalized: whether the weights of a token's experts, which are their scores, are divided by
            their sum.
        aux_loss: the weight of the balance loss, a part of the loss in training which keeps loads
            even. It is computed for each row, so that microbatches do not change it.
        z_loss: the weight of the squared log-sum-exp of the router's logits, likewise.
        bias_rate: how much each step adds to the biases of experts with few tokens, and takes from
            those of others, which keeps loads even without a part in the loss; 0 for no biases.
    """

    count: SmallSize
    chosen: SmallSize
    scores: Scores = "softmax"
    normalized: bool = True
    aux_loss: Weight = 0.0
    z_loss: Weight = 0.0
    bias_rate: Weight = 0.0

    def __post_init__(self) -> None:
        require_fields(self)
        if self.chosen > self.count:
            raise UserError(
                f"experts.chosen={self.chosen} must be at most experts.count={self.count}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A decoder. Variants are a `dataclasses.replace` away.

    Attributes:
        vocab: the size of the vocabulary.
        width: the width of the residual stream.
        layers: the number of layers.
        heads: the number of query heads.
        kv_heads: the number of key and value heads; each serves heads / kv_heads query heads.
        head_dim: the width of a head; heads * head_dim need not be the width.
        ffn: the hidden width of the gated MLP, or of each expert.
        context: the longest sequence, in tokens.
        norm: the kind of norm: "rms" with a scale, or "layer" without parameters.
        norm_eps: a number that norms add to the variance.
        norms: where norms are: "before" attention and MLP, or "after" them, before the residual
            sum.
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether queries and keys have an RMSNorm: one for each "head", one for "all" heads
            together, or None.
        activation: of the gated MLP, a name in `coat.ops.ACTIVATIONS`.
        activation_limit: where the gate is clipped before the activation, and at plus and minus
            this what it multiplies; None for no limit.
        rotary: how positions become angles of rotary embeddings.
        window: how many tokens a token sees, itself included; None for all before it.
        tied: whether the head has the weights of the embedding.
        z_loss: the weight of the squared log-sum-exp of the logits, a part of the loss in training
            which keeps logits from drifting.
        experts: a mixture of experts in the place of each MLP; None for one MLP.
    """

    EMBEDDINGS: ClassVar[tuple[str, ...]] = ("embed",)

    vocab: Vocab
    width: Width
    layers: Layers
    heads: SmallSize
    kv_heads: SmallSize
    head_dim: SmallSize
    ffn: Width
    context: Context
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: Epsilon = 1e-5
    norms: Literal["before", "after"] = "before"
    qkv_bias: bool = False
    qk_norm: Literal["head", "all"] | None = None
    activation: str = "silu"
    activation_limit: Annotated[float, Between(above=0, most=1e6)] | None = None
    rotary: ops.Rotary = ops.Rotary()
    window: Count | None = None
    tied: bool = False
    z_loss: Weight = 0.0
    experts: Experts | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise UserError(
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}: each key head "
                "serves as many query heads as any other."
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of numbers."
            )
        require_activation(self.activation)

    def kept_gradients(self) -> tuple[str, ...]:
        """See `ModelConfig`."""
        return ("embed",) if self.tied else ()

    def work_per_token(self, sequence: int) -> Work:
        """See `ModelConfig`.

            linear layers    2 per weight of a token        in FP8 where `precision` says so
            routers          2 width experts                in FP32, counted as 16 bits
            attention        4 heads head_dim tokens seen   in 16 bits
            head             2 width vocabulary             in 16 bits

        forward, and twice that backward.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        count, chosen = (self.experts.count, self.experts.chosen) if self.experts else (0, 1)
        weights = self.width * (2 * queries + 2 * keys + 3 * self.ffn * chosen)
        seen = min(self.window or sequence, sequence)
        mean_seen = (seen * (seen + 1) / 2 + (sequence - seen) * seen) / sequence
        linear = 2 * self.layers * weights
        attention = 4 * self.layers * queries * mean_seen
        others = attention + 2 * self.width * (self.vocab + self.layers * count)
        if precision_of(self.precision).fp8_linear:
            return Work(fp8=3 * linear, wide=3 * others)
        return Work(fp8=0.0, wide=3 * (linear + others))


def require_activation(name: str) -> None:
    """Raises unless there is an activation of this name."""
    if name not in ops.ACTIVATIONS:
        raise UserError(
            f"activation={brief(name)} must be one of {', '.join(ops.ACTIVATIONS)}. To use a new "
            "one, add it to coat.ops.ACTIVATIONS first."
        )


# Published models, with the sizes in their config.json on Hugging Face, and a tiny one. What a run
# chooses (dtypes, precision, mesh axes, scan, remat) is left at its default: `dataclasses.replace`.
SIZES = ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "ffn", "context")


def _preset(*sizes: int, **features: Any) -> Config:
    """A config from its SIZES and the features in which it differs from Llama 2."""
    return Config(**features, **dict[str, Any](zip(SIZES, sizes, strict=True)))


LLAMA3, LLAMA31 = ops.Rotary(5e5), ops.Rotary(5e5, ops.Llama3Scaling())
QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rotary": ops.Rotary(1e6)}
QWEN2, QWEN3 = QWEN | {"qkv_bias": True}, QWEN | {"qk_norm": "head"}
OLMOE = Experts(count=64, chosen=8, normalized=False, aux_loss=0.01, z_loss=0.001)
QWEN3_MOE = Experts(count=128, chosen=8, aux_loss=0.001)
OLMO2: dict[str, Any] = {"norm_eps": 1e-6, "norms": "after", "qk_norm": "all"}

PRESETS = {
    # 0.9 million parameters, over bytes. Every matrix is large enough for FP8 optimizer states.
    "tiny": _preset(256, 128, 4, 4, 4, 32, 384, 1024),
    "llama2_7b": _preset(32000, 4096, 32, 32, 32, 128, 11008, 4096),
    "llama2_13b": _preset(32000, 5120, 40, 40, 40, 128, 13824, 4096),
    # The first LLaMA's 33B: Llama 2 has no such size.
    "llama_30b": _preset(32000, 6656, 60, 52, 52, 128, 17920, 2048, norm_eps=1e-6),
    "llama3_8b": _preset(128256, 4096, 32, 32, 8, 128, 14336, 8192, rotary=LLAMA3),
    "llama3.1_8b": _preset(128256, 4096, 32, 32, 8, 128, 14336, 131072, rotary=LLAMA31),
    "mistral_7b": _preset(32000, 4096, 32, 32, 8, 128, 14336, 32768, window=4096),
    "qwen2_0.5b": _preset(151936, 896, 24, 14, 2, 64, 4864, 131072, **QWEN2, tied=True),
    "qwen2_7b": _preset(152064, 3584, 28, 28, 4, 128, 18944, 131072, **QWEN2),
    "qwen3_0.6b": _preset(151936, 1024, 28, 16, 8, 128, 3072, 40960, **QWEN3, tied=True),
    "qwen3_8b": _preset(151936, 4096, 36, 32, 8, 128, 12288, 40960, **QWEN3),
    "olmo_1b": _preset(50304, 2048, 16, 16, 16, 128, 8192, 2048, norm="layer", tied=True),
    "olmo_7b": _preset(50304, 4096, 32, 32, 32, 128, 11008, 2048, norm="layer"),
    "olmo2_7b": _preset(100352, 4096, 32, 32, 32, 128, 11008, 4096, **OLMO2, rotary=LLAMA3),
    # 1.8 million parameters, 0.6 million of them active per token.
    "olmoe_tiny": _preset(
        256, 128, 2, 4, 4, 32, 256, 1024, qk_norm="all",
        experts=dataclasses.replace(OLMOE, count=8, chosen=2),
    ),
    "olmoe_7b": _preset(
        50304, 2048, 16, 16, 16, 128, 1024, 4096, qk_norm="all", experts=OLMOE
    ),
    "qwen3_30b_a3b": _preset(
        151936, 2048, 48, 32, 4, 128, 768, 40960, **QWEN3, experts=QWEN3_MOE
    ),
}  # fmt: skip


def config_of(name: str | Config) -> Config:
    """The preset of this name, in any case; a Config passes through."""
    config = name if isinstance(name, Config) else PRESETS.get(str(name).lower())
    if config is None:
        raise UserError(
            f"There is no model {name!r}. Use one of {', '.join(PRESETS)}, or a coat.models.Config."
        )
    return config
