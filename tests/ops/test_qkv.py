"""norm_qkv is norm_linear, then rotate, beside a residual stream: that is its oracle.

In FP8 the two differ in how q's and k's gradients are scaled, by a bound or by their maximum:
both are powers of two, and E5M2's smallest numbers are far away.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ops_cases import (
    FP8_PRESETS,
    PRESETS,
    distance,
    draw,
    pulled,
    quick_jit,
    same_gradients,
    some_norm,
    weight,
)

import coat_jax as coat
from coat_jax import ops

B, S, D, H = 2, 6, 48, 8
HEADS = (4, 2, 2)
X = draw(1, (B, S, D))
NORM = some_norm("rms", D)
WEIGHTS = tuple(weight(i, D, n * H) for i, n in enumerate(HEADS))
BIASES = (draw(5, (HEADS[0] * H,)), None, draw(6, (HEADS[2] * H,)))
ROTARY = ops.Rotary(500.0)
POSITIONS = {
    "counted": None,
    "shared": jax.device_put(np.array([0, 1, 2, 0, 1, 7], np.int32)),
    "own": jax.device_put(np.arange(B * S, dtype=np.int32).reshape(B, S) % 5),
}


def fused(rotary, positions, precision):
    def f(x, norm, weights, biases):
        how = {"rotary": rotary, "positions": positions, "precision": precision}
        x, q, k, v = ops.norm_qkv(x, norm, weights, biases, head_dim=H, **how)
        return jnp.sin(x), q, k, v

    return f


def composed(rotary, positions, precision):
    def f(x, norm, weights, biases):
        outputs = ops.norm_linear(x, norm, weights, biases, precision=precision)
        q, k, v = (y.reshape(*x.shape[:2], -1, H) for y in outputs)
        if rotary is not None:
            at = jnp.arange(S) if positions is None else positions
            q, k = (ops.rotate(y, at, rotary) for y in (q, k))
        return jnp.sin(x), q, k, v

    return f


def test_it_is_norm_linear_and_rotate():
    """With either norm, rotated at any positions, or not rotated."""
    norms = [some_norm(kind, D) for kind in ("rms", "layer")]
    cases = [(ROTARY, at) for at in POSITIONS.values()] + [(None, None)]

    def of(form):
        def f(arguments):
            return [
                form(*how, coat.BF16)(X, norms[i % 2], *layers)
                for i, (how, layers) in enumerate(zip(cases, arguments, strict=True))
            ]

        return f

    same_gradients(of(fused), of(composed), [(WEIGHTS, BIASES)] * len(cases))


@pytest.mark.costly
@pytest.mark.parametrize("name", FP8_PRESETS)
def test_it_is_norm_linear_and_rotate_in_fp8(name):
    for backward in (coat.E5M2, coat.E4M3):
        how = ROTARY, None, dataclasses.replace(PRESETS[name], backward=backward)
        args = X, NORM, WEIGHTS, BIASES
        (y, gradients, _), (y_want, want, _) = (pulled(f(*how), *args) for f in (fused, composed))
        assert distance(y, y_want).max() < 1e-6
        # E4M3's smallest numbers are 2^-18 of its largest: within reach of the looser scale.
        assert distance(gradients, want).max() < (1e-6 if backward == coat.E5M2 else 1e-3)


def test_the_residual_stream_passes_through_unchanged():
    x, *_ = quick_jit(partial(ops.norm_qkv, head_dim=H))(X, NORM, WEIGHTS)
    np.testing.assert_array_equal(x, X)


def test_it_saves_only_positions_besides_what_norm_linear_saves():
    def kept(f):
        pull = jax.eval_shape(lambda *args: jax.vjp(f, *args)[1], X, NORM, WEIGHTS)
        return sorted(str(leaf) for leaf in jax.tree.leaves(pull))

    positions = str(jax.ShapeDtypeStruct((S,), jnp.int32))
    for precision in PRESETS.values():
        got = kept(
            lambda x, n, w, p=precision: ops.norm_qkv(
                x, n, w, head_dim=H, rotary=ROTARY, precision=p
            )
        )
        want = kept(lambda x, n, w, p=precision: ops.norm_linear(x, n, w, precision=p))
        got.remove(positions)
        assert got == want
