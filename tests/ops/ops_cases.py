"""What the layers are tried on, and their oracles.

In full precision the oracle is the plain formula in jnp, under JAX's own differentiation. In
FP8 it is the same formula on rounded operands: rounding is written again in FP64 NumPy, from
the definition of the formats, and a gradient passes through it unchanged (`through`).

Both sides sum in FP32 in their own order. Sums have up to 64 terms, so that they agree to
64 * 2^-24 = 4e-6 of what goes in: FP32 = 1e-5 of the largest result. A number that lies within
FP32's rounding of the middle between two codes may become either of them: where an operand was
computed, and not given, such numbers are one in 10^5, and the seeds are fixed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import coat_jax as coat
from coat_jax import ops
from coat_jax.kernels import gemm
from coat_jax.numerics.blocks import from_blocks, to_blocks
from coat_jax.numerics.formats import format_of

FP32 = 1e-5
PRESETS = {"bf16": coat.BF16, "fp8_linear": coat.FP8_LINEAR, "coat": coat.COAT}
PRESETS["coat_lean"] = coat.COAT_LEAN
PRESETS["coat_int8"] = coat.COAT_INT8
PRESETS["coat_bf16_forward"] = coat.COAT_BF16_FORWARD
PRESETS["coat_lean, rounded forward"] = dataclasses.replace(coat.COAT_LEAN, exact_forward=False)
FP8_PRESETS = {name: preset for name, preset in PRESETS.items() if name != "bf16"}


def draw(seed, *shapes, dtype=jnp.float32, over=1.0):
    """Normal numbers; weights are those `over` the root of their number of inputs."""
    rng = np.random.default_rng(seed)
    # Converted by NumPy, and not by jnp.asarray: JAX compiles a program for each shape.
    arrays = [jax.device_put((rng.standard_normal(s) / over).astype(dtype)) for s in shapes]
    return arrays if len(shapes) > 1 else arrays[0]


def weight(seed, inputs, outputs, dtype=jnp.float32):
    return draw(seed, (inputs, outputs), dtype=dtype, over=inputs**0.5)


def some_norm(kind, columns, seed=0, *, scale=True, shift=True, eps=1e-6):
    a, b = draw(seed, (columns,), (columns,), over=4)
    return ops.Norm(
        jax.device_put(1 + np.asarray(a)) if scale else None,
        b if shift and kind == "layer" else None,
        kind=kind,
        eps=eps,
    )


@functools.partial(jax.jit, static_argnums=0)
def value_and_pullback(f, dy, *args):
    y, pull = jax.vjp(f, *args)
    return y, pull(dy)


def pulled(f, *args, dy=None):
    """What f gives, the gradients of all arguments for outputs' gradients dy, and dy, drawn."""
    if dy is None:
        leaves, tree = jax.tree.flatten(jax.eval_shape(f, *args))
        normal = np.random.default_rng(99).standard_normal
        dy = tree.unflatten([jax.device_put(normal(y.shape).astype(y.dtype)) for y in leaves])
    return *value_and_pullback(f, dy, *args), dy


def same_gradients(f, g, *args, tolerance=FP32):
    """f and g give the same for `args`, and the same gradients."""
    assert_close(pulled(f, *args)[:2], pulled(g, *args)[:2], tolerance)


