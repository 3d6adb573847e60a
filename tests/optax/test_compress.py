"""compress: any optax transformation, its moments in FP8."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import normal

from coat_jax.optax import Storage, compress, decompress, fp8_adamw

SMALL = Storage(min_size=1024)


# --- Which leaves ----------------------------------------------------------------------------

PARAMS = {
    "large": np.ones((64, 256), np.float32),
    "narrow": np.ones((4096, 15), np.float32),
    "short": np.ones((63, 256), np.float32),
    "vector": np.ones(256, np.float32),
}
PARAMS = jax.device_put(PARAMS)


def dtypes(tree):
    return jax.tree.map(lambda leaf: leaf.dtype.name, tree)


@pytest.mark.parametrize("other", ["float8_e4m3fn", "float8_e5m2"])
def test_small_and_narrow_leaves_stay_as_they_are(other):
    """On a mesh, too, where a shard of "large" has fewer elements than the rule asks for."""
    storage = Storage(other=other)
    in_fp32 = dict.fromkeys(["narrow", "short", "vector"], "float32")
    state = compress(optax.adamw(1e-3), storage=storage).init(PARAMS).codes[0]
    assert dtypes(state.mu) == dtypes(state.nu) == {"large": other, **in_fp32}
    assert state.count.dtype == jnp.int32
    moment = compress(optax.lion(1e-3), storage=storage).init({"large": PARAMS["large"]})
    assert sum(x.nbytes for x in jax.tree.leaves(moment)) <= 64 * 256 * (1 + 5 / 128) + 64
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    sharded = {
        name: jax.device_put(p, NamedSharding(mesh, P("x") if p.shape[0] % 8 == 0 else P()))
        for name, p in PARAMS.items()
    }
    lion = compress(optax.lion(1e-3), storage=storage)
    assert dtypes(lion.init(sharded).codes[0].mu) == {"large": other, **in_fp32}
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    in_bf16 = dict.fromkeys(in_fp32, "bfloat16")
    assert dtypes(lion.init(half).codes[0].mu) == {"large": other, **in_bf16}


def test_where_sees_path_and_leaf_and_decides():
    seen = []

    def where(path, leaf):
        seen.append((path, leaf.shape))
        return ".nu" in path

    state = compress(optax.adamw(1e-3), where=where).init(PARAMS).codes[0]
    assert seen == [("[0].mu['large']", (64, 256)), ("[0].nu['large']", (64, 256))]
    assert (state.mu["large"].dtype, state.nu["large"].dtype) == (jnp.float32, jnp.float8_e4m3fn)
    nothing = compress(optax.adamw(1e-3), where=lambda path, leaf: path.startswith("mu"))
    with pytest.warns(UserWarning, match=r"false for all moments, the first .* .\[0\]\.mu\["):
        nothing.init(PARAMS)


def test_what_follows_no_parameter_or_is_for_users_to_read_is_not_compressed():
    table = jnp.linspace(0, 1, 64 * 256).reshape(64, 256)

    def init(params):
        return {"table": table, "moment": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        return updates, state

    state = compress(optax.GradientTransformation(init, update)).init(PARAMS)
    assert state.codes["table"].dtype == jnp.float32
    assert state.codes["moment"]["large"].dtype == jnp.float8_e4m3fn
    search = compress(optax.scale_by_backtracking_linesearch(15, store_grad=True))
    assert search.init(PARAMS).codes.grad["large"].dtype == jnp.float32


def is_matrix(params):
    return jax.tree.map(lambda p: p.shape == (64, 256), params)


MASKED = {
    "a tree": (
        optax.masked(optax.adam(1e-3), {"layer": {"w": True, "b": False}, "head": False}),
        2,
    ),
    "a function": (optax.masked(optax.adam(1e-3), is_matrix), 2),
    "a prefix": (optax.adamw(1e-3, weight_decay=0.1, mask={"layer": True, "head": False}), 4),
    "no state": (optax.sgd(0.1), 0),
}


@pytest.mark.parametrize("name", MASKED)
def test_arithmetic_and_masks_are_those_of_the_wrapped_transformation(name):
    params = {
        "layer": {"w": normal(0, (64, 256)), "b": normal(1, 256)},
        "head": normal(2, (256, 64)),
    }
    grads = jax.tree.map(np.cos, params)
    tx, moments = MASKED[name]
    compressed = compress(tx)
    state = compressed.init(params)

    @jax.jit
    def updates_of_both(grads, state, params):
        alone, _ = tx.update(grads, tx.init(params), params)
        return compressed.update(grads, state, params)[0], alone

    # The first step begins with moments of zero, which FP8 represents exactly; XLA fuses the two
    # differently.
    updates, wanted = updates_of_both(grads, state, params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2**-18), updates, wanted)
    in_fp8 = [leaf for leaf in jax.tree.leaves(state.codes) if leaf.dtype == jnp.float8_e4m3fn]
    assert len(in_fp8) == moments


# --- What a step does ------------------------------------------------------------------------


def test_sums_that_grow_by_less_than_a_code_grow():
    """Adagrad's sum from 1 to 2 in 500 steps: 0.2 % of it a step, a code being 6 % / k."""
    params = {"w": jnp.ones((16, 256))}
    grads = {"w": np.float32((1 / 500) ** 0.5 * np.exp(0.3 * np.asarray(normal(0, (16, 256)))))}

    def final_sum(storage):
        tx = compress(optax.scale_by_rss(1.0), storage=storage)

        def body(state, _):
            return tx.update(grads, state, params)[1], None

        state = jax.jit(lambda s: jax.lax.scan(body, s, length=500)[0])(tx.init(params))
        return np.mean(decompress(state, storage).sum_of_squares["w"])

    wanted = 1 + np.mean(500 * np.square(grads["w"]))
    assert final_sum(SMALL) == pytest.approx(wanted, rel=0.01)
    assert abs(final_sum(Storage(min_size=1024, stochastic=False)) / wanted - 1) > 0.3


