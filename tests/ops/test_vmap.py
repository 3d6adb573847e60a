"""Gradients under vmap are those of a loop, whichever arguments are mapped over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops
from coat_jax.ops.definition import batch_alike

D, N, SIZE = 16, 32, 3


def drawn(seed, *shape):
    return np.float32(np.random.default_rng(seed).standard_normal(shape))


X, W, V = jax.device_put((drawn(0, 2, 4, D), drawn(1, D, N) / 4, drawn(2, D, N) / 4))
NORM = ops.Norm(jax.device_put(np.ones(D, np.float32)))


def qkv(x, w, v):
    return ops.norm_qkv(x, NORM, (w, w, v), head_dim=8, rotary=ops.Rotary())


def adapted(x, a, b):
    return ops.adapted_linear(x, ops.freeze(W), (a[:, :4], b[:, :4].T @ V))


# Some have several outputs, of which some depend on one of the weights only.
FUNCTIONS = {
    "linear": lambda x, w, v: ops.linear(x, (w, v)),
    "norm_linear": lambda x, w, v: ops.norm_linear(x, NORM, (w, v)),
    "norm_qkv": qkv,
    "adapted_linear": adapted,
    "recompute": ops.recompute(lambda x, w, v: {"x": 2 * x, "w": x @ w, "v": jnp.tanh(x @ v)}),
    "gated_mlp": lambda x, w, v: ops.gated_mlp(x, NORM, w, v, w.T),
}


def loss(arguments):
    """Of all functions, each of arguments of its own."""
    outputs = [f(*arguments[name]) for name, f in FUNCTIONS.items()]
    return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs))


gradients = jax.jit(jax.grad(loss))


@pytest.mark.costly
@pytest.mark.parametrize("mapped", [(1,), (2,), (0,), (1, 2)], ids=str)
def test_gradients_are_those_of_a_loop(mapped):
    def of_each(values):
        return dict.fromkeys(FUNCTIONS, tuple(values))

    axes = of_each(0 if i in mapped else None for i in range(3))

    def together(arguments):
        return jnp.sum(jax.vmap(loss, (axes,))(arguments))

    def one(place):
        return of_each(x[place] if i in mapped else x for i, x in enumerate(arguments))

    arguments = [
        np.stack([x, -x, 0.5 * x]) if i in mapped else x
        for i, x in enumerate(map(np.asarray, (X, W, V)))
    ]
    found = jax.jit(jax.grad(together))(of_each(arguments))
    alone = [gradients(one(place)) for place in range(3)]
    for name, ours in found.items():
        for i, one_by_one in enumerate(zip(*(each[name] for each in alone), strict=True)):
            expected = np.stack(one_by_one) if i in mapped else np.sum(one_by_one, axis=0)
            # Where outputs have no batch, the sum of gradients is rounded, within 2^-3 in E5M2.
            assert np.linalg.norm(ours[i] - expected) < 2**-3 * np.linalg.norm(expected), name


def test_second_derivatives_under_vmap_are_those_of_a_loop():
    """Along the input itself, and mixed ones of input and weight."""

    def loss(x, w):
        outputs = (
            ops.linear(x, (w, V), precision=coat.BF16),
            ops.norm_qkv(x, NORM, (w, w, V), head_dim=8, precision=coat.BF16),
        )
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs))

    def second(w):
        curvature = jax.jvp(jax.grad(lambda x: loss(x, w)), (X,), (X,))[1]
        return curvature, jax.grad(lambda w: jnp.sum(jax.grad(loss)(X, w)))(w)

    def curvature_of_all(ws):
        def total(x):
            return jnp.sum(jax.vmap(loss, (None, 0))(x, ws))

        return jax.jvp(jax.grad(total), (X,), (X,))[1]

    ws = np.stack([W, -W, 0.5 * W])
    together, (_, mixed) = jax.jit(lambda ws: (curvature_of_all(ws), jax.vmap(second)(ws)))(ws)
    curvatures, one_by_one = map(np.stack, zip(*map(jax.jit(second), ws), strict=True))
    np.testing.assert_allclose(together, sum(curvatures), rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(mixed, one_by_one, rtol=1e-3, atol=1e-3)


def test_without_vmap_nothing_is_added_to_a_program():
    program = jax.jit(batch_alike).lower(jnp.ones(3), jnp.ones(3)).as_text()
    assert "broadcast" not in program
