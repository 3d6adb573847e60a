"""The drop-ins are lax.dot_general and jnp.einsum of an input and a weight, in FP8."""

import jax
import jax.numpy as jnp
import numpy as np

import coat_jax as coat
from coat_jax import ops

EXACT = ops.DotGeneral(coat.BF16)


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)


CONTRACTIONS = [
    ((3, 8), (8, 5), ((1,), (0,))),
    ((3, 8), (5, 8), ((1,), (1,))),
    ((2, 3, 4, 6), (4, 6, 5), ((2, 3), (0, 1))),
    ((2, 4, 3, 6), (6, 5, 4), ((3, 1), (0, 2))),
    ((8,), (8, 2, 3), ((0,), (0,))),
]


def test_it_contracts_as_lax_does():
    def products_and_gradients(product):
        def f(pairs):
            return [
                product(*pair, (axes, ((), ())))
                for pair, (*_, axes) in zip(pairs, CONTRACTIONS, strict=True)
            ]

        def run(pairs):
            results, pull = jax.vjp(f, pairs)
            return results, pull(jax.tree.map(jnp.sin, results))

        return jax.jit(run)([(numbers(*x), numbers(*w)) for x, w, _ in CONTRACTIONS])

    got, want = map(products_and_gradients, (EXACT, jax.lax.dot_general))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


EQUATIONS = [
    ("bd,df->bf", (3, 8), (8, 5)),
    ("...d,dnh->...nh", (2, 3, 8), (8, 4, 5)),
    ("...nh,nhd->...d", (2, 3, 4, 5), (4, 5, 8)),
    ("bsd,fd->fbs", (2, 3, 8), (5, 8)),
    ("b d, d f -> b f", (3, 8), (8, 5)),
]


def test_einsum_is_jnp_einsum():
    def results(einsum):
        arrays = [(numbers(*x), numbers(*w)) for _, x, w in EQUATIONS]
        return jax.jit(
            lambda arrays: [einsum(e, *a) for (e, *_), a in zip(EQUATIONS, arrays, strict=True)]
        )(arrays)

    for got, want in zip(results(ops.Einsum("bf16")), results(jnp.einsum), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_in_fp8_it_is_linear_and_the_preferred_type_that_of_the_result():
    x, w = numbers(3, 8), numbers(8, 5)
    got = ops.DotGeneral()(x, w, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(got, ops.linear(x, w))
    narrow = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    y = EXACT(*narrow, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32
