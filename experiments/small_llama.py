"""A small Llama over bytes, in Flax NNX: the model that the experiments train.

    x = embed(tokens)
    x = x + o(attention(rope(q(h)), rope(k(h)), v(h)))   with h = norm(x)      } per layer
    x = x + down(silu(gate(h)) * up(h))                  with h = norm(x)      }
    logits = head(norm(x))

Parameters are FP32; the arithmetic is in `Config.dtype`, but for norms, rotations, softmax and
loss, which are in FP32. Left out: grouped queries, dropout, a cache for generation.

At the default sizes every matrix has 16384 elements or more and a last axis of 128 or more, so
that 8-bit optimizers store its moments in 8 bits; only the norms' weights stay in FP32.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

ROPE_BASE = 10000.0


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model: 0.9 million parameters by default."""

    vocab: int = 256
    width: int = 128
    layers: int = 4
    heads: int = 4
    ffn: int = 384
    dtype: DTypeLike = jnp.float32


class Llama(nnx.Module):
    """Tokens to logits."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(config.vocab, config.width, dtype=config.dtype, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = norm(config, rngs=rngs)
        self.head = linear(config.width, config.vocab, config, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B S"]) -> Float[Array, "B S V"]:
        """The logits of the token after each one."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Layer(nnx.Module):
    """Attention, then a gated MLP, each after a norm and beside a residual."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.attention_norm = norm(config, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = norm(config, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """The residual stream, after this layer."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.heads = config.heads
        self.q = linear(config.width, config.width, config, rngs=rngs)
        self.k = linear(config.width, config.width, config, rngs=rngs)
        self.v = linear(config.width, config.width, config, rngs=rngs)
        self.o = linear(config.width, config.width, config, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """What each token reads from those before it and itself."""
        per_head = (*x.shape[:-1], self.heads, -1)
        q, k, v = (project(x).reshape(per_head) for project in (self.q, self.k, self.v))
        y = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
        return self.o(y.reshape(x.shape))


class MLP(nnx.Module):
    """SwiGLU: one half gates the other."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.gate = linear(config.width, config.ffn, config, rngs=rngs)
        self.up = linear(config.width, config.ffn, config, rngs=rngs)
        self.down = linear(config.ffn, config.width, config, rngs=rngs)

    def __call__(self, x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
        """What each token computes by itself."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def linear(inputs: int, outputs: int, config: Config, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A matrix without bias, as everywhere in Llama."""
    return nnx.Linear(inputs, outputs, use_bias=False, dtype=config.dtype, rngs=rngs)


def norm(config: Config, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """x / rms(x), times a weight per channel."""
    return nnx.RMSNorm(config.width, epsilon=1e-5, dtype=config.dtype, rngs=rngs)


def rope(x: Float[Array, "B S N H"]) -> Float[Array, "B S N H"]:
    """Rotates each pair (x[h], x[h + H/2]) by position * ROPE_BASE ** (-2h / H)."""
    _, sequence, _, width = x.shape
    frequency = ROPE_BASE ** (-jnp.arange(0, width, 2) / width)
    angle = jnp.arange(sequence)[:, None, None] * frequency  # (S, 1, H/2): the same for all heads
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)


def loss(model: Llama, tokens: Int[Array, "B S+1"]) -> Float[Array, ""]:
    """The mean cross-entropy, in nats per byte, of each token given those before it."""
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
