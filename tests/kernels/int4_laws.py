"""The kernel of INT4 weights against its reference: laws for the interpreter and the GPU."""

from functools import reduce

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
    @pytest.mark.parametrize("rows", [5, 40])
    def test_a_round_of_groups_may_begin_anywhere(self, rows, zero, monkeypatch):
        """The 33 groups are one part, whose last step of several groups is short."""
        monkeypatch.setattr(int4, "PROGRAMS", 1)
        x, weight = rows_of(rows, 4224), weight_of(300, 4224, zero)
        (got,) = jax.jit(products)(x, [weight])
        exact = np.asarray(x, np.float64) @ np.asarray(four_bits.values(*weight), np.float64).T
        assert np.abs(got - exact).max() < 2**-10 * np.abs(exact).max()

    @pytest.mark.parametrize("number", [0, 1])
    @pytest.mark.parametrize("alone", [True, False])
    def test_codes_are_expanded_to_the_last_bit(self, alone, number, monkeypatch):
        """On a mesh, the scales of channels are found before."""
        monkeypatch.setattr(int4, "on_one_device", lambda: alone)
        weight = weight_of(*self.sizes[number])
        got, of_channel = jax.jit(int4.expand)(weight.codes, weight.scale)
        wanted, scale = four_bits.expand(weight.codes, weight.scale)
        np.testing.assert_array_equal(got, wanted)
        np.testing.assert_array_equal(of_channel, scale)
        values = np.asarray(got, np.float32) * np.asarray(of_channel)[:, None]
        np.testing.assert_array_equal(values, four_bits.values(*weight))

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

    @pytest.mark.parametrize("zero", [False, True])
    @pytest.mark.parametrize("rows", [1, 5, 33])
    @pytest.mark.parametrize("number", [0, 1])
    def test_a_product_is_added_in_its_launch(self, rows, number, zero):
        """To the last bit in BF16 and FP16; with FP32, GPUs may multiply and add in one step."""
        channels, inputs = self.sizes[number]
        weight = weight_of(channels, inputs, zero)
        x = int4.Rows.of(rows_of(rows, inputs), jnp.linspace(0.5, 2, rows) / 512)
        stream = jax.random.normal(jax.random.key(2), (rows, channels))
        (product,) = jax.jit(int4.products_of_few_rows)(x, [weight])
        assert len(product.parts) > 1
        in_order = reduce(np.add, np.asarray(product.parts)) * np.asarray(x.scale)[:, None]
        add = jax.jit(int4.add_product)
        assert str(jax.make_jaxpr(add)(stream, x, weight)).count("triton_kernel[") == 1
        for dtype, tolerance in (("bfloat16", 0), ("float16", 0), ("float32", 1e-6)):
            before = stream.astype(dtype)
            got, wanted = add(before, x, weight), np.asarray(before) + in_order.astype(before.dtype)
            assert got.dtype == wanted.dtype
            got, wanted = np.float32(got), np.float32(wanted)
            np.testing.assert_allclose(got, wanted, tolerance, tolerance)
            # XLA may leave out the rounding of the product, or add the parts in another order.
            near = np.float32(product.added_to(before))
            np.testing.assert_allclose(got, near, 0, 2**-7 * np.abs(in_order).max())

    def test_rows_can_be_added_to_several_streams(self):
        """A launch counts its programs, from 0."""
        x = int4.Rows.of(rows_of(2, 256), jnp.ones(2))
        weight, streams = weight_of(96, 256), jnp.arange(4 * 2 * 96.0).reshape(4, 2, 96)

        def all_of_them(x, weight):
            return jnp.stack([int4.add_product(stream, x, weight) for stream in streams])

        got = jax.jit(all_of_them)(x, weight) - streams
        np.testing.assert_allclose(got, jnp.broadcast_to(got[:1], got.shape), rtol=1e-4, atol=1e-2)
