"""Where JAX refuses to promote dtypes or ranks without being told; and NumPy's arrays in FP64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops


def routed(x, router, bias):
    """Weights of experts, times the penalties of the router."""
    logits = ops.router_logits(x, router)
    experts, weights = ops.route(logits, 2, scores="sigmoid", normalized=True, bias=bias)
    counted = jnp.arange(4) < 3
    balance = ops.balance_loss(logits, experts, scores="sigmoid", counted=counted)
    return jnp.stack([jnp.sum(weights), balance, ops.router_z_loss(logits, counted)])


LAYERS = {
    "linear": lambda x, w, v: ops.linear(x, w, v[:256], precision=coat.COAT),
    "norm_linear": lambda x, w, v: ops.norm_linear(x, ops.Norm(v[:128]), w, precision=coat.COAT),
    "gated_mlp": lambda x, w, v: ops.gated_mlp(
        x, ops.Norm(v[:128]), w, w + 1, w.T, limit=2.0, precision=coat.COAT
    ),
    "qkv": lambda x, w, v: ops.norm_qkv(
        x[None], ops.Norm(v[:128]), (w, w[:, :64], w[:, 64:128]), head_dim=32, rotary=ops.Rotary()
    )[1],
    "embedding": lambda x, w, v: ops.embedding(w, jnp.arange(4)),
    "router": lambda x, w, v: routed(x, w[:, :8], v[:8]),
    "cross_entropy": lambda x, w, v: ops.cross_entropy(x, w, jnp.arange(4), z_loss=1e-4),
}


def arrays(dtype):
    draw = np.random.default_rng(0).standard_normal
    shapes = {"x": (4, 128), "w": (128, 256), "v": (300,)}
    return {name: jnp.asarray(draw(shape), dtype) for name, shape in shapes.items()}


def assert_same_program(function, *arguments):
    """Where JAX is strict the function is traced anew, to the program that it ever is."""
    program = jax.jit(function)
    wanted = program.lower(*arguments).as_text()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert program.lower(*arguments).as_text() == wanted


def test_layers_have_the_gradients_that_they_ever_have():
    def total(x, w, v):
        outputs = [layer(x, w, v).astype(jnp.float32) for layer in LAYERS.values()]
        return sum(jnp.sum(jnp.square(y)) for y in outputs)

    assert_same_program(jax.grad(total, argnums=(0, 1)), *arrays(jnp.bfloat16).values())


def test_simulated_formats_round_as_ever():
    quantizers = [
        coat.quantizer.Quantizer(name, over=over, fit=fit, size=16)
        for name in ("E4M3", "E2M1", "INT8")
        for over, fit in (("channel", "max"), ("block", "mse"))
    ]

    def all_ways(x):
        values = [quantizer(x) for quantizer in quantizers]
        return values, [coat.quantizer.sqnr_bits(x, y) for y in values]

    assert_same_program(all_ways, arrays(jnp.bfloat16)["w"])


FP64 = {
    "quantized_linear": lambda x, w: ops.quantized_linear(x, ops.quantize_weight(w, fit="max")),
    "adapted_linear": lambda x, w: ops.adapted_linear(
        x, ops.freeze(w), tuple(map(jnp.asarray, (w[:, :2], w[:2])))
    ),
    "Quantizer": lambda x, w: coat.quantizer.Quantizer("E4M3")(x),
}


@pytest.mark.parametrize("name", FP64)
def test_numpy_arrays_in_fp64_count_as_fp32(name):
    """Without a warning. In one program arrays of NumPy stay what they are: no arguments of it."""
    x, w = (np.random.default_rng(0).standard_normal(shape) for shape in ((4, 32), (32, 8)))
    both = jax.jit(lambda: (FP64[name](x, w), FP64[name](jnp.asarray(x), jnp.asarray(w))))
    found, wanted = both()
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, wanted)
