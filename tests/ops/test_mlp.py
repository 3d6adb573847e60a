"""Laws of MLPs: in full precision the plain formula, in FP8 that of the layers it is made of.

In FP8 the oracle composes norm_linear and linear, whose own oracle is the rounding itself
(test_linear.py), and rounds to blocks in FP64 what lies between them.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import (
    FFN,
    WIDTH,
    assert_close,
    distance,
    draw,
    plain_norm,
    pulled,
    rounded,
    same_gradients,
    some_norm,
    through,
    weight,
)

import coat_jax as coat
from coat_jax import ops

D, F = 24, 40
FORMULAS = {
    "silu": lambda x: x / (1 + jnp.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + jax.lax.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x * 0.5 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + jnp.exp(-1.702 * x)),
    "relu": lambda x: jnp.where(x > 0, x, 0),
    "relu2": lambda x: jnp.where(x > 0, x, 0) ** 2,
}
# The activation, the norm, whether there is a residual stream, and the limit of gate and up.
CASES = [
    ("silu", "rms", True, 0.7),
    ("gelu", "layer", True, None),
    ("gelu_tanh", None, False, 0.1),
    ("quick_gelu", "layer", True, 3.0),
    ("relu", "rms", False, None),
    ("relu2", None, True, 0.7),
]


def gated_args(kind=None):
    norm = kind and some_norm(kind, D)
    return draw(1, (2, 3, D)), norm, weight(2, D, F), weight(3, D, F), weight(4, F, D)


def gated(act, gate, up, limit):
    """act(gate) * up, both limited."""
    if limit is not None:
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
    return act(gate) * up


def plain_args(kind=None):
    x, norm, _, up, down = gated_args(kind)
    return x, norm, up, down, draw(5, (F,)), draw(6, (D,))


def test_full_precision_is_the_plain_formula():
    def f(every):
        settings = [
            ({"activation": name, "residual": residual, "precision": coat.BF16}, limit)
            for name, _, residual, limit in CASES
        ]
        return [
            (ops.gated_mlp(*gated, limit=limit, **how), ops.mlp(*plain, **how))
            for (gated, plain), (how, limit) in zip(every, settings, strict=True)
        ]

    def formula(every):
        results = []
        for (of_gated, plain), (name, _, residual, limit) in zip(every, CASES, strict=True):
            act = FORMULAS[name]
            x, norm, gate, up, down = of_gated
            n = plain_norm(x, norm)
            first = residual * x + gated(act, n @ gate, n @ up, limit) @ down
            x, norm, up, down, up_bias, down_bias = plain
            second = act(plain_norm(x, norm) @ up + up_bias) @ down + down_bias
            results.append((first, residual * x + second))
        return results

    same_gradients(f, formula, [(gated_args(kind), plain_args(kind)) for _, kind, *_ in CASES])


NO_PRODUCTS = dataclasses.replace(coat.COAT_PAPER, fp8_linear=False)
FP8_CASES = {
    "fp8_linear": (coat.FP8_LINEAR, "silu", "rms", True, 0.7),
    "blocks of 32, no norm": (
        dataclasses.replace(coat.COAT_PAPER, block=32), "relu2", None, False, None
    ),
    "no FP8 products": (NO_PRODUCTS, "silu", "rms", True, None),
    "coat_paper": (coat.COAT_PAPER, "gelu_tanh", "layer", True, 0.7),
}  # fmt: skip


@pytest.mark.costly
@pytest.mark.parametrize("case", FP8_CASES)
def test_in_fp8_it_is_its_layers_with_blocks_between_them(case):
    precision, activation, kind, residual, limit = FP8_CASES[case]
    act, how = FORMULAS[activation], {"precision": precision}

    def keep(x):
        return through(x, precision.forward, precision.block)

    def first(x, norm, weights, biases=None):
        if norm is None:
            return ops.linear(keep(x), weights, biases, **how)
        return ops.norm_linear(x, norm, weights, biases, **how)

    def f(of_gated, plain):
        settings = {"activation": activation, "residual": residual, **how}
        return ops.gated_mlp(*of_gated, limit=limit, **settings), ops.mlp(*plain, **settings)

    def composed(of_gated, plain):
        x, norm, gate, up, down = of_gated
        g, u = first(x, norm, (gate, up))
        one = residual * x + ops.linear(gated(act, keep(g), keep(u), limit), down, **how)
        x, norm, up, down, up_bias, down_bias = plain
        a = act(keep(first(x, norm, up, up_bias)))
        return one, residual * x + ops.linear(a, down, down_bias, **how)

    same_gradients(f, composed, gated_args(kind), plain_args(kind))


def test_the_backward_pass_can_round_what_it_recomputes_stochastically():
    """The activation, for the gradient of the weight after it; the forward pass is to nearest."""
    x = draw(1, (8, D))
    up, down = weight(2, D, F), weight(3, F, D)
    precision = dataclasses.replace(coat.FP8_LINEAR, stochastic_backward=True)

    def f(x, up, down):
        return ops.mlp(x, None, up, down, residual=False, precision=precision)

    y, (_, _, d_down), dy = pulled(f, x, up, down)

    @jax.jit
    def activated(x, up):
        hidden = ops.linear(x, up, precision=coat.FP8_LINEAR)
        return ops.activate(hidden, activation="gelu_tanh", precision=coat.BF16)

    a = activated(x, up)
    g = rounded(dy, coat.E5M2, "gradients")
    assert_close(y, rounded(a, coat.E4M3) @ rounded(down, coat.E4M3))
    assert_close(d_down, rounded(a, coat.E4M3, "inputs").T @ g)


STOCHASTIC = dataclasses.replace(coat.COAT, stochastic_backward=True)


@pytest.mark.parametrize(
    ("precision", "most"), [(coat.COAT, 0.153), (STOCHASTIC, 0.191)], ids=["coat", "stochastic"]
)
def test_fp8_is_as_close_to_full_precision_as_its_roundings(precision, most):
    """Half a place of E4M3 is at most 2^-4: spread evenly, its root mean square is under
    2^-4 / sqrt(3) = 3.6%, that of E5M2 7.2%, stochastically sqrt(2) times as much, and independent
    ones add in squares.

    Forward, 4 of E4M3 lie in a row: n, two weights, a: 7.2%. Backward, 3 stochastic ones of E4M3
    join them, x, gate and up, and two of E5M2, dy and the gradient of the gate: 15.3%. If these two
    are stochastic, too, and n and a, which are recomputed: 19.1%.
    """
    x, norm = draw(1, (64, WIDTH)), some_norm("rms", WIDTH)
    weights = weight(2, WIDTH, FFN), weight(3, WIDTH, FFN), weight(4, FFN, WIDTH)

    def f(precision):
        def mlp(*args):
            return ops.gated_mlp(*args, residual=False, precision=precision)

        return pulled(mlp, x, norm, *weights)[:2]

    y, gradients = f(precision)
    want, want_gradients = f(coat.BF16)
    assert 0.01 < distance(y, want) < 0.072
    off = distance(gradients, want_gradients)
    assert np.all((off > 0.01) & (off < most))
