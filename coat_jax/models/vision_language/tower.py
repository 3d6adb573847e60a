"""A vision transformer: from pixels to a vector for each patch of an image.

    x = patches w + bias + positions           after a class token, if there is one
    x = layer(x)                               for each layer: attention to all patches, and an MLP

Layers compute and save in the tower's precision. The projection of patches is never in FP8: its sum
over three channels of a patch is short, and its input, the pixels, needs no gradient.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, UInt8

from coat_jax import nn, probes
from coat_jax.models.llama import EMBEDDING_INIT, run_layers, shard_batch, stack_layers
from coat_jax.models.vision_language.config import TowerConfig
from coat_jax.nn.parameters import value_of, vector, weight


class Unused(nnx.Variable):
    """A tensor of a Hugging Face folder that the model does not use. It has no gradient."""


class Tower(nnx.Module):
    """Images to features.

    Attributes:
        patch: [P, P, 3, D]: columns and rows of a patch, and its channels.
        patch_bias: [D], or None.
        positions: [tokens, D]
        class_token: [D], or None.
        first_norm, last_norm: a norm, or None.
        layers: as those of `coat.models.Llama`.
        unused: see `TowerConfig.unused`.
    """

    def __init__(self, config: TowerConfig, *, rngs: nnx.Rngs):
        dtype = config.param_dtype
        self.config = config
        draw = partial(weight, rngs, init=EMBEDDING_INIT, dtype=dtype)
        width, side = config.width, config.patch
        self.patch = draw((side, side, 3, width), (None, None, None, config.axes.fsdp))
        bias = vector(width, fill=0.0, dtype=dtype) if config.patch_bias else None
        self.patch_bias = nnx.data(bias)
        self.class_token = nnx.data(draw((width,)) if config.class_token else None)
        self.positions = draw((config.length, width))
        self.first_norm = nnx.data(_norm(config) if config.first_norm else None)
        self.layers = stack_layers(config, partial(_layer, config), rngs)
        self.last_norm = nnx.data(_norm(config) if config.last_norm else None)
        zeros = {name: jnp.zeros(shape, dtype) for name, shape in unused_shapes(config).items()}
        self.unused = nnx.data({name: Unused(array) for name, array in zeros.items()})

    def __call__(self, images: UInt8[Array, "N H W 3"]) -> Float[Array, "N T D"]:
        """The features of each image."""
        config = self.config
        if images.shape[1:] != (config.images.size, config.images.size, 3):
            raise ValueError(
                f"The tower sees images [images, {config.images.size}, {config.images.size}, 3], "
                f"not {images.shape}."
            )
        with probes.named("tower"):
            x = self._embed(images)
            if self.first_norm is not None:
                x = self.first_norm(x)
            x, _ = run_layers(config, self.layers, shard_batch(x, config.batch_axes))
            if self.last_norm is not None:
                with probes.named("last_norm"):
                    x = self.last_norm(x)
        return x[:, config.length - config.features :]

    def _embed(self, images: UInt8[Array, "N H W 3"]) -> Float[Array, "N T D"]:
        """The residual stream before the first layer."""
        config, dtype = self.config, self.config.dtype
        mean, std = (np.array(of, np.float32) for of in (config.images.mean, config.images.std))
        pixels = (images.astype(jnp.float32) / 255 - mean) / std
        x = _patches(pixels.astype(dtype), config.patch)
        x = x @ value_of(self.patch).reshape(-1, config.width).astype(dtype)
        if self.patch_bias is not None:
            x += value_of(self.patch_bias).astype(dtype)
        positions = value_of(self.positions).astype(dtype)
        if self.class_token is not None:
            first = jnp.broadcast_to(value_of(self.class_token).astype(dtype), x[:, :1].shape)
            x = jnp.concatenate([first, x], axis=1)
        if config.rounded_places:
            positions = positions[rounded_places(config.side)]
        return x + positions


def _layer(config: TowerConfig, key: Array) -> nn.TransformerBlock:
    shared: dict[str, Any] = {
        "precision": config.precision,
        "axes": config.axes,
        "param_dtype": config.param_dtype,
        "rngs": nnx.Rngs(key),
    }
    attention = nn.Attention(
        config.width,
        config.heads,
        norm=_norm(config),
        causal=False,
        qkv_bias=True,
        out_bias=True,
        **shared,
    )
    mlp = nn.MLP(
        config.width, config.ffn, norm=_norm(config), activation=config.activation, **shared
    )
    return nn.TransformerBlock(attention, mlp)


def _norm(config: TowerConfig) -> nn.LayerNorm:
    return nn.LayerNorm(
        config.width,
        epsilon=config.norm_eps,
        precision=config.precision,
        param_dtype=config.param_dtype,
    )


def _patches(pixels: Float[Array, "N H W 3"], side: int) -> Float[Array, "N T PP3"]:
    """The patches of images, row by row; each as its columns, rows and channels."""
    n, height, width, channels = pixels.shape
    x = pixels.reshape(n, height // side, side, width // side, side, channels)
    return x.transpose(0, 1, 3, 4, 2, 5).reshape(n, -1, side * side * channels)


def rounded_places(side: int) -> np.ndarray:
    """The place of each patch as Idefics3 computes it on a CPU: by fractions of the side, in FP32.

    On a GPU, which fuses products and sums, each patch would have its own place on every grid.
    """
    step = 1 / side
    index = np.arange(np.ceil((1 - step) / step))
    # torch.arange makes sixteen numbers in two vectors, which begin with a number in FP32. It makes
    # the rest one by one.
    first = np.where(index < len(index) // 16 * 16, index // 8 * 8, index)
    start = (step + step * first).astype(np.float32).astype(np.float64)
    borders = (start + step * (index - first)).astype(np.float32)
    fractions = np.arange(side, dtype=np.float32) * np.float32(1.0 / np.float32(side))
    at = np.searchsorted(borders, np.minimum(fractions, np.float32(1 - 1e-6)), side="right")
    return (at[:, None] * side + at).ravel()


def unused_shapes(config: TowerConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in `TowerConfig.unused`, by their names in the tower's folder.

    Weights are [inputs, outputs], as those of all layers.
    """
    width, ffn = config.width, config.ffn
    found: dict[str, tuple[int, ...]] = {}
    square = {"weight": (width, width), "bias": (width,)}
    norm: dict[str, tuple[int, ...]] = {"weight": (width,), "bias": (width,)}
    mlp = {
        "mlp.fc1.weight": (width, ffn),
        "mlp.fc1.bias": (ffn,),
        "mlp.fc2.weight": (ffn, width),
        "mlp.fc2.bias": (width,),
    }
    layer = mlp | {f"layer_norm{i}.{name}": shape for i in (1, 2) for name, shape in norm.items()}
    for one in "q", "k", "v", "out":
        layer |= {f"self_attn.{one}_proj.{name}": shape for name, shape in square.items()}
    head = mlp | {f"layernorm.{name}": shape for name, shape in norm.items()}
    head |= {f"attention.out_proj.{name}": shape for name, shape in square.items()}
    head |= {
        "probe": (1, 1, width),
        "attention.in_proj_weight": (3 * width, width),
        "attention.in_proj_bias": (3 * width,),
    }
    for number, kind in enumerate(config.unused, config.layers):
        prefix, shapes = {
            "layer": (f"encoder.layers.{number}", layer),
            "last_norm": ("post_layernorm", norm),
            "head": ("head", head),
        }[kind]
        found |= {f"{prefix}.{name}": shape for name, shape in shapes.items()}
    return found
