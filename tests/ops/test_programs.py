"""The layers inside JAX's transformations and on meshes: none changes the result.

Two programs may sum in another order, which moves FP32 numbers by their last bits, and where
one lies in the middle between two codes, it may get the other code. That is one number in
10^4, which moves by 2^-3 of itself: 1 / 8 / 100 of a tensor's length at worst. SAME = 1% holds
for that and for nothing else: a rounding left out or added moves it by 2.6% and more.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ops_cases import (
    FP32,
    PRESETS,
    WIDTH,
    assert_close,
    distance,
    draw,
    layer,
    layer_params,
    plain_attention,
    plain_norm,
    pulled,
    same_gradients,
    some_norm,
    weight,
)

import coat_jax as coat
from coat_jax import ops

SAME = 0.01
X = draw(1, (4, 8, WIDTH))
DY = draw(2, X.shape)
PARAMS = layer_params()


def run(params, x, dy, precision):
    """A layer's output and gradients."""
    y, pull = jax.vjp(lambda params, x: layer(params, x, precision), params, x)
    return y, pull(dy)


@functools.cache
def compiled(name):
    return jax.jit(functools.partial(run, precision=PRESETS[name]))


@functools.cache
def expected(name):
    return compiled(name)(PARAMS, X, DY)


def stack(*trees):
    """In NumPy, as all that is not tried here: JAX compiles a program for each shape."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def assert_same(got, want):
    assert np.all(distance(got, want) < SAME), distance(got, want)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["coat", "coat_int8", "coat_lean"])
def test_nan_and_infinity_never_become_finite(name):
    """In x, its token is lost at least, and the weights' gradients; in dy the gradients."""
    for bad in (np.nan, np.inf, -np.inf):
        bad_x, bad_dy = (np.array(x) for x in (X, DY))
        bad_x[1, 3, 5] = bad_dy[1, 3, 5] = bad
        y, (d_params, dx) = jax.device_get(compiled(name)(PARAMS, bad_x, DY))
        assert not np.any(np.isfinite(y[1, 3]))
        assert not np.any(np.isfinite(dx[1, 3]))
        assert all(not np.all(np.isfinite(lost)) for lost in jax.tree.leaves(d_params))
        y, (d_params, dx) = jax.device_get(compiled(name)(PARAMS, X, bad_dy))
        assert np.all(np.isfinite(y))
        assert not np.any(np.isfinite(dx[1, 3]))
        assert all(not np.all(np.isfinite(lost)) for lost in jax.tree.leaves(d_params))


def test_a_scan_over_stacked_layers_is_one_layer_after_the_other():
    first, second = layer_params(0), layer_params(100)
    stacked = stack(first, second)

    def scanned(params, x):
        def one(x, params):
            return layer(params, x, coat.COAT), None

        return jax.lax.scan(one, x, params)[0]

    y, (d_params, dx), _ = pulled(scanned, stacked, X, dy=DY)
    between, _ = compiled("coat")(first, X, DY)
    want, (d_second, d_between) = compiled("coat")(second, between, DY)
    _, (d_first, want_dx) = compiled("coat")(first, X, d_between)
    assert_same((y, d_params, dx), (want, stack(d_first, d_second), want_dx))


def rows_of_13(x, norm, w, down, precision=coat.COAT):
    """All that works on rows, 13 to 29 numbers and back, which nothing divides."""
    return (
        ops.linear(x, w, precision=precision),
        ops.norm_linear(x, norm, w, precision=precision),
        ops.norm(x, norm, precision=precision),
        ops.gated_mlp(x, norm, w, w, down, precision=precision),
    )


def test_leading_axes_are_rows():
    """Also none. In FP8 shapes are as in full precision, in which they are tried."""
    x, args = draw(3, (13,)), (some_norm("layer", 13), weight(1, 13, 29), weight(2, 29, 13))
    f = functools.partial(rows_of_13, precision=coat.BF16)
    y, (dx, *d_args), dy = pulled(f, x, *args)
    as_rows = functools.partial(jax.tree.map, lambda leaf: leaf[None])
    want_y, (want_dx, *want), _ = pulled(f, x[None], *args, dy=as_rows(dy))
    assert_same((as_rows((y, dx)), d_args), ((want_y, want_dx), want))
    found = jax.eval_shape(lambda x, dy: jax.vjp(rows_of_13, x, *args)[1](dy), x, dy)
    assert found[0].shape == x.shape


