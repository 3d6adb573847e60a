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
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from coat_jax import ops
from coat_jax.errors import UserError
from coat_jax.limits import Between, Count, added, dtype_of, require_fields, shown
from coat_jax.nn import MeshAxes
from coat_jax.precision import COAT, Precision, precision_of

# Far more than any model has, and few enough that the bytes of any array fit in 64 bits.
Layers = Annotated[int, Between(least=1, most=10_000)]
SmallSize = Annotated[int, Between(least=1, most=1 << 14)]
Width = Annotated[int, Between(least=1, most=1 << 20)]
Vocab = Annotated[int, Between(least=1, most=1 << 24)]
Context = Annotated[int, Between(least=1, most=1 << 24)]
Epsilon = Annotated[float, Between(least=1e-30, most=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
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
        scan: whether layers are stacked, in one array for each parameter, and run in a loop; then
            compilation takes no longer for many layers than for one.
        remat: what the backward pass recomputes: None; "layer" saves only a layer's input and
            recomputes the rest; "layer_fp8" saves that input in FP8, rounded stochastically if
            `precision.stochastic` is set, and computes the gradients at the rounded input.
        param_dtype: the dtype of the parameters.
        dtype: the dtype of the residual stream and of everything that is not FP8.
        precision: what is FP8, a `coat.Precision` or its name. Embedding and head never are.
        axes: the mesh axes that parameters are sharded along.
        batch_axes: the mesh axes that the batch is sharded along.
    """

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
    activation: str = added(default="silu", before="silu")
    rotary: ops.Rotary = ops.Rotary()
    window: Count | None = None
    tied: bool = False
    scan: bool = True
    remat: Literal["layer", "layer_fp8"] | None = None
    param_dtype: DTypeLike = jnp.float32
    dtype: DTypeLike = jnp.bfloat16
    precision: Precision | str = COAT
    axes: MeshAxes = MeshAxes()
    batch_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_fields(self)
        if self.heads % self.kv_heads:
            raise UserError(
                f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}: each key head "
                "serves as many query heads as any other."
            )
        if self.head_dim % 2:
            raise UserError(
                f"head_dim={self.head_dim} must be even: rotary embeddings rotate pairs of numbers."
            )
        if len(set(self.batch_axes)) < len(self.batch_axes):
            raise UserError(f"batch_axes={self.batch_axes!r} must name each axis of the mesh once.")
        if self.activation not in ops.ACTIVATIONS:
            raise UserError(
                f"activation={shown(self.activation)} must be one of {', '.join(ops.ACTIVATIONS)}. "
                "To use a new one, add it to coat.ops.ACTIVATIONS first."
            )
        # One spelling each, so that equal Configs compare equal.
        object.__setattr__(self, "precision", precision_of(self.precision))
        for name in ("param_dtype", "dtype"):
            object.__setattr__(self, name, _wide(name, getattr(self, name)))


def _wide(name: str, value: Any) -> np.dtype:
    dtype = dtype_of(name, value)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise UserError(
            f"{name}={dtype.name} must be float32, bfloat16 or another "
            "float of 16 bits or more. Use `precision` to choose what is FP8."
        )
    if dtype.itemsize > 4 and jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise UserError(f"{name}={dtype.name} needs JAX_ENABLE_X64=1 in the environment.")
    return dtype
