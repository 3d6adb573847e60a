"""A transformer that says in which direction a noisy video becomes a less noisy one.

    x_t = (1 - t) x_0 + t noise                     velocity = noise - x_0
    c = MLP(cosines and sines of t)
    x = patches of x_t w + b
    for each layer, with 6 vectors e made of c:
        x = x + e2 attention(norm(x) (1 + e1) + e0)             to all tokens, or tiles of them
        x = x + attention(norm(x), text)
        x = x + e5 mlp(norm(x) (1 + e4) + e3)
    velocity = (norm(x) (1 + f1) + f0) w + b                    with 2 vectors f made of c

That is Wan 2.1. Queries and keys are normalized over all heads, and turned by three angles, of
time, height and width. Tokens are put in the order of tiles once, before the first layer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from coat_jax import nn, ops, probes
from coat_jax.models.llama import EMBEDDING_INIT, run_layers, shard_batch, stack_layers
from coat_jax.models.protocol import Loss
from coat_jax.models.video.config import Config
from coat_jax.nn.parameters import value_of, vector, weight
from coat_jax.numerics.explicit_axes import explicit_spec, shard_inside
from coat_jax.ops.rotary import join_heads, split_heads
from coat_jax.precision import BF16

TIMES = 1000.0  # cosines and sines are of times in 0 .. 1000


class Batch(NamedTuple):
    """Videos with their texts, or one of them; noise and times follow from the seed."""

    latents: Float[Any, "*B F H W C"]
    text: Float[Any, "*B T E"]
    seed: UInt32[Any, "*B"]
    counts: Bool[Any, "*B"]  # whether the loss has it


class VideoTransformer(nnx.Module):
    """Noisy latents, times and texts to velocities, or a loss.

    Attributes:
        patch: [W, H, F, C, D]: of a patch, its columns, rows, frames and channels.
        patch_bias: [D]
        text, time: MLPs, from the text's states and from cosines and sines of the time.
        layer_times: [D, 6 D], with `layer_times_bias`.
        layers: see `Layer`.
        table: [1, 2, D], added to the time.
        out: [D, patch * C], with `out_bias`.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        width, dtype, axes = config.width, config.param_dtype, config.axes
        self.config = config
        draw = partial(weight, rngs, dtype=dtype)
        zeros = partial(vector, fill=0.0, dtype=dtype)
        sides = config.patch[::-1]
        values = math.prod(config.patch) * config.channels
        self.patch = draw((*sides, config.channels, width))
        self.patch_bias = zeros(width)
        self.text = Embedder(config.text_width, "gelu_tanh", config, rngs)
        self.time = Embedder(config.time_width, "silu", config, rngs)
        self.layer_times = draw((width, 6 * width), axes.widening, init=EMBEDDING_INIT)
        self.layer_times_bias = zeros(6 * width)
        self.layers = stack_layers(config, partial(Layer, config), rngs)
        self.table = _table(rngs, 2, config)
        self.out = draw((width, values), init=EMBEDDING_INIT)
        self.out_bias = zeros(values)

    def __call__(
        self,
        latents: Float[Array, "B F H W C"],
        text: Float[Array, "B T E"],
        time: Float[Array, " B"],
    ) -> Float[Array, "B F H W C"]:
        """The velocity, in FP32.

        Args:
            latents: noisy videos.
            text: the states of their texts.
            time: of each video, from 0, without noise, to 1.
        """
        config, time = self.config, jnp.asarray(time, jnp.float32)
        shape = (*config.latents, config.channels)
        batched = latents.shape[:1] == text.shape[:1] == time.shape
        if not batched or latents.shape[1:] != shape or text.shape[2:] != (config.text_width,):
            raise ValueError(
                f"The model takes latents [B, {', '.join(map(str, shape))}], text [B, T, "
                f"{config.text_width}] and time [B], not {latents.shape}, {text.shape} and "
                f"{time.shape}."
            )
        x, angles = self._embed(latents.astype(config.dtype)), _angles(config)
        if config.attention is not None:
            order = config.tiles.order()
            x, angles = x[:, order], tuple(one[order] for one in angles)
        c = self.time(_waves(time * TIMES, config.time_width).astype(config.dtype))
        e = jax.nn.silu(c) @ value_of(self.layer_times).astype(c.dtype)
        e = (e + value_of(self.layer_times_bias).astype(c.dtype)).reshape(len(c), 6, -1)
        states = self.text(text.astype(config.dtype))
        x = shard_batch(x, config.batch_axes)
        turns = map(jnp.asarray, angles)
        x, _ = run_layers(config, self.layers, x, states, e, *turns, self._level(time))
        f = value_of(self.table).astype(jnp.float32) + c[:, None].astype(jnp.float32)
        with probes.named("last_norm"):
            x = ops.modulated_norm(
                x, f[:, 1], f[:, 0], epsilon=config.norm_eps, precision=config.precision
            )
        y = x @ value_of(self.out).astype(x.dtype) + value_of(self.out_bias).astype(x.dtype)
        if config.attention is not None:
            y = y[:, np.argsort(order)]
        return _from_patches(y.astype(jnp.float32), config)

    def loss(self, batch: Batch, *, evaluate: bool = False) -> Loss:
        """The squared error of the velocity, a mean over each video."""
        del evaluate
        noisy, time, velocity = noisy_of(self.config, batch)
        error = jnp.square(self(noisy, batch.text, time) - velocity)
        of_video = jnp.where(batch.counts, jnp.mean(error, axis=(1, 2, 3, 4)), 0)
        return Loss(jnp.sum(of_video), jnp.sum(batch.counts, dtype=jnp.int32))

    def _embed(self, latents: Float[Array, "B F H W C"]) -> Float[Array, "B S D"]:
        """The residual stream before the first layer, in the order of the grid."""
        kernel = value_of(self.patch).astype(latents.dtype)
        patches = _to_patches(latents, self.config)
        x = patches @ kernel.reshape(-1, kernel.shape[-1])
        return x + value_of(self.patch_bias).astype(x.dtype)

    def _level(self, time: Float[Array, " B"]) -> Int[Array, " B"]:
        """The level of attention of each sample."""
        until = () if self.config.attention is None else self.config.attention.until
        passed = time[:, None] >= jnp.array(until, jnp.float32)
        return jnp.sum(passed, axis=1, dtype=jnp.int32)