def test_names_are_found_once_and_moments_can_be_read():
    params, grads = {"w": normal(0, (16, 256))}, {"w": normal(1, (16, 256))}
    tx = compress(optax.chain(optax.inject_hyperparams(optax.adam)(1e-3)), storage=SMALL)
    _, state = jax.jit(tx.update)(grads, tx.init(params), params)
    for name in ("mu", "nu", "learning_rate"):
        assert optax.tree.get(state, name) is not None
    adam = optax.adam(1e-3)
    _, wanted = jax.jit(adam.update)(grads, adam.init(params), params)
    got = decompress((state, "anything"), SMALL)[0]
    # Stochastic rounding moves an E4M3 code by up to 2^-3 of itself, and a value by twice that in a
    # group whose k is 1/2; below the smallest normal code by a step that is the same for all.
    mu = optax.tree.get(wanted, "mu")["w"]
    np.testing.assert_allclose(
        optax.tree.get(got, "mu")["w"], mu, rtol=2**-2, atol=2**-12 * np.abs(mu).max()
    )
    assert float(optax.tree.get(state, "learning_rate")) == pytest.approx(1e-3)


def test_moments_have_the_dtype_that_the_wrapped_transformation_gave_them():
    seen = []

    def update(updates, state, params=None):
        seen.append(state.trace["w"].dtype)
        return inner.update(updates, state, params)

    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        inner = optax.trace(0.9)
        tx = compress(optax.GradientTransformation(inner.init, update), storage=SMALL)
        params = {"w": normal(0, (16, 256)).astype(dtype)}
        updates, state = jax.jit(tx.update)(params, tx.init(params), params)
        assert seen.pop() == updates["w"].dtype == dtype
        assert state.codes.trace["w"].dtype == jnp.float8_e4m3fn
        largest = np.max(np.abs(np.float32(params["w"]).reshape(16, 2, 128)), axis=-1)
        np.testing.assert_array_equal(state.amax[0]["w"], largest)  # exact in BF16 too


def test_a_state_in_8_bits_or_in_one_vector_or_of_changing_structure_is_refused():
    params, every = {"w": normal(0, (16, 256))}, Storage(min_size=0)
    with pytest.raises(ValueError, match="8 bits already"):
        compress(fp8_adamw(1e-3, storage=SMALL), storage=SMALL).init(params)
    compress(fp8_adamw(1e-3), storage=SMALL).init(params)  # in FP32
    for shape in ((16, 256), (256,), (1, 256)):
        params = {"w": normal(0, shape), "b": normal(1, (3,))}
        with pytest.raises(
            ValueError, match=r"\[0\].mu holds all .*optax.flatten\(compress\(tx\)\)"
        ):
            compress(optax.flatten(optax.lion(1e-3)), storage=every).init(params)
        compress(optax.sm3(0.1), storage=every).init(params)  # a vector for each axis
        tx = optax.flatten(compress(optax.lion(1e-3), storage=every))
        assert tx.init(params).codes[0].mu.dtype == jnp.float8_e4m3fn

    def update(updates, state, params=None):
        return updates, (*state, jnp.zeros(3))

    tx = compress(optax.GradientTransformation(lambda params: (jnp.zeros(3),), update))
    with pytest.raises(ValueError, match="changed the structure of its state"):
        tx.update(PARAMS, tx.init(PARAMS))
