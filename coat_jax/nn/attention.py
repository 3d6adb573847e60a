"""Self-attention, with the norm before it."""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from coat_jax import ops
from coat_jax.nn.norm import AnyNorm
from coat_jax.nn.parameters import WHOLE, MeshAxes, value_of, vector, weight
from coat_jax.precision import COAT, Precision, precision_of


class Attention(nnx.Module):
    """softmax(q k^T / sqrt(H)) v, times the output weight; q, k, v = norm(x) w.

    Attributes:
        norm: before the projections, or None.
        query_norm, key_norm: of each head's queries and keys (Qwen 3), or of all heads
            together (OLMo 2), before the rotation; or None.
        rotary: the rotation by position, or None.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: AnyNorm | None = None,
        query_norm: AnyNorm | None = None,
        key_norm: AnyNorm | None = None,
        rotary: ops.Rotary | None = None,
        causal: bool = True,
        window: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        precision: Precision | str = COAT,
        axes: MeshAxes = WHOLE,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kv_heads = kv_heads or heads
        if heads % kv_heads or (head_dim is None and width % heads):
            raise ValueError(
                f"{width=} must be a multiple of {heads=}, unless head_dim is given, and {heads=} "
                f"of {kv_heads=}."
            )
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = head_dim or width // heads
        sizes = {"query": heads, "key": kv_heads, "value": kv_heads}
        for name, count in sizes.items():
            columns = count * self.head_dim
            kernel = weight(rngs, (width, columns), axes.widening, dtype=param_dtype)
            bias = vector(columns, (axes.tensor,), fill=0.0, dtype=param_dtype)
            setattr(self, name, kernel)
            setattr(self, f"{name}_bias", nnx.data(bias if qkv_bias else None))
        self.out = weight(rngs, (heads * self.head_dim, width), axes.narrowing, dtype=param_dtype)
        self.out_bias = nnx.data(vector(width, fill=0.0, dtype=param_dtype) if out_bias else None)
        self.norm = nnx.data(norm)
        self.query_norm, self.key_norm = nnx.data(query_norm), nnx.data(key_norm)
        self.rotary = rotary
        self.causal, self.window = causal, window
        self.precision = precision_of(precision)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Attends within each sequence, without the residual sum.

        Args:
            x: the residual stream.
            positions: of the tokens, 0 .. S - 1 by default.
            segments: the number of each token's document; none sees another document.
        """
        weights = [value_of(w) for w in (self.query, self.key, self.value)]
        biases = [value_of(b) for b in (self.query_bias, self.key_bias, self.value_bias)]
        if self.norm is None:
            q, k, v = ops.linear(x, weights, biases, precision=self.precision)
        else:
            norm = self.norm.spec()
            q, k, v = ops.norm_linear(x, norm, weights, biases, precision=self.precision)
        q, k = self._normed(self.query_norm, q), self._normed(self.key_norm, k)
        q, k, v = (y.reshape(*x.shape[:2], -1, self.head_dim) for y in (q, k, v))
        if self.rotary is not None:
            positions = jnp.arange(x.shape[1]) if positions is None else positions
            q, k = (ops.rotate(y, positions, self.rotary) for y in (q, k))
        return ops.attention_linear(
            q,
            k,
            v,
            value_of(self.out),
            value_of(self.out_bias),
            causal=self.causal,
            window=self.window,
            segments=segments,
            precision=self.precision,
        )

    def _normed(self, norm: AnyNorm | None, y: Float[Array, "B S NH"]) -> Float[Array, "B S NH"]:
        """Queries or keys, normed over as many columns as the norm has parameters."""
        if norm is None:
            return y
        scale = value_of(norm.scale)
        if scale is not None and scale.shape[0] == y.shape[-1]:
            return norm(y)
        return norm(y.reshape(*y.shape[:-1], -1, self.head_dim)).reshape(y.shape)
