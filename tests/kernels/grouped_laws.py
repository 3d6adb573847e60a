"""The kernels for experts against their references: laws for the interpreter and the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import E4M3, E5M2, ops
from coat_jax.kernels import gemm, grouped, routing
from coat_jax.kernels.activation import Limited, activate, activate_backward, activation_backward
from coat_jax.kernels.gemm import Operand
from coat_jax.numerics.blocks import from_blocks, to_blocks

ROUTES = {
    "random": lambda rng, count, shape: rng.integers(0, count, shape),
    "skewed": lambda rng, count, shape: (count * rng.random(shape) ** 4).astype(int),
    "empty experts": lambda rng, count, shape: rng.choice([1, 3], shape),
    "the last has all": lambda rng, count, shape: np.full(shape, count - 1),
}
PRECISIONS = {
    "bf16": coat.BF16,
    "coat": coat.COAT,
    "coat_paper": coat.COAT_PAPER,
    "fp8_linear": coat.FP8_LINEAR,
    "coat_bf16_forward": coat.COAT_BF16_FORWARD,
    "stochastic": dataclasses.replace(coat.COAT, stochastic_backward=True),
}


def off(got, wanted):
    got, wanted = (np.asarray(x, np.float64) for x in (got, wanted))
    assert got.shape == wanted.shape
    return np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-30)


class GroupedLaws:
    """A module derives from it, and chooses sizes.

    Attributes:
        tokens: how many, and how many choices each has.
        experts: how many.
        widths: of x and of the hidden layer; no multiples of a block.
        dtype: of x and the weights.
        exact: how far sums of the same products are apart.
        alike: how far MLPs are apart, in which such sums may be rounded to neighbouring codes.
    """

    tokens = 150, 3
    experts = 5
    widths = 96, 136
    dtype = "float32"
    exact = 1e-5
    alike = 1e-3

    def draw(self, seed, *shape):
        x = np.random.default_rng(seed).standard_normal(shape)
        return jnp.asarray(x / shape[-2] ** 0.5, self.dtype)

    def groups(self, route="random", aligned=routing.ALIGNED):
        chosen = ROUTES[route](np.random.default_rng(0), self.experts, self.tokens)
        return routing.group(jnp.asarray(chosen, jnp.int32), self.experts, aligned)

    def weight(self, seed, layout, scale=None):
        """The weight for the reference, and for the kernel."""
        w = self.draw(seed, self.experts, *self.widths)
        straight = gemm.operand(w, E4M3, scale=scale)
        turned = Operand(None, jnp.transpose(straight.values, (2, 0, 1)), straight.scale)
        return straight, straight if layout == "straight" else turned

    def gradient(self, seed, columns, groups):
        dy = groups.of_tokens(self.draw(seed, self.tokens[0], columns).astype(jnp.float32))
        return gemm.operand(dy, E5M2, scale=jnp.float32(2.0**-13))

    @pytest.mark.parametrize("route", ROUTES)
    def test_rows_are_multiplied_by_the_weight_of_their_expert(self, route):
        groups = self.groups(route)
        x = gemm.operand(self.draw(1, self.tokens[0], self.widths[0]), E4M3)
        w, turned = self.weight(2, "transposed")
        how = {"of_tokens": True, "dtype": self.dtype}
        wanted = grouped.product(x, w, groups, implementation="xla", **how)
        got = grouped.product(x, turned, groups, implementation="triton", **how)
        assert off(got, wanted) < self.exact
        assert not np.any(np.asarray(got, np.float32)[np.asarray(groups.tokens) < 0])

    def test_numbers_that_are_not_rounded_are_multiplied_too(self):
        """From a weight whose columns are contiguous."""
        groups = self.groups()
        x, w = (
            self.draw(1, self.tokens[0], self.widths[0]),
            self.draw(2, self.experts, *self.widths),
        )
        pair = Operand(x, None, None), Operand(w, None, None)
        got, wanted = (
            grouped.product(*pair, groups, self.dtype, how, of_tokens=True)
            for how in ("triton", "xla")
        )
        assert off(got, wanted) < max(self.exact, 1e-3)  # TF32
        rows = groups.of_tokens(x)
        pair = Operand(rows, None, None), Operand(got, None, None)
        got, wanted = (
            grouped.outer_product(*pair, groups, self.dtype, how) for how in ("triton", "xla")
        )
        assert off(got, wanted) < max(self.exact, 1e-3)

    @pytest.mark.parametrize("weighted", [True, False])
    def test_the_rows_of_each_token_are_added(self, weighted):
        groups = self.groups("skewed")
        rows = self.draw(1, len(groups.choices), self.widths[0])
        weights = self.draw(2, *self.tokens) if weighted else None
        got, wanted = (
            routing.combine(rows, groups, self.dtype, how, weights) for how in ("triton", "xla")
        )
        assert got.dtype == wanted.dtype
        assert off(got, wanted) < self.exact

    def test_two_products_are_added(self):
        groups, columns = self.groups("skewed"), self.widths[1]
        dy = [self.gradient(seed, columns, groups) for seed in (1, 2)]
        (first, _), (second, _) = (self.weight(s, "straight", jnp.float32(2.0**-6)) for s in (3, 4))
        got, wanted = (
            grouped.product_transposed(dy, [first, second], groups, self.dtype, how)
            for how in ("triton", "xla")
        )
        assert off(got, wanted) < self.exact

    @pytest.mark.parametrize("route", ROUTES)
    def test_rows_of_an_expert_are_summed(self, route):
        groups = self.groups(route)
        x, dy = (self.gradient(i + 1, n, groups) for i, n in enumerate(self.widths))
        x = gemm.operand(x.values.astype(jnp.float32) * x.scale, E4M3)
        turned = [Operand(None, side.values.T, side.scale) for side in (x, dy)]
        wanted = grouped.outer_product(x, dy, groups, self.dtype, "xla")
        got = grouped.outer_product(*turned, groups, self.dtype, "triton")
        assert off(got, wanted) < self.exact
        assert not np.any(np.asarray(got, np.float32)[np.asarray(groups.sizes) == 0])

    def test_rows_are_gathered_as_columns(self):
        groups = self.groups()
        codes = gemm.operand(self.draw(1, self.tokens[0], self.widths[0]), E4M3).values
        turned = grouped.gather_transposed(codes, groups)
        np.testing.assert_array_equal(np.float32(turned), np.float32(groups.of_tokens(codes)).T)

    @pytest.mark.parametrize("limit", [None, 0.1])
    def test_rows_of_the_activations_gradient_are_weighted(self, limit):
        act, rows, columns = Limited("silu", limit), 70, self.widths[1]
        hidden = [to_blocks(self.draw(i, 1, rows, columns), size=16) for i in range(2)]
        da, weights = self.draw(3, 1, rows, columns), self.draw(4, 1, rows)
        scales = jnp.float32(2.0**-10), [jnp.float32(2.0**-17)] * 2
        recomputed, codes, dots = activation_backward(
            hidden, da, act, *scales, 16, E5M2, weights=weights
        )
        values = [from_blocks(h, size=16) for h in hidden]
        a = activate(values, act)
        weighted = a[0] * weights[0, :, None]
        assert off(recomputed[:, 0].T.astype(jnp.float32) * scales[0], weighted) < 0.04
        assert off(dots, jnp.sum(da.astype(jnp.float32) * a, axis=-1)) < 1e-5
        wanted = activate_backward(values, da * weights[..., None], act)
        for (straight, turned), d in zip(codes, wanted, strict=True):
            assert off(straight.astype(jnp.float32) * 2.0**-17, d) < 0.08
            np.testing.assert_array_equal(
                np.float32(turned), np.float32(jnp.transpose(straight, (2, 0, 1)))
            )

    @pytest.mark.parametrize("name", PRECISIONS)
    @pytest.mark.parametrize("route", ["skewed", "empty experts"])
    def test_the_mlp_and_its_gradients_are_those_of_xla(self, name, route):
        experts = ROUTES[route](np.random.default_rng(0), self.experts, self.tokens)
        width, hidden = self.widths
        x = self.draw(1, self.tokens[0], width) * 3
        gate, up = (self.draw(i, self.experts, width, hidden) for i in (2, 3))
        down, weights = self.draw(4, self.experts, hidden, width), self.draw(5, *self.tokens)
        dy = self.draw(6, *x.shape)

        def of(implementation):
            def f(x, gate, up, down, weights):
                how = {"precision": PRECISIONS[name], "implementation": implementation}
                how["limit"] = 1.0 if name == "stochastic" else None
                return ops.grouped_mlp(x, gate, up, down, experts, weights, **how)

            y, pull = jax.vjp(f, x, gate, up, down, weights)
            return y, *pull(dy)

        for got, wanted in zip(of("triton"), of("xla"), strict=True):
            assert off(got, wanted) < self.alike
