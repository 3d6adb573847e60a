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


@pytest.mark.costly
@pytest.mark.parametrize("at", POSITIONS)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_it_is_norm_linear_and_rotate(kind, at):
    how = ROTARY, POSITIONS[at], coat.BF16
    args = X, some_norm(kind, D), WEIGHTS, BIASES
    same_gradients(fused(*how), composed(*how), *args)


def test_without_angles_nothing_is_rotated():
    how = None, None, coat.BF16
    same_gradients(fused(*how), composed(*how), X, NORM, WEIGHTS, BIASES)


@pytest.mark.costly
@pytest.mark.parametrize("backward", [coat.E5M2, coat.E4M3], ids=["E5M2", "E4M3"])
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "bf16"])
def test_it_is_norm_linear_and_rotate_in_fp8(name, backward):
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.asarray(X)[0]}, r"x \[batch, sequence, width\], not \(6, 48\)"),
        ({"weights": WEIGHTS[:2]}, r"three weights to whole heads of head_dim=8"),
        ({"head_dim": 7}, r"three weights to whole heads of head_dim=7, not \[\(48, 32\)"),
        ({"positions": np.arange(4)}, r"positions \(4,\) must be one per token: \(6,\) or"),
        ({"x": np.ones((1, 2, 48), np.int32)}, "real floats, not with int32"),
        ({"rotary": ops.Rotary(), "head_dim": 1}, "a head of 1 is odd"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(changes, message):
    given = {"x": X, "norm": NORM, "weights": WEIGHTS, "head_dim": H, "rotary": ROTARY}
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(lambda: ops.norm_qkv(**{**given, **changes}))
