"""Gradients under vmap are those of a loop, whichever arguments are mapped over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import ops
from coat_jax.ops.backward import batched_alike

D, N, SIZE = 16, 32, 3


def drawn(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, V = drawn(0, 2, 4, D), drawn(1, D, N) / 4, drawn(2, D, N) / 4
NORM = ops.Norm(jnp.ones(D))


def qkv(x, w, v):
    return ops.norm_qkv(x, NORM, (w, w, v), head_dim=8, rotary=ops.Rotary())


def adapted(x, a, b):
    return ops.adapted_linear(x, ops.freeze(W), (a[:, :4], b[:, :4].T @ V))


# All but the last have several outputs, of which some depend on one of the weights only.
FUNCTIONS = {
    "linear": lambda x, w, v: ops.linear(x, (w, v)),
    "norm_linear": lambda x, w, v: ops.norm_linear(x, NORM, (w, v)),
    "norm_qkv": qkv,
    "adapted_linear": adapted,
    "recompute": ops.recompute(lambda x, w, v: {"x": 2 * x, "w": x @ w, "v": jnp.tanh(x @ v)}),
    "gated_mlp": lambda x, w, v: ops.gated_mlp(x, NORM, w, v, w.T),
}


@pytest.mark.parametrize("mapped", [(1,), (2,), (0,), (1, 2)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_a_loop(name, mapped):
    def loss(*arguments):
        outputs = jax.tree.leaves(FUNCTIONS[name](*arguments))
        return sum(jnp.sum(jnp.sin(y)) for y in outputs)

    def stacked(i, x):
        return jnp.stack([x, -x, 0.5 * x]) if i in mapped else x

    arguments = [stacked(i, x) for i, x in enumerate((X, W, V))]
    axes = [0 if i in mapped else None for i in range(3)]

    def together(*arguments):
        return jnp.sum(jax.vmap(loss, axes)(*arguments))

    def one_by_one(*arguments):
        def one(parts):
            each = dict(zip(mapped, parts, strict=True))
            return loss(*(each.get(i, x) for i, x in enumerate(arguments)))

        return jnp.sum(jax.lax.map(one, tuple(arguments[i] for i in mapped)))

    found, expected = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*arguments) for f in (together, one_by_one)
    )
    for ours, theirs in zip(found, expected, strict=True):
        # Where outputs have no batch, the sum of gradients is rounded, within 2^-3 in E5M2.
        assert jnp.linalg.norm(ours - theirs) < 2**-3 * jnp.linalg.norm(theirs)


@pytest.mark.parametrize("name", ["linear", "norm_qkv"])
def test_second_derivatives_under_vmap_are_those_of_a_loop(name):
    def loss(x, w):
        outputs = {
            "linear": lambda: ops.linear(x, (w, V), precision=coat.BF16),
            "norm_qkv": lambda: ops.norm_qkv(x, NORM, (w, w, V), head_dim=8, precision=coat.BF16),
        }[name]()
        return sum(jnp.sum(jnp.sin(y)) for y in outputs)

    def curvature(f):
        """Of the loss of all three, along the input itself."""
        return jax.jvp(jax.grad(f), (X,), (X,))[1]

    ws = jnp.stack([W, -W, 0.5 * W])
    found = curvature(lambda x: jnp.sum(jax.vmap(loss, (None, 0))(x, ws)))
    expected = curvature(lambda x: sum(loss(x, w) for w in ws))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    hessians = jax.vmap(jax.grad(lambda w: jnp.sum(jax.grad(loss)(X, w))))(ws)
    one_by_one = [jax.grad(lambda w: jnp.sum(jax.grad(loss)(X, w)))(w) for w in ws]
    np.testing.assert_allclose(hessians, jnp.stack(one_by_one), rtol=1e-3, atol=1e-3)


def test_without_vmap_nothing_is_added_to_a_program():
    program = jax.jit(batched_alike).lower(jnp.ones(3), jnp.ones(3)).as_text()
    assert "broadcast" not in program
