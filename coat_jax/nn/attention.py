"""Self-attention, with the norm before it."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from coat_jax import ops, probes
from coat_jax.errors import UserError
from coat_jax.nn.norm import AnyNorm, require_norm_or_none
from coat_jax.nn.parameters import (
    UNSHARDED,
    MeshAxes,
    divides_evenly,
    unshard,
    value_of,
    vector,
    weight,
)
from coat_jax.numerics.cache_formats import CacheFormat, encode_heads, format_of_cache
from coat_jax.ops import Past, Visible
from coat_jax.ops.definition import restore, save_array
from coat_jax.ops.rotary import join_heads, split_heads
from coat_jax.precision import COAT, Precision, precision_of


class Attention(nnx.Module):
    """x + softmax(q k^T / sqrt(H)) v out, where q, k, v = norm(x) w.

    Heads are sharded along the mesh's axis `tensor`. If the heads of queries or of keys cannot be
    divided equally among the devices, every device computes all of them.

    Args:
        width: columns of the input and of the output.
        heads: of the queries.
        kv_heads: of the keys and of the values; by default as many as of the queries.
        head_dim: columns of a head; by default width / heads.
        qkv_bias: whether queries, keys and values have biases, which are zero at first.
        out_bias: whether the output projection has one.
        axes: the mesh axes over which the parameters are sharded.
        param_dtype: their dtype.
        rngs: where their random numbers come from.

    Attributes:
        query, key, value: weights [width, heads * head_dim], for keys and values [width, kv_heads *
            head_dim].
        out: the output projection, [heads * head_dim, width].
        query_bias, key_bias, value_bias, out_bias: one number per column, or None.
        norm: before the projections, or None.
        query_norm, key_norm: of each head's queries and keys (Qwen 3), or of all heads
            together (OLMo 2), before the rotation; or None.
        rotary: the rotation by position, or None.
        causal: whether a token sees only itself and those before it.
        window: how many tokens it sees, itself included; None for all.
        residual: whether x is added to the result.
        precision: see `coat.Precision`.
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
        residual: bool = True,
        precision: Precision | str = COAT,
        axes: MeshAxes = UNSHARDED,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        kv_heads = kv_heads or heads
        if heads < 1 or heads % kv_heads or (head_dim is None and width % heads):
            raise ValueError(
                f"{width=} must be a multiple of {heads=}, unless head_dim is given, and {heads=} "
                f"of {kv_heads=}."
            )
        for name, each in (("norm", norm), ("query_norm", query_norm), ("key_norm", key_norm)):
            require_norm_or_none(name, each)
        self.heads, self.kv_heads = heads, kv_heads
        self.head_dim = head_dim or width // heads
        sizes = {"query": heads, "key": kv_heads, "value": kv_heads}
        for name, count in sizes.items():
            columns = count * self.head_dim
            kernel = weight(rngs, (width, columns), axes.widening, dtype=param_dtype)
            bias = vector(columns, (axes.tensor,), fill=0.0, dtype=param_dtype)
            setattr(self, name, kernel)
            setattr(self, f"{name}_bias", nnx.data(bias if qkv_bias else None))
        shape = heads * self.head_dim, width
        self.out = weight(rngs, shape, axes.narrowing(shape), dtype=param_dtype)
        self.out_bias = nnx.data(vector(width, fill=0.0, dtype=param_dtype) if out_bias else None)
        self.norm = nnx.data(norm)
        self.query_norm, self.key_norm = nnx.data(query_norm), nnx.data(key_norm)
        self.rotary = rotary
        self.tensor = axes.tensor
        self.causal, self.window = causal, window
        self.residual = residual
        self.precision = precision_of(precision)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Attends within each sequence.

        Args:
            x: the residual stream.
            positions: of the tokens, 0 .. S - 1 by default.
            segments: the number of each token's document; tokens attend within their document only.
        """
        return self._attend(x, positions, segments)[0]

    def prefill(
        self,
        x: Float[Array, "B S D"],
        positions: Int[Array, "*B S"] | None = None,
        segments: Int[Array, "B S"] | None = None,
        cache: CacheFormat | None = None,
    ) -> tuple[Float[Array, "B S D"], Past]:
        """As `__call__`; also returns keys and values with codes [B, K, S, H], for `decode`."""
        y, k, v = self._attend(x, positions, segments)
        return y, self._store(k, v, cache)

    def decode(
        self,
        x: Float[Array, "B 1 D"],
        positions: Int[Array, "B 1"],
        visible: Visible,
    ) -> tuple[Float[Array, "B 1 D"], Past]:
        """Attends from one new token of each sequence to itself and to earlier ones.

        Args:
            x: the residual stream.
            positions: of the new tokens.
            visible: the slots that they attend to: the only mask.

        Returns:
            The residual stream, and the keys and values of the new tokens, codes [B, K, 1, H].
        """
        x, q, k, v = self._heads(x, positions)
        q, new = self._round(q), self._store(k, v, format_of_cache(visible.past.keys))
        o = self._round(ops.attention_to_past(q, new, visible))
        y = self._project_out(join_heads(o))
        return x + y if self.residual else y, new

    def _attend(
        self, x: Float[Array, "B S D"], positions: Array | None, segments: Array | None
    ) -> tuple[Array, Array, Array]:
        """The result, and the keys and values that it was computed from."""
        x, q, k, v = self._heads(x, positions)
        (out,) = self._arrays(0, "out")  # how its rows are sharded decides it for the heads
        y = ops.attention_linear(
            q,
            k,
            v,
            out,
            value_of(self.out_bias),
            causal=self.causal,
            window=self.window,
            segments=segments,
            precision=self.precision,
        )
        return x + y if self.residual else y, k, v

    def _project_out(self, joined: Float[Array, "B S NH"]) -> Float[Array, "B S D"]:
        """The output projection, by itself."""
        (out,) = self._arrays(0, "out")
        return ops.linear(joined, out, value_of(self.out_bias), precision=self.precision)

    def _arrays(self, axis: int, *names: str) -> list[Any]:
        """Parameters whose `axis` has heads; not sharded along it unless all heads stay whole."""
        arrays = [value_of(getattr(self, name)) for name in names]
        if divides_evenly(math.gcd(self.heads, self.kv_heads), self.tensor):
            return arrays
        return [unshard(array, axis) for array in arrays]

    def _round(self, y: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
        """The values that the forward pass of attention computes with."""
        block = self.precision.attention_block
        if self.precision.exact_forward:
            return y
        return restore(save_array(y, self.precision.forward, block), y.dtype, block)

    def _store(
        self, k: Float[Array, "B S K H"], v: Float[Array, "B S K H"], cache: CacheFormat | None
    ) -> Past:
        """Keys and values in a format of caches."""
        return Past(*(encode_heads(jnp.swapaxes(self._round(y), 1, 2), cache) for y in (k, v)))

    def _heads(self, x: Float[Array, "B S D"], positions: Int[Array, "*B S"] | None) -> Any:
        """x for the residual sum; queries, keys and values, normalized and rotated."""
        if x.ndim != 3:
            raise ValueError(f"Attention takes x [batch, sequence, width], not {x.shape}.")
        weights = self._arrays(-1, "query", "key", "value")
        biases = self._arrays(-1, "query_bias", "key_bias", "value_bias")
        if self.norm is not None:
            normalizes_heads = self.query_norm is not None or self.key_norm is not None
            x, q, k, v = ops.norm_qkv(
                x,
                self.norm.as_op_norm(),
                weights,
                biases,
                head_dim=self.head_dim,
                rotary=None if normalizes_heads else self.rotary,
                positions=positions,
                precision=self.precision,
            )
            if not normalizes_heads:
                return x, q, k, v
        else:
            with probes.named("", weights=("query", "key", "value")):
                outputs = ops.linear(x, weights, biases, precision=self.precision)
            q, k, v = (split_heads(y, self.head_dim) for y in outputs)
        return x, *self._normalize_and_rotate(q, k, positions), v

    def _normalize_and_rotate(
        self, q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], positions: Array | None
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"]]:
        """Queries and keys as attention takes them."""
        with probes.named("query_norm"):
            q = self._normalize(self.query_norm, q)
        with probes.named("key_norm"):
            k = self._normalize(self.key_norm, k)
        if self.rotary is not None:
            positions = jnp.arange(q.shape[1]) if positions is None else positions
            q, k = (ops.rotate(y, positions, self.rotary) for y in (q, k))
        return q, k

    def _normalize(
        self, norm: AnyNorm | None, y: Float[Array, "B S N H"]
    ) -> Float[Array, "B S N H"]:
        """Queries or keys, normalized over as many columns as the norm has parameters."""
        if norm is None:
            return y
        scale = value_of(norm.scale)
        if scale is None or scale.shape[0] == self.head_dim:
            return norm(y)
        return norm(join_heads(y)).reshape(y.shape)


def attention_fn(precision: Precision | str = COAT, *, causal: bool = False) -> Callable[..., Any]:
    """The `attention_fn` argument of Flax's attention, in NNX and Linen: `coat.ops.attention`.

    Like Flax's it sees all tokens by default. It refuses masks, dropout and sowed weights.

    Args:
        precision: see `coat.ops.attention`.
        causal: whether a token sees only itself and those before it; NNX's modules can also be
            called with `is_causal=True`.
    """

    def attend(
        query: Array, key: Array, value: Array, *, is_causal: bool = False, **given: Any
    ) -> Array:
        drops = given.get("dropout_rate") and not given.get("deterministic")
        if drops or given.get("mask") is not None or given.get("module") is not None:
            raise UserError(
                "coat.nn.attention_fn takes neither masks nor dropout, and sows no weights. For "
                "a causal mask write attention_fn(causal=True); for the rest keep Flax's function."
            )
        return ops.attention(query, key, value, causal=causal or is_causal, precision=precision)

    return attend
