"""What is between products in INT4 against its references: laws for the interpreter and the GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_to_past_laws import FORMATS, draw
from flax import nnx

from coat_jax import nn, ops
from coat_jax.kernels import few_rows, int4
from coat_jax.kernels.activation import HAVE_KERNELS, Limited
from coat_jax.nn.modular import make_modular
from coat_jax.numerics.cache_formats import decode_heads, encode_heads
from coat_jax.ops import few_rows as layers
from coat_jax.ops.quantized import quantize_weight
from coat_jax.ops.rotary import rotary_forward

NORMS = {
    "rms": ops.Norm(jnp.linspace(0.5, 2, 384)),
    "layer": ops.Norm(jnp.linspace(2, 0.5, 384), jnp.linspace(-1, 1, 384), "layer"),
    "none": None,
}


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def product(seed, rows, columns, parts=3):
    return int4.Product(normal(seed, parts, rows, columns), jnp.linspace(0.5, 2, rows))


def decoded(rows):
    """What rows stand for; the sums are those of the codes."""
    codes = np.asarray(rows.codes, np.float32)
    sums = codes.reshape(len(codes), -1, 128).sum(-1).T / 64
    np.testing.assert_allclose(rows.sums, sums, rtol=1e-5, atol=1e-3)
    return codes * np.asarray(rows.scale)[:, None]


def assert_rounded(rows, exact):
    """Each number is within half a step of E4M3, and the largest has the largest code."""
    exact = np.asarray(exact, np.float32).reshape(len(rows.codes), -1)
    top = np.abs(exact).max(1, keepdims=True)
    np.testing.assert_allclose(rows.scale, top[:, 0] / 448, rtol=1e-5)
    # The reference cancels where an activation is almost 0.
    bound = np.maximum(np.abs(exact) * 2**-4, top / 448 * 2**-10) * 1.001 + 1e-6 * top
    assert (np.abs(decoded(rows) - exact) <= bound).all()


class FewRowsLaws:
    """A module derives from it."""

    @pytest.mark.parametrize("kind", NORMS)
    def test_a_row_is_normalized_and_rounded(self, kind):
        x, norm = normal(0, 3, 384) * jnp.array([[1], [1e-3], [50]]) + 0.3, NORMS[kind]
        exact = x if norm is None else ops.norm(x, norm, precision="bf16")
        assert_rounded(jax.jit(few_rows.normalize)(x, norm), exact)

    def test_a_row_with_a_nan_is_lost_and_no_other(self):
        x = normal(0, 4, 256).at[1, 7].set(jnp.nan).at[2, 9].set(jnp.inf).at[3].set(0)
        rows = jax.jit(few_rows.normalize)(x, None)
        assert np.isfinite(rows.scale).tolist() == [True, False, False, True]
        assert rows.scale[3] == 1
        assert np.isfinite(np.asarray(rows.codes, np.float32)[[0, 3]]).all()

    @pytest.mark.parametrize("act", [*map(Limited, HAVE_KERNELS), Limited("silu", 1.0)], ids=str)
    def test_a_product_is_activated_and_rounded(self, act):
        gate, up = product(0, 3, 384), product(1, 3, 384)
        rows = jax.jit(few_rows.activate, static_argnums=2)(gate, up, act)
        how = {"activation": act.name, "limit": act.limit, "precision": "bf16"}
        assert_rounded(rows, ops.activate(gate.total(), up.total(), **how))

    @pytest.mark.parametrize("width", [64, 128])
    @pytest.mark.parametrize("format", FORMATS)
    def test_heads_are_rotated_and_stored(self, format, width):
        rows, heads, kv_heads = 3, 6, 2
        products = tuple(product(i, rows, n * width) for i, n in enumerate((heads, 2, 2)))
        cos, sin = ops.Rotary().cos_sin(jnp.array([0, 5, 900]), width)
        store = jax.jit(few_rows.store_heads, static_argnums=(3, 4))
        q, new = store(products, cos, sin, format, "float32")
        exact = [p.total().reshape(rows, 1, -1, width) for p in products]
        rotated = [rotary_forward(x, cos[:, None], sin[:, None]) for x in exact[:2]]
        np.testing.assert_allclose(q, rotated[0], atol=1e-5)
        for stored, tokens in zip(new, (rotated[1], exact[2]), strict=True):
            x = jnp.swapaxes(tokens, 1, 2)
            wanted = encode_heads(x, format)
            kinds = [jax.tree.map(lambda y: (y.shape, y.dtype), y) for y in (stored, wanted)]
            assert kinds[0] == kinds[1]
            assert stored.codes.shape[:3] == (rows, kv_heads, 1)
            # A scale may be on the other side of its rounding to BF16, and codes with it.
            got, wanted = (jnp.abs(decode_heads(y, "float32") - x).max() for y in (stored, wanted))
            assert got <= 1.02 * wanted + 1e-5

    @pytest.mark.parametrize(("kv_heads", "group", "width"), [(3, 1, 128), (2, 3, 64)])
    def test_parts_of_attention_are_combined(self, kv_heads, group, width):
        o = normal(0, 2, kv_heads, 5, group, width)
        log_sums = (10 * normal(1, 2, kv_heads, 5, group)).at[:, :, 3].set(-1e30)
        weights = jax.nn.softmax(log_sums * np.log(2), axis=2)
        exact = jnp.sum(weights[..., None] * o, axis=2)
        assert_rounded(jax.jit(few_rows.combine)(o, log_sums), exact)

    @pytest.mark.parametrize("rows", [(1, 1), (5, 1)])
    def test_an_mlp_is_that_of_its_ops(self, rows):
        mlp = nn.GatedMLP(256, 384, norm=nn.RMSNorm(256), limit=1.0, rngs=nnx.Rngs(0))
        make_modular(mlp, quantized)
        arrays = arrays_of(mlp, "gate", "up", "down")
        x = normal(0, *rows, 256)
        of_silu = partial(layers.gated_mlp, act=Limited("silu", 1.0))
        fast = jax.jit(of_silu, static_argnames="residual")
        for residual, wanted in ((True, mlp(x)), (False, mlp(x) - x)):
            assert_near(fast(x, mlp.norm.as_op_norm(), *arrays, residual=residual), wanted)

    @pytest.mark.parametrize("format", FORMATS)
    def test_attention_is_that_of_its_ops(self, format):
        attention = nn.Attention(
            256, 4, kv_heads=2, head_dim=64, norm=nn.RMSNorm(256), qkv_bias=True, rngs=nnx.Rngs(0),
            rotary=ops.Rotary(),
        )  # fmt: skip
        for name in ("query_bias", "key_bias", "value_bias"):
            bias = getattr(attention, name)
            bias[...] = normal(5, *bias.shape)
        make_modular(attention, quantized)
        arrays = arrays_of(attention, "query", "key", "value", "out")
        _, past, _ = draw(3, 150, 2, 2, 64, format)
        x, first = normal(0, 3, 1, 256), jnp.array([0, 70, 128])
        where = (141 - first)[:, None], ops.Visible(past, 1, first, 141)
        fast = jax.jit(layers.attention, static_argnums=4, static_argnames="residual")
        inputs = x, attention.norm.as_op_norm(), *arrays, attention.rotary, *where
        after, stored = attention.decode(x, *where)
        for residual, wanted in ((True, after), (False, after - x)):
            got, new = fast(*inputs, residual=residual)
            assert_near(got, wanted)
            assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, stored)


def quantized(name, weight, bias):
    del name
    return nn.QuantizedLinear(quantize_weight(weight[...], "int4"), bias)


def arrays_of(layer, *names):
    projections = [getattr(layer, name) for name in names]
    biases = [None if p.bias is None else p.bias[...] for p in projections]
    return [p.weight() for p in projections], biases


def assert_near(got, wanted):
    """But for numbers on the other side of a tie: codes, and the scales of a cache."""
    assert got.dtype == wanted.dtype
    assert jnp.linalg.norm(got - wanted) < 0.03 * jnp.linalg.norm(wanted)
