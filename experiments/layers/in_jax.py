"""Stacks of Llama layers made of coat_jax's ops, in each precision."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import coat_jax as coat
from coat_jax import ops
from coat_jax.training.compilation import NO_TRITON_GEMM
from experiments.layers import Measured, Sizes, Stack, measure

PRESETS = {
    "BF16": coat.BF16,
    "FP8_LINEAR": coat.FP8_LINEAR,
    "COAT": coat.COAT,
    "COAT_LEAN": coat.COAT_LEAN,
    "COAT_INT8": coat.COAT_INT8,
    "COAT_BF16_FORWARD": coat.COAT_BF16_FORWARD,
    "COAT_PAPER": coat.COAT_PAPER,
}

Weights = dict[str, jax.Array]


def cases(sizes: Sizes, depths: list[int]) -> Iterator[tuple[str, Measured]]:
    """Each preset's stacks, measured."""
    for name, precision in PRESETS.items():
        stacks = {depth: prepare(sizes, depth, precision) for depth in depths}
        yield f"coat_jax {name}", measure(stacks)


def prepare(sizes: Sizes, depth: int, precision: coat.Precision) -> Stack:
    """A stack with its programs, compiled as the trainer does."""
    layers, x = create(sizes, depth, jax.random.key(0))
    dy = jnp.roll(x, 1, axis=1)
    options = NO_TRITON_GEMM if precision.forward_products != "fp8" else None
    layers_only = partial(stack, sizes, precision)
    forward = jax.jit(layers_only).lower(layers, x).compile(options)
    both = jax.jit(partial(step, sizes, precision)).lower(layers, x, dy).compile(options)
    results: list[Any] = [None]

    def run(program: Any, *arguments: Any) -> None:
        results[0] = None
        results[0] = program(layers, x, *arguments)

    def wait() -> None:
        jax.block_until_ready(results[0])
        results[0] = None

    saved = saved_bytes(layers_only, layers, x)
    return Stack(lambda: run(both, dy), lambda: run(forward), wait, float(saved))


def saved(sizes: Sizes, titles: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """For each preset the U counted and, on a GPU, the U allocated, by the title of an operator."""
    on_gpu = jax.default_backend() == "gpu"
    w = abstract_weights(sizes)
    for name, precision in PRESETS.items():
        parts = {titles[part]: of_part for part, of_part in operators(sizes, precision).items()}
        counted = {at: saved_bytes(f, w, *arrays) / sizes.unit for at, (f, arrays) in parts.items()}
        allocated = {
            at: _allocated(f, w, arrays) / sizes.unit for at, (f, arrays) in parts.items() if on_gpu
        }
        yield {"way": name, "counted": counted, "allocated": allocated}


def operators(
    sizes: Sizes, precision: coat.Precision
) -> dict[str, tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]]:
    """The parts of a layer and the layer, with the shapes of their arguments besides weights."""
    x = _abstract(sizes.batch, sizes.sequence, sizes.width)
    heads = [_abstract(*x.shape[:2], sizes.width // sizes.head, sizes.head)] * 3
    return {
        "attention_input": (partial(attention_input, sizes, precision), [x]),
        "attention": (partial(attention, precision), heads),
        "mlp": (partial(mlp, precision), [x]),
        "forward": (partial(layer, sizes, precision), [x]),
    }


def abstract_weights(sizes: Sizes) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a layer's weights."""
    matrices = {name: _abstract(*shape) for name, shape in sizes.weights.items()}
    return matrices | dict.fromkeys(("norm", "mlp_norm"), _abstract(sizes.width))


def _abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def saved_bytes(function: Callable[..., Any], weights: Any, *arrays: Any) -> int:
    """The bytes that the gradient of `function` needs besides its weights: counted, not run."""
    _, saved = jax.eval_shape(partial(forward_saving, function), weights, *arrays)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in saved)


def forward_saving(function: Callable[..., Any], weights: Any, *arrays: Any) -> tuple[Any, Any]:
    """The outputs, and the arrays that the gradient needs, each once; no weights, no scalars."""
    y, pull = jax.vjp(function, weights, *arrays)
    ours = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(weights)}
    saved = {id(leaf): leaf for leaf in jax.tree.leaves(pull) if leaf.ndim}
    return y, [leaf for leaf in saved.values() if (leaf.shape, leaf.dtype) not in ours]


def _allocated(function: Callable[..., Any], weights: Any, arrays: list[Any]) -> int:
    """The bytes that the allocator holds for the gradient of `function` once it has run."""
    device = jax.local_devices()[0]

    def in_use() -> int:
        return int((device.memory_stats() or {})["bytes_in_use"])

    zeros = partial(jax.tree.map, lambda a: jax.device_put(jnp.zeros(a.shape, a.dtype), device))
    w = zeros(weights)
    before = in_use()
    y, saved = jax.block_until_ready(jax.jit(partial(forward_saving, function))(w, *zeros(arrays)))
    held = in_use() - before - sum(leaf.nbytes for leaf in jax.tree.leaves(y))
    del saved
    return held


@partial(jax.jit, static_argnums=(0, 1))
def create(sizes: Sizes, depth: int, key: jax.Array) -> tuple[list[Weights], jax.Array]:
    """Random weights and a random input."""
    shapes = sizes.weights

    def one(key: jax.Array) -> Weights:
        keys = jax.random.split(key, len(shapes))
        weights = {
            name: jax.random.normal(k, shape, jnp.bfloat16) * shape[0] ** -0.5
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        ones = jnp.ones(sizes.width, jnp.bfloat16)
        return weights | {"norm": ones, "mlp_norm": ones}

    *keys, last = jax.random.split(key, depth + 1)
    x = jax.random.normal(last, (sizes.batch, sizes.sequence, sizes.width), jnp.bfloat16)
    return [one(k) for k in keys], x


def step(
    sizes: Sizes, precision: coat.Precision, layers: list[Weights], x: jax.Array, dy: jax.Array
) -> Any:
    """The stack's output, and the gradients of weights and input for a given output gradient.

    There is no loss, because its reduction would be measured, too.
    """
    y, pull = jax.vjp(partial(stack, sizes, precision), layers, x)
    return y, pull(dy)


def stack(
    sizes: Sizes, precision: coat.Precision, layers: list[Weights], x: jax.Array
) -> jax.Array:
    """One layer after the other, unrolled."""
    for w in layers:
        x = layer(sizes, precision, w, x)
    return x


def layer(sizes: Sizes, precision: coat.Precision, w: Weights, x: jax.Array) -> jax.Array:
    """Llama's layer: the three operators below."""
    x, q, k, v = attention_input(sizes, precision, w, x)
    return mlp(precision, w, x + attention(precision, w, q, k, v))


def attention_input(
    sizes: Sizes, precision: coat.Precision, w: Weights, x: jax.Array
) -> tuple[jax.Array, ...]:
    """The norm, the projections to query, key and value, and rotary embeddings."""
    weights, rotary = (w["q"], w["k"], w["v"]), ops.Rotary()
    return ops.norm_qkv(
        x, ops.Norm(w["norm"]), weights, head_dim=sizes.head, rotary=rotary, precision=precision
    )


def attention(
    precision: coat.Precision, w: Weights, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Attention and the output projection."""
    return ops.attention_linear(q, k, v, w["o"], precision=precision)


def mlp(precision: coat.Precision, w: Weights, x: jax.Array) -> jax.Array:
    """From the second norm to the residual sum."""
    norm = ops.Norm(w["mlp_norm"])
    return ops.gated_mlp(x, norm, w["gate"], w["up"], w["down"], precision=precision)
