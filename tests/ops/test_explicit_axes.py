"""Over explicit axes of a mesh, ops compute what they do on one device, and shard their results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax import ops
from coat_jax.numerics.explicit_axes import merge_specs

BATCH, SEQUENCE, WIDTH, HIDDEN, HEAD = 8, 4, 64, 128, 16
ROWS, COLUMNS = P("data", "model"), P("model", "data")  # of weights into and out of hidden units


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)


def numbers(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32) / 8


X = 8 * numbers(BATCH, SEQUENCE, WIDTH)
SCALE = 1 + numbers(WIDTH)
OF_X = P("data", None, None)
QKV = tuple(numbers(WIDTH, width, seed=i) for i, width in enumerate((WIDTH, HEAD, HEAD)))
HEADS = tuple(numbers(BATCH, SEQUENCE, n, HEAD, seed=i) for i, n in enumerate((4, 2, 2)))
OF_HEADS = P("data", None, "model", None)
FROZEN = ops.freeze(numbers(WIDTH, HIDDEN))

# An op, its arrays, how they are sharded, and how its results are.
CASES = {
    "linear": (ops.linear, (X, numbers(WIDTH, HIDDEN)), (OF_X, ROWS), P("data", None, "model")),
    "linear, columns of x": (
        ops.linear, (X, numbers(WIDTH, HIDDEN)), (P(None, None, "model"), P("model")), P(),
    ),
    "linear, several": (
        lambda x, *w: ops.linear(x, w), (X, numbers(WIDTH, HIDDEN), numbers(WIDTH, 6)),
        (OF_X, ROWS, P("data")), (P("data", None, "model"), OF_X),
    ),
    "norm_linear": (
        lambda x, s, w, b: ops.norm_linear(x, ops.Norm(s), w, b),
        (X, SCALE, numbers(WIDTH, HIDDEN), numbers(HIDDEN)), (OF_X, P(), ROWS, P("model")),
        P("data", None, "model"),
    ),
    "gated_mlp": (
        lambda x, s, *w: ops.gated_mlp(x, ops.Norm(s), *w),
        (X, SCALE, numbers(WIDTH, HIDDEN), numbers(WIDTH, HIDDEN, seed=1), numbers(HIDDEN, WIDTH)),
        (OF_X, P("data"), ROWS, ROWS, COLUMNS), OF_X,
    ),
    "mlp": (
        lambda x, *w: ops.mlp(x, None, *w), (X, numbers(WIDTH, HIDDEN), numbers(HIDDEN, WIDTH)),
        (P("data", "model", None), P("data"), P(None, "data")), P("data", "model", None),
    ),
    "norm_qkv": (
        lambda x, s, *w: ops.norm_qkv(x, ops.Norm(s), w, head_dim=HEAD, rotary=ops.Rotary()),
        (X, SCALE, *QKV), (OF_X, P(), ROWS, ROWS, ROWS),
        (OF_X, OF_HEADS, OF_X, OF_X),  # one head of keys has no parts
    ),
    "attention": (ops.attention, HEADS, (OF_HEADS,) * 3, OF_HEADS),
    "attention_linear": (
        ops.attention_linear, (*HEADS, numbers(WIDTH, WIDTH)), (OF_HEADS,) * 3 + (COLUMNS,), OF_X,
    ),
    "adapted_linear": (
        lambda x, a, c: ops.adapted_linear(x, FROZEN, (a, c)),
        (X, numbers(WIDTH, 2), numbers(2, HIDDEN)), (OF_X, P("data"), P(None, "model")), OF_X,
    ),
    "norm": (lambda x, s: ops.norm(x, ops.Norm(s)), (X, SCALE), (OF_X, P("model")), OF_X),
    "activate": (ops.activate, (X, X[::-1]), (OF_X, P()), OF_X),
    "cross_entropy": (
        lambda x, w: ops.cross_entropy(x, w, np.arange(32, dtype=np.int32).reshape(8, 4) % 7),
        (X, numbers(WIDTH, HIDDEN)), (OF_X, ROWS), P(),
    ),
    "embedding": (
        lambda t: ops.embedding(t, jnp.arange(8, dtype=jnp.int32)), (numbers(16, WIDTH),),
        (P("data", "model"),), P(None, "model"),
    ),
    "DotGeneral": (
        lambda x, w: ops.DotGeneral()(x, w, (((0, 2), (1, 0)), ((), ()))),
        (X, numbers(WIDTH, BATCH, 6, 2)), (OF_X, P("data", None, None, "model")),
        P(None, None, "model"),
    ),
    "Einsum": (
        lambda x, w: ops.Einsum()("...d,dnh->...nh", x, w), (X, numbers(WIDTH, 4, HEAD)),
        (OF_X, P("data", "model", None)), OF_HEADS,
    ),
}  # fmt: skip


def outputs_and_gradients(op, arrays):
    """The results of an op, and the gradients of all arrays, from cotangents that differ."""

    def loss(*arrays):
        results = op(*arrays)
        leaves = jax.tree.leaves(results)
        return sum(jnp.sum(jnp.sin(y) * (i + 1)) for i, y in enumerate(leaves)), results

    argnums = tuple(range(len(arrays)))
    (_, results), gradients = jax.value_and_grad(loss, argnums, has_aux=True)(*arrays)
    return results, gradients


@pytest.mark.costly
@pytest.mark.parametrize("name", CASES)
def test_ops_compute_the_same_and_results_are_sharded_like_their_arguments(name):
    op, arrays, specs, wanted = CASES[name]
    expected = jax.jit(outputs_and_gradients, static_argnums=0)(op, arrays)
    with jax.set_mesh(mesh()):
        placed = tuple(map(jax.device_put, arrays, specs))
        found = jax.jit(outputs_and_gradients, static_argnums=0)(op, placed)
        types = jax.eval_shape(jax.jit(op), *placed)
    assert_specs(types, wanted)
    assert_specs(found[1], specs)
    for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        scale = float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("name", ["linear", "norm"])
def test_the_mesh_need_not_be_set(name):
    op, arrays, specs, wanted = CASES[name]
    shardings = (NamedSharding(mesh(), spec) for spec in specs)
    found = jax.jit(op)(*map(jax.device_put, arrays, shardings))
    assert_specs(found, wanted)
    for one, other in zip(*map(jax.tree.leaves, (found, jax.jit(op)(*arrays))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["linear", "norm", "attention"])
def test_some_axes_may_be_manual(name):
    """Each shard over `data` computes by itself; `model` is explicit within."""
    op, arrays, _, _ = CASES[name]
    arrays = arrays if name != "norm" else (arrays[0], np.repeat(arrays[1][None], 8, 0))
    function = op if name != "norm" else lambda x, s: op(x, s[0])
    rows = P("data"), *(P() if name == "linear" else P("data") for _ in arrays[1:])
    with jax.set_mesh(mesh()):
        by_shards = jax.shard_map(
            function, in_specs=rows, out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        placed = map(jax.device_put, arrays, (P("data", None, "model"), *rows[1:]))
        found = jax.jit(by_shards)(*placed)
    np.testing.assert_allclose(found, jax.jit(function)(*arrays), rtol=1e-5, atol=1e-5)


def test_a_product_is_sharded_as_its_caller_says():
    def product(x, w):
        return ops.DotGeneral()(x, w, (((2,), (0,)), ((), ())), out_sharding=OF_X)

    w = numbers(WIDTH, HIDDEN)
    with jax.set_mesh(mesh()):
        y = jax.jit(product)(jax.device_put(X, P(None, None, "model")), jax.device_put(w, ROWS))
    assert_specs(y, OF_X)
    np.testing.assert_allclose(y, ops.linear(X, w), rtol=1e-5, atol=1e-5)


def assert_specs(arrays, specs):
    for array, spec in zip(jax.tree.leaves(arrays), as_tuple(specs), strict=True):
        padded = P(*spec, *(None,) * (array.ndim - len(spec)))
        assert merge_specs(*jax.typeof(array).sharding.spec) == merge_specs(*padded)


def as_tuple(specs):
    return specs if isinstance(specs, tuple) and not isinstance(specs, P) else (specs,)