def test_second_derivatives_in_full_precision_are_those_of_the_formula():
    """As Hessian times vector, of everything at once."""
    x, norm, w = draw(3, (2, 3, 12)), some_norm("layer", 12), weight(1, 12, 12)
    labels = jnp.array([[0, 3, -100], [2, 2, 5]])
    bf16 = {"precision": coat.BF16}

    def layers(x):
        y = ops.norm_linear(x, norm, w, **bf16) + ops.linear(x, w, **bf16)
        y = ops.gated_mlp(y, None, w, w, w, **bf16) / 8 + ops.norm(x, norm, **bf16)
        heads = ops.rotate(y.reshape(2, 3, 2, 6), jnp.arange(3), ops.Rotary())
        y = ops.attention_linear(*[heads] * 3, w, **bf16)
        return ops.cross_entropy(y, w, labels, chunk=2, z_loss=0.1)

    def formula(x):
        y = plain_norm(x, norm) @ w + x @ w
        y = (y + (jax.nn.silu(y @ w) * (y @ w)) @ w) / 8 + plain_norm(x, norm)
        angles = jnp.arange(3)[:, None, None] * 10000.0 ** (-jnp.arange(0, 6, 2) / 6)
        a, b = jnp.split(y.reshape(2, 3, 2, 6), 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        heads = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
        logits = plain_attention(*[heads] * 3).reshape(2, 3, 12) @ w @ w
        lse = jax.nn.logsumexp(logits, axis=-1)
        label = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(labels >= 0, lse - label + 0.1 * lse**2, 0).sum() / 5

    def twice(f):
        return jax.jit(lambda x, t: jax.jvp(jax.grad(f), (x,), (t,)))(x, draw(4, x.shape))

    # Ten layers in a row, twice differentiated, each to FP32.
    assert_close(twice(layers), twice(formula), 10 * FP32)


def test_attention_that_saves_no_fp8_has_second_derivatives_in_any_precision():
    q = draw(1, (1, 3, 2, 4))

    def loss(attend, q):
        return jnp.sum(attend(q, q, q) ** 2)

    def length(attend):
        return lambda q: jnp.sum(jax.grad(functools.partial(loss, attend))(q) ** 2)

    same_gradients(length(ops.attention), length(plain_attention), q, tolerance=10 * FP32)


def test_a_mesh_of_eight_changes_nothing():
    """Batch over fsdp and data, weights over fsdp and tensor: scales are global maxima.

    In the order (data, fsdp) XLA's partitioner gets the gradients of plain jnp wrong as well.
    """
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def place(leaf):
        spec = P("fsdp", "tensor") if leaf.ndim == 2 else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    batch = NamedSharding(mesh, P(("fsdp", "data")))
    with jax.set_mesh(mesh):
        params = jax.tree.map(place, PARAMS)
        x, dy = (jax.device_put(leaf, batch) for leaf in (X, DY))
        got = jax.jit(functools.partial(run, precision=coat.COAT_LEAN))(params, x, dy)
    assert_same(got, expected("coat_lean"))


def in_16_bits(dtype):
    """Ops with an input and a bias, if they have one, in 16 bits; the other arrays are FP32."""
    x, norm, down = draw(1, (4, 13), dtype=dtype), some_norm("layer", 13), weight(2, 29, 13)
    wide, bias = weight(1, 13, 29), draw(5, (29,), dtype=dtype)
    heads = draw(2, *[(2, 7, n, 24) for n in (4, 2, 2)], dtype=dtype)
    lean = functools.partial(ops.attention_linear, precision=coat.COAT_LEAN)
    return {
        "norm": (ops.norm, (x, norm)),
        "norm_linear": (ops.norm_linear, (x, norm, wide, bias)),
        "gated_mlp": (ops.gated_mlp, (x, norm, wide, wide, down)),
        "attention_linear": (lean, (*heads, weight(3, 96, 10))),
    }


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", in_16_bits(jnp.bfloat16))
def test_results_and_gradients_have_the_dtype_of_their_arrays(name, dtype):
    """And no more is lost than by casting, which moves a few numbers to the next code.

    FP16 ends at 65504, which products of codes pass before they are scaled.
    """
    f, arguments = in_16_bits(dtype)[name]
    y, gradients, dy = pulled(f, *arguments)
    assert y.dtype == dtype
    assert dtypes(gradients) == dtypes(arguments)
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), (*arguments, dy))
    want = pulled(f, *wide[:-1], dy=wide[-1])[:2]
    assert np.all(distance((y, gradients), want) < 2.0**-5)


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", ["coat", "coat_int8"])
def test_the_scale_of_an_operand_is_computed_once(name):
    """7 weights, 2 norms' bounds, o, a; the gradients of q, k, v, gate, up, and of both results."""
    program = jax.make_jaxpr(functools.partial(run, precision=PRESETS[name]))(PARAMS, X, DY)
    assert len(re.findall(r":\w+\[\] = reduce_max\[", str(program))) == 7 + 2 + 2 + 5 + 2
