"""Laws of linear layers: in full precision the plain formula, in FP8 that of rounded operands.

The oracle in FP8 rounds what the layer says that it rounds, once, in FP64, and multiplies:

    y = r(n) r(w) + b       dn = r(dy) r(w)^T       dw = r(n)^T r(dy)       db = sum of dy
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import (
    assert_close,
    assert_equal,
    distance,
    draw,
    plain_norm,
    pulled,
    rounded,
    rounded_blocks,
    same_gradients,
    some_norm,
    weight,
)

import coat_jax as coat
from coat_jax import ops
from coat_jax.numerics.formats import E4M3, E5M2

K, N = 13, (29, 7)
WEIGHTS = tuple(weight(i, K, n) for i, n in enumerate(N))
BIASES = (draw(5, (N[0],)), None)
SETTINGS = {
    "coat": coat.COAT,
    "stochastic backward": dataclasses.replace(coat.COAT, stochastic_backward=True),
    "E4M3 gradients": dataclasses.replace(coat.COAT, backward=E4M3),
    "E5M2 values": coat.Precision(forward=E5M2, backward=E4M3),
}


def rounded_layers(n, weights, biases, gradients, precision, *, recomputed=False):
    """The outputs, and the gradients of n, the weights and the biases, in FP64.

    An input that is recomputed for the gradients of the weights is rounded again for them.
    """
    flat = again = rounded(n, precision.forward).reshape(-1, n.shape[-1])
    if recomputed and precision.stochastic_backward:
        again = rounded(n, precision.forward, "inputs").reshape(flat.shape)
    outputs, dn, dws, dbs = [], 0, [], []
    for full, b, dy in zip(weights, biases, gradients, strict=True):
        w = rounded(full, precision.forward)
        g = rounded(dy, precision.backward, "gradients" if precision.stochastic_backward else None)
        y = (flat @ w).reshape(dy.shape)
        outputs.append(y if b is None else y + np.asarray(b))
        g = g.reshape(-1, g.shape[-1])
        dn = dn + (g @ w.T).reshape(n.shape)
        dws.append(again.T @ g)
        dbs.append(None if b is None else np.float64(dy).reshape(-1, dy.shape[-1]).sum(0))
    return tuple(outputs), dn, tuple(dws), tuple(dbs)


def test_full_precision_is_the_plain_formula():
    """Of any leading shape, and with any norm before it."""
    inputs = [draw(i, (*lead, K)) for i, lead in enumerate([(), (5,), (2, 5)])]
    norms = [some_norm(kind, K) for kind in ("rms", "layer")]
    how = {"precision": coat.BF16}

    def f(inputs, norms, *layers):
        outputs = [ops.linear(x, *layers, **how) for x in inputs]
        return outputs + [ops.norm_linear(inputs[-1], norm, *layers, **how) for norm in norms]

    def plain(inputs, norms, ws, bs):
        inputs = [*inputs, *(plain_norm(inputs[-1], norm) for norm in norms)]
        layers = list(zip(ws, bs, strict=True))
        return [tuple(n @ w if b is None else n @ w + b for w, b in layers) for n in inputs]

    same_gradients(f, plain, inputs, norms, WEIGHTS, BIASES)


def test_fp8_is_the_product_of_rounded_operands():
    def f(arguments):
        return {
            name: ops.linear(*arguments[name], precision=precision)
            for name, precision in SETTINGS.items()
        }

    x = draw(1, (2, 5, K)) * np.exp2(-2.0 * np.arange(K, dtype=np.float32))  # down to subnormals
    y, (gradients,), dy = pulled(f, dict.fromkeys(SETTINGS, (x, WEIGHTS, BIASES)))
    for name, precision in SETTINGS.items():
        want = rounded_layers(x, WEIGHTS, BIASES, dy[name], precision)
        assert_close((y[name], *gradients[name]), want)
        # What was compared is not what full precision gives.
        assert np.abs(y[name][1] - x @ WEIGHTS[1]).max() > 1e-2


NORMED = {
    "fp8_linear": ("rms", coat.FP8_LINEAR),
    "stochastic": ("rms", dataclasses.replace(coat.FP8_LINEAR, stochastic_backward=True)),
    "coat_paper": ("rms", coat.COAT_PAPER),
    "layer": ("layer", dataclasses.replace(coat.COAT_PAPER, block=32, backward=E4M3)),
}


def test_fp8_of_a_norm_before_it_rounds_blocks_then_the_norm():
    ws = tuple(weight(i, 40, n) for i, n in enumerate(N))
    x, norms = (
        draw(1, (2, 5, 40)),
        {name: some_norm(kind, 40) for name, (kind, _) in NORMED.items()},
    )

    def f(arguments):
        return {
            name: ops.norm_linear(*arguments[name], precision=precision)
            for name, (_, precision) in NORMED.items()
        }

    y, (gradients,), dy = pulled(f, {name: (x, norm, ws) for name, norm in norms.items()})
    for name, (_, precision) in NORMED.items():
        norm, (dx, d_norm, dws) = norms[name], gradients[name]
        values = rounded_blocks(x, precision.forward, precision.block)
        layers = numpy_norm(values, norm), ws, (None, None), dy[name], precision
        want_y, dn, want_dws, _ = rounded_layers(*layers, recomputed=True)
        _, want, _ = pulled(plain_norm, jnp.float32(values), norm, dy=jnp.float32(dn))
        assert_close((y[name], dws, (dx, d_norm)), (want_y, want_dws, want))


def numpy_norm(x, norm):
    """`plain_norm` in FP64."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + norm.eps) * np.float64(norm.scale)
    return y if norm.shift is None else y + np.float64(norm.shift)