class Embedder(nnx.Module):
    """Two linear layers with biases, in 16 bits: there are few rows.

    Attributes:
        up, down: [inputs, D] and [D, D], with `up_bias` and `down_bias`.
    """

    def __init__(self, inputs: int, activation: str, config: Config, rngs: nnx.Rngs):
        width, dtype = config.width, config.param_dtype
        self.up = weight(rngs, (inputs, width), config.axes.widening, dtype=dtype)
        shape = width, width
        self.down = weight(rngs, shape, config.axes.narrowing(shape), dtype=dtype)
        self.up_bias = vector(width, (config.axes.tensor,), fill=0.0, dtype=dtype)
        self.down_bias = vector(width, fill=0.0, dtype=dtype)
        self.activation = activation

    def __call__(self, x: Float[Array, "*rows E"]) -> Float[Array, "*rows D"]:
        """Applies both to the last axis."""
        return ops.mlp(
            x,
            None,
            *map(value_of, (self.up, self.down, self.up_bias, self.down_bias)),
            activation=self.activation,
            residual=False,
            precision=BF16,
        )


class Layer(nnx.Module):
    """A layer: attention to the video, attention to the text, and an MLP.

    Attributes:
        attention: to the video.
        cross: to the text.
        mlp: the MLP.
        table: [1, 6, D], added to what is made of the time.
    """

    def __init__(self, config: Config, key: Array):
        rngs = nnx.Rngs(key)
        shared: dict[str, Any] = {
            "precision": config.precision,
            "axes": config.axes,
            "param_dtype": config.param_dtype,
            "rngs": rngs,
        }
        norm = partial(
            nn.LayerNorm, config.width, epsilon=config.norm_eps, precision=config.precision,
            param_dtype=config.param_dtype,
        )  # fmt: skip
        self.config = config
        self.attention = SelfAttention(config, shared)
        self.cross = CrossAttention(config, shared, norm() if config.cross_norm else None)
        self.mlp = nn.MLP(config.width, config.ffn, residual=False, **shared)
        self.table = _table(rngs, 6, config)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        text: Float[Array, "B T D"],
        time: Float[Array, "B 6 D"],
        cos: Float[Array, "S P"],
        sin: Float[Array, "S P"],
        level: Int[Array, " B"],
    ) -> Float[Array, "B S D"]:
        """The residual stream after this layer."""
        e = value_of(self.table).astype(jnp.float32) + time.astype(jnp.float32)
        eps, precision = self.config.norm_eps, self.config.precision
        norm = partial(ops.modulated_norm, epsilon=eps, precision=precision)
        gate = partial(ops.gate, precision=precision)
        with probes.named("attention"):
            y = self.attention(norm(x, e[:, 1], e[:, 0]), cos, sin, level)
            x = x + gate(y, e[:, 2])
        with probes.named("cross"):
            x = x + self.cross(x, text)
        with probes.named("mlp"):
            y = self.mlp(norm(x, e[:, 4], e[:, 3]))
            return x + gate(y, e[:, 5])


