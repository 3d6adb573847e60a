"""The drop-ins are lax.dot_general and jnp.einsum of an input and a weight, in FP8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


@pytest.mark.parametrize(("x", "w", "axes"), CONTRACTIONS)
def test_it_contracts_as_lax_does(x, w, axes):
    x, w = numbers(*x), numbers(*w)
    dimensions = (axes, ((), ()))

    @jax.jit
    def products_and_gradients(x, w):
        want, pull = jax.vjp(lambda x, w: jax.lax.dot_general(x, w, dimensions), x, w)
        got, own_pull = jax.vjp(lambda x, w: EXACT(x, w, dimensions), x, w)
        return (got, *own_pull(jnp.sin(want))), (want, *pull(jnp.sin(want)))

    for a, b in zip(*products_and_gradients(x, w), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("equation", "x", "w"),
    [
        ("bd,df->bf", (3, 8), (8, 5)),
        ("...d,dnh->...nh", (2, 3, 8), (8, 4, 5)),
        ("...nh,nhd->...d", (2, 3, 4, 5), (4, 5, 8)),
        ("bsd,fd->fbs", (2, 3, 8), (5, 8)),
        ("b d, d f -> b f", (3, 8), (8, 5)),
    ],
)
def test_einsum_is_jnp_einsum(equation, x, w):
    x, w = numbers(*x), numbers(*w)
    got = ops.Einsum(coat.BF16)(equation, x, w)
    np.testing.assert_allclose(got, jnp.einsum(equation, x, w), rtol=1e-5, atol=1e-5)


def test_in_fp8_it_is_linear():
    x, w = numbers(3, 8), numbers(8, 5)
    got = ops.DotGeneral()(x, w, (((1,), (0,)), ((), ())))
    np.testing.assert_array_equal(got, ops.linear(x, w))


def test_the_preferred_type_is_that_of_the_result():
    x, w = numbers(3, 8).astype(jnp.bfloat16), numbers(8, 5).astype(jnp.bfloat16)
    y = EXACT(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    assert y.dtype == jnp.float32


def test_only_linear_layers_are_accepted():
    x = numbers(2, 3, 8)
    with pytest.raises(ValueError, match="without batch axes, and got \\(0,\\), \\(0,\\)"):
        EXACT(x, numbers(2, 8, 5), (((2,), (1,)), ((0,), (0,))))
    with pytest.raises(ValueError, match="axes that input, weight and output share"):
        ops.Einsum()("bsd,bdf->bsf", x, numbers(2, 8, 5))
    with pytest.raises(ValueError, match="sums over an axis of one operand alone"):
        ops.Einsum()("bsd,df->bf", x, numbers(8, 5))
    with pytest.raises(ValueError, match="'bsd,df' names no output"):
        ops.Einsum()("bsd,df", x, numbers(8, 5))


@pytest.mark.parametrize("kind", [ops.DotGeneral, ops.Einsum])
def test_a_precision_may_be_named(kind):
    assert kind("bf16") == kind(coat.BF16)
    with pytest.raises(ValueError, match="no precision 'fp9'"):
        kind("fp9")