def assert_close(got, want, tolerance=FP32):
    """Each leaf of `got` is within `tolerance` of the largest magnitude of that of `want`."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name, wanted = jax.tree_util.keystr(path), np.asarray(b, np.float64)
        assert a.shape == b.shape, name
        atol = tolerance * np.max(np.abs(wanted), initial=1e-30)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), wanted, rtol=0, atol=atol, err_msg=name, equal_nan=False
        )


def assert_equal(got, want):
    """Bit for bit."""
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(
            np.float32(a), np.float32(b), err_msg=jax.tree_util.keystr(path)
        )


def distance(got, want):
    """The length of the difference over that of `want`, for each leaf."""
    # In NumPy: JAX compiles a program for each shape.
    one, other = ([np.float64(leaf) for leaf in jax.tree.leaves(tree)] for tree in (got, want))
    pairs = zip(one, other, strict=True)
    return np.array([np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs])


# --- rounding, in FP64 -----------------------------------------------------------------------


def least_power(largest, dtype):
    """The least power of two, from 2^-126 on, with which `largest` fits the format."""
    power = np.full(np.shape(largest), -126)
    for candidate in range(-126, 128):
        power = np.where(largest > format_of(dtype).max * 2.0**candidate, candidate + 1, power)
    return 2.0**power


def nearest(x, dtype):
    """The nearest number of the format, ties to even, by `ml_dtypes`; x fits it."""
    return x.astype(dtype).astype(np.float64)


round_at_random = jax.jit(gemm.operand, static_argnames=("dtype", "stream"))


def rounded(x, dtype, stream=None):
    """What FP8 makes of a tensor with one scale, in FP64.

    Stochastic rounding, with a stream, is that of `gemm.operand`, which has laws of its own.
    """
    x = np.asarray(x, np.float64)
    scale = least_power(np.max(np.abs(x), initial=0), dtype)
    if stream is None:
        return nearest(x / scale, dtype) * scale
    x, at = np.float32(x), np.float32(scale)
    return np.float64(round_at_random(x, dtype, scale=at, stream=stream).values) * scale


def rounded_blocks(x, dtype, size):
    """What FP8 makes of an array with one scale per block, in FP64."""
    x = np.asarray(x, np.float64)
    if size is None:
        return x
    parts = [x[..., i : i + size] for i in range(0, x.shape[-1], size)]
    scales = [least_power(np.abs(p).max(-1, keepdims=True), dtype) for p in parts]
    return np.concatenate(
        [nearest(p / s, dtype) * s for p, s in zip(parts, scales, strict=True)], axis=-1
    )


def through(x, dtype, size, *, stochastic=False, antithetic=False):
    """`rounded_blocks` inside a traced function; the gradient passes unchanged.

    Stochastic rounding is that of `to_blocks`, which has laws of its own.
    """
    if size is None:
        return x
    if stochastic:
        saved = to_blocks(x, dtype, size=size, stochastic=True, antithetic=antithetic)
        exact = from_blocks(saved, size=size)
        return x + jax.lax.stop_gradient(exact - x)
    like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    exact = jax.pure_callback(
        lambda x: rounded_blocks(x, dtype, size).astype(np.float32), like, jax.lax.stop_gradient(x)
    )
    return x + jax.lax.stop_gradient(exact - x)


# --- the layers, plainly ---------------------------------------------------------------------


def plain_norm(x, norm):
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + norm.eps)
    y = y if norm.scale is None else y * norm.scale
    return y if norm.shift is None else y + norm.shift


def plain_attention(q, k, v, *, causal=True, window=None, segments=None, scale=None):
    """Query by query and key by key, all scores at once."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = scale * jnp.einsum("bsnh,btnh->bnst", q, k)
    s, t = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
    sees = np.full((1, 1, len(s), len(t)), True)
    if causal:
        sees = sees & (t <= s)
    if window is not None:
        sees = sees & (t > s - window)
    if segments is not None:
        sees = sees & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jnp.exp(scores - jnp.max(jnp.where(sees, scores, -1e30), axis=-1, keepdims=True))
    weights = jnp.where(sees, weights, 0)
    weights = weights / weights.sum(-1, keepdims=True)
    return jnp.einsum("bnst,btnh->bsnh", weights, v)


# --- a whole layer ---------------------------------------------------------------------------

HEADS, HEAD_DIM = 4, 16
WIDTH, FFN = HEADS * HEAD_DIM, 176


def layer_params(seed=0, dtype=jnp.float32):
    """The weights of one Llama layer with half as many key heads as heads."""
    kv = WIDTH // 2
    return {
        "attention_norm": some_norm("rms", WIDTH, seed),
        "qkv": tuple(weight(seed + i, WIDTH, n, dtype) for i, n in enumerate((WIDTH, kv, kv))),
        "out": weight(seed + 3, WIDTH, WIDTH, dtype),
        "mlp_norm": some_norm("rms", WIDTH, seed + 4),
        "gate": weight(seed + 5, WIDTH, FFN, dtype),
        "up": weight(seed + 6, WIDTH, FFN, dtype),
        "down": weight(seed + 7, FFN, WIDTH, dtype),
    }


def layer(params, x, precision):
    """One Llama layer, x [B, S, D] to [B, S, D]."""
    x, q, k, v = ops.norm_qkv(
        x,
        params["attention_norm"],
        params["qkv"],
        head_dim=HEAD_DIM,
        rotary=ops.Rotary(),
        precision=precision,
    )
    x = x + ops.attention_linear(q, k, v, params["out"], precision=precision)
    weights = params["gate"], params["up"], params["down"]
    return ops.gated_mlp(x, params["mlp_norm"], *weights, precision=precision)