class SelfAttention(nn.Attention):
    """Attention between the tokens of a video."""

    def __init__(self, config: Config, shared: dict[str, Any]):
        super().__init__(config.width, config.heads, **_attention(config, shared))
        self.config = config

    def __call__(  # type: ignore[override]
        self,
        x: Float[Array, "B S D"],
        cos: Float[Array, "S P"],
        sin: Float[Array, "S P"],
        level: Int[Array, " B"],
    ) -> Float[Array, "B S D"]:
        """Attends to all tokens, or to those of the tiles that the level has."""
        _, q, k, v = self._heads(x, None)
        q, k = (_turned(one, cos, sin) for one in (q, k))
        sparse = self.config.attention
        if sparse is None:
            how: dict[str, Any] = {"causal": False, "precision": self.precision}
            (out,) = self._arrays(0, "out")
            return ops.attention_linear(q, k, v, out, value_of(self.out_bias), **how)
        tiles = self.config.tiles
        lists = tiles.window(*sparse.windows)
        o = ops.tile_attention(q, k, v, tiles, lists, level, format=sparse.format, ordered=True)
        return self._project_out(join_heads(o))


class CrossAttention(nn.Attention):
    """Attention from the tokens of a video to those of its text."""

    def __init__(self, config: Config, shared: dict[str, Any], norm: nn.LayerNorm | None):
        super().__init__(config.width, config.heads, **_attention(config, shared))
        self.text_norm = nnx.data(norm)

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "B S D"], text: Float[Array, "B T D"]
    ) -> Float[Array, "B S D"]:
        """What the text adds to each token."""
        query, *of_text = self._arrays(-1, "query", "key", "value")
        bias, *text_biases = self._arrays(-1, "query_bias", "key_bias", "value_bias")
        how: dict[str, Any] = {"precision": self.precision}
        if self.text_norm is None:
            q = ops.linear(x, query, bias, **how)
        else:
            q = ops.norm_linear(x, self.text_norm.as_op_norm(), query, bias, **how)
        k, v = ops.linear(text, tuple(of_text), tuple(text_biases), **how)
        q, k, v = (split_heads(one, self.head_dim) for one in (q, k, v))
        q, k = self._normalize_and_rotate(q, k, None)
        (out,) = self._arrays(0, "out")
        return ops.attention_linear(q, k, v, out, value_of(self.out_bias), causal=False, **how)


