"""The kernel of INT4 weights against its reference: laws for the interpreter and the GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coat_jax.kernels import int4
from coat_jax.numerics import four_bits
from coat_jax.numerics.formats import E4M3, nearest


def weight_of(channels, inputs, zero=False):
    """A weight whose groups differ in size."""
    keys = jax.random.split(jax.random.key(0), 3)
    groups = inputs // four_bits.GROUP
    size = jnp.exp2(jax.random.randint(keys[1], (channels, groups), -3, 1).astype(jnp.float32))
    w = jax.random.normal(keys[0], (channels, inputs)) * jnp.repeat(size, four_bits.GROUP, axis=1)
    scale = four_bits.group_scales(w)
    zeros = jax.random.randint(keys[2], scale.shape, 0, 16).astype(jnp.uint8) if zero else None
    return int4.Weight(four_bits.encode(w, scale), scale, zeros)


def rows_of(rows, inputs):
    """FP8 codes."""
    return nearest(30 * jax.random.normal(jax.random.key(1), (rows, inputs)), E4M3).astype(E4M3)


def products(x, weights):
    rows = int4.Rows.of(x, jnp.ones(x.shape[0]))
    return [product.total() for product in int4.products_of_few_rows(rows, weights)]


class Int4Laws:
    """A module derives from it."""

    sizes = ((96, 256), (1984, 1408))  # of which the last part is short

    @pytest.mark.parametrize("zero", [False, True])
    @pytest.mark.parametrize("rows", [1, 5, 16, 33])
    @pytest.mark.parametrize("number", [0, 1])
    def test_few_rows_are_multiplied_as_many(self, rows, number, zero):
        channels, inputs = self.sizes[number]
        x, weight = rows_of(rows, inputs), weight_of(channels, inputs, zero)
        (got,) = jax.jit(products)(x, [weight])
        exact = np.asarray(x, np.float64) @ np.asarray(four_bits.values(*weight), np.float64).T
        # Products are exact; sums are in FP32, or lose up to 2^-13 of themselves (`gemm`).
        assert np.abs(got - exact).max() < 2**-10 * np.abs(exact).max()

    @pytest.mark.parametrize("zero", [False, True])
    @pytest.mark.parametrize("channels", [(96, 40), (200, 64, 72)])
    def test_several_weights_of_one_input_share_a_launch(self, channels, zero):
        x = rows_of(3, 384)
        weights = [weight_of(n, 384, zero) for n in channels]
        together = jax.jit(products)
        assert str(jax.make_jaxpr(together)(x, weights)).count("triton_kernel[") == 1
        for weight, got in zip(weights, together(x, weights), strict=True):
            exact = np.asarray(x, np.float64) @ np.asarray(four_bits.values(*weight), np.float64).T
            assert np.abs(got - exact).max() < 2**-10 * np.abs(exact).max()