def test_one_weight_gives_one_output_and_several_a_tuple():
    x, w, b = draw(1, (2, K)), WEIGHTS[0], BIASES[0]

    def structure(f, *args):
        return jax.tree.map(lambda y: y.shape, jax.eval_shape(f, *args))

    assert structure(ops.linear, x, w, b) == (2, N[0])
    assert structure(ops.linear, x, [w], [b]) == ((2, N[0]),)
    assert structure(ops.norm_linear, x, ops.Norm(), WEIGHTS) == ((2, N[0]), (2, N[1]))


def test_powers_of_two_go_into_the_scales():
    """A factor 2^n of an operand is that factor of all that depends on it, bit for bit."""
    x, w = draw(1, (2, 5, K)), WEIGHTS[0]
    y, (dx, dw), _ = pulled(ops.linear, x, w)
    large_y, (same_dx, large_dw), _ = pulled(ops.linear, x * 2.0**30, w)
    assert_equal((large_y, same_dx, large_dw), (y * 2.0**30, dx, dw * 2.0**30))


@pytest.mark.parametrize("name", ["coat", "coat_paper", "coat_int8"])
def test_the_error_after_a_norm_does_not_depend_on_the_size_of_its_input(name):
    """Not even where epsilon dominates: in FP8 down to the rms that `Norm.eps` names."""
    columns, eps = 64, 1e-6
    least = 2.0**-60 if name == "coat_int8" else columns**0.5 * 2.0**-13
    of = some_norm("rms", columns, eps=eps)
    w, wide, down = (weight(i, *shape) for i, shape in enumerate([(64, 64), (64, 96), (96, 64)]))

    def f(x, precision):
        qkv = ops.norm_qkv(x, of, (w, w, w), head_dim=16, precision=precision)[1:]
        mlp = ops.gated_mlp(x, of, wide, wide, down, residual=False, precision=precision)
        return ops.norm_linear(x, of, w, precision=precision), qkv, mlp

    def errors(size):
        x = draw(1, (2, 8, columns)) * eps**0.5 * size
        return distance(jax.jit(partial(f, precision=name))(x), f(x, coat.BF16))

    assert np.all(errors(least) < 1.2 * errors(2.0**10))


def test_zero_gives_the_bias_and_no_gradient():
    x, w, b = draw(1, (2, 5, K)), WEIGHTS[0], BIASES[0]
    y, (_, dw, _), _ = pulled(ops.linear, 0 * x, w, b)
    assert_equal((y, dw), (jnp.broadcast_to(b, y.shape), 0 * w))
    y, (dx, _, _), _ = pulled(ops.linear, x, 0 * w, b)
    assert_equal((y, dx), (jnp.broadcast_to(b, y.shape), 0 * x))


def test_gradients_of_biases_are_summed_in_fp32_and_not_rounded_on_the_way():
    """BF16 holds whole numbers up to 256 only: the sum of 257 ones would be 256."""
    x, w, bias = np.ones((257, K), jnp.bfloat16), WEIGHTS[0], np.zeros(N[0], np.float32)
    ones = np.ones((257, N[0]), jnp.bfloat16)
    _, (d_bias,), _ = pulled(partial(ops.linear, x, w), bias, dy=ones)
    assert_equal(d_bias, np.full_like(bias, 257.0))
