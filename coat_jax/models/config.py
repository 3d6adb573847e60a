"""The config of a decoder: its sizes, the features of its family, and how it is computed.

    family     norm    norms     qkv_bias    qk_norm    window      tied
    Llama      rms     before                                       rarely
    Mistral    rms     before                           at times
    Qwen 2     rms     before    yes                    at times    small ones
    Qwen 3     rms     before                "head"     at times    small ones
    OLMo       layer   before                                       small ones
    OLMo 2     rms     after                 "all"

All have rotary positions, gated MLPs (with silu unless `activation` says otherwise) and no other
biases. Left out: dropout, mixtures of experts, layers that differ from each other.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.models.protocol import ModelConfig, Work
from coat_jax.precision import precision_of
from coat_jax.validation import Between, Count, brief

# Far more than any model has, and few enough that the bytes of any array fit in 64 bits.
Layers = Annotated[int, Between(least=1, most=10_000)]
SmallSize = Annotated[int, Between(least=1, most=1 << 14)]
Width = Annotated[int, Between(least=1, most=1 << 20)]
Vocab = Annotated[int, Between(least=1, most=1 << 24)]
Context = Annotated[int, Between(least=1, most=1 << 24)]
Epsilon = Annotated[float, Between(least=1e-30, most=1)]


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
        ffn: the hidden width of the gated MLP.
        context: the longest sequence, in tokens.
        norm: the kind of norm: "rms" with a scale, or "layer" without parameters.
        norm_eps: a number that norms add to the variance.
        norms: where norms are: "before" attention and MLP, or "after" them, before the residual
            sum.
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: whether queries and keys have an RMSNorm: one for each "head", one for "all" heads
            together, or None.
        activation: of the gated MLP, a name in `coat.ops.ACTIVATIONS`.
        rotary: how positions become angles of rotary embeddings.
        window: how many tokens a token sees, itself included; None for all before it.
        tied: whether the head has the weights of the embedding.
        z_loss: the weight of the squared log-sum-exp of the logits, a part of the loss in training
            which keeps logits from drifting.
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
    rotary: ops.Rotary = ops.Rotary()
    window: Count | None = None
    tied: bool = False
    z_loss: Annotated[float, Between(least=0, most=1)] = 0.0

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
        if self.activation not in ops.ACTIVATIONS:
            raise UserError(
                f"activation={brief(self.activation)} must be one of {', '.join(ops.ACTIVATIONS)}. "
                "To use a new one, add it to coat.ops.ACTIVATIONS first."
            )

    def kept_gradients(self) -> tuple[str, ...]:
        """See `ModelConfig`."""
        return ("embed",) if self.tied else ()

    def work_per_token(self, sequence: int) -> Work:
        """See `ModelConfig`.

            linear layers    2 per weight                   in FP8 where `precision` says so
            attention        4 heads head_dim tokens seen   in 16 bits
            head             2 width vocabulary             in 16 bits

        forward, and twice that backward.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.width * (2 * queries + 2 * keys + 3 * self.ffn)
        seen = min(self.window or sequence, sequence)
        mean_seen = (seen * (seen + 1) / 2 + (sequence - seen) * seen) / sequence
        linear = 2 * self.layers * weights
        attention = 4 * self.layers * queries * mean_seen
        head = 2 * self.width * self.vocab
        if precision_of(self.precision).fp8_linear:
            return Work(fp8=3 * linear, wide=3 * (attention + head))
        return Work(fp8=0.0, wide=3 * (linear + attention + head))
