"""norm_qkv is norm_linear, then rotate, beside a residual stream: that is its oracle.

In FP8 the two differ in how q's and k's gradients are scaled, by a bound or by their maximum:
both are powers of two, and E5M2's smallest numbers are far away.
"""

import dataclasses

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
    """All gradients that arrive are 1.7, almost E5M2's largest code, and grow where they rotate."""
    rng, args = np.random.default_rng(0), (X, NORM, WEIGHTS, BIASES)
    outputs = jax.eval_shape(fused(ROTARY, None, PRESETS[name]), *args)
    dy = jax.tree.map(lambda y: np.float32(rng.choice([-1.7, 1.7], y.shape)), outputs)
    for backward in (coat.E5M2, coat.E4M3):
        how = ROTARY, None, dataclasses.replace(PRESETS[name], backward=backward)
        (y, gradients, _), (y_want, want, _) = (
            pulled(f(*how), *args, dy=dy) for f in (fused, composed)
        )
        assert distance(y, y_want).max() < 1e-6
        # E4M3's smallest numbers are 2^-18 of its largest: within reach of the looser scale.
        assert distance(gradients, want).max() < (1e-6 if backward == coat.E5M2 else 1e-3)