def noisy_of(
    config: Config, batch: Batch
) -> tuple[Float[Array, "B F H W C"], Float[Array, " B"], Float[Array, "B F H W C"]]:
    """Noisy videos, their times, which are shifted logit-normal, and their velocities, in FP32."""

    def one(latents: Array, seed: Array) -> tuple[Array, Array, Array]:
        of_time, of_noise = jax.random.split(jax.random.key(seed))
        time = shifted(jax.nn.sigmoid(jax.random.normal(of_time)), config.shift)
        noise = jax.random.normal(of_noise, latents.shape)
        return (1 - time) * latents + time * noise, time, noise - latents

    noisy, time, velocity = jax.vmap(one)(batch.latents.astype(jnp.float32), batch.seed)
    return noisy, time, velocity


def shifted(time: Float[Array, "..."], shift: float) -> Float[Array, "..."]:
    """Times from 0 to 1, moved towards 1 if `shift` is above 1."""
    return shift * time / (1 + (shift - 1) * time)


def _attention(config: Config, shared: dict[str, Any]) -> dict[str, Any]:
    norm = partial(
        nn.RMSNorm, config.width, epsilon=config.norm_eps, precision=config.precision,
        param_dtype=config.param_dtype,
    )  # fmt: skip
    biases = {"qkv_bias": True, "out_bias": True}
    norms = {"query_norm": norm(), "key_norm": norm()}
    return {**norms, **biases, "causal": False, "residual": False, **shared}


def _table(rngs: nnx.Rngs, rows: int, config: Config) -> nnx.Param:
    init = jax.nn.initializers.normal(config.width**-0.5)
    return weight(rngs, (1, rows, config.width), init=init, dtype=config.param_dtype)


def _waves(time: Float[Array, " B"], count: int) -> Float[Array, "B W"]:
    """Cosines, then sines, of frequencies from 1 to 1 / 10,000."""
    frequencies = jnp.exp(-math.log(10000) * jnp.arange(count // 2) / (count // 2))
    angle = time[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)


def _angles(config: Config) -> tuple[np.ndarray, ...]:
    """Cosine and sine of the angle of each token and pair: pairs of time, of height, of width."""
    side = config.head_dim // 6
    places = np.stack(np.unravel_index(np.arange(math.prod(config.grid)), config.grid), -1)
    angles = []
    for axis, pairs in enumerate((config.head_dim // 2 - 2 * side, side, side)):
        frequencies = 10000.0 ** -(np.arange(pairs) / pairs)
        angles.append(places[:, axis, None] * frequencies)
    angle = np.concatenate(angles, axis=1)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def _turned(
    x: Float[Array, "B S N H"], cos: Float[Array, "S P"], sin: Float[Array, "S P"]
) -> Float[Array, "B S N H"]:
    """Heads, each pair of neighbouring numbers turned by its angle."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:3], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)


def _to_patches(x: Float[Array, "B F H W C"], config: Config) -> Float[Array, "B S P"]:
    """The patches of latents in the order of the grid: columns, rows, frames and channels."""
    (f, h, w), (pf, ph, pw) = config.grid, config.patch

    def rearrange(x: Array) -> Array:
        x = x.reshape(len(x), f, pf, h, ph, w, pw, -1)
        return x.transpose(0, 1, 3, 5, 6, 4, 2, 7).reshape(len(x), f * h * w, -1)

    return _for_videos(rearrange, x)


def _from_patches(y: Float[Array, "B S P"], config: Config) -> Float[Array, "B F H W C"]:
    """Latents from patches of frames, rows, columns and channels."""
    (f, h, w), (pf, ph, pw) = config.grid, config.patch

    def rearrange(y: Array) -> Array:
        y = y.reshape(len(y), f, h, w, pf, ph, pw, config.channels)
        return y.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(len(y), *config.latents, config.channels)

    return _for_videos(rearrange, y)


def _for_videos(rearrange: Callable[[Array], Array], x: Array) -> Array:
    """x rearranged; over explicit axes of a mesh, the videos are sharded as before."""
    result: Array = shard_inside(rearrange, lambda: PartitionSpec(explicit_spec(x)[0]), x)
    return result
