"""Laws of all ways to store numbers in groups: shape, mesh and program change nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from coat_jax.numerics import blocks, expansion, integers, logarithms, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2
from coat_jax.numerics.quantizer import Quantizer

SIZE, KEY = 64, noise.leaf_key(0, 3, 1)
X = np.float32(np.random.default_rng(0).exponential(size=(16, 768)))


class Coder(NamedTuple):
    encode: Any  # an array and the size of its groups to codes and what each group has
    decode: Any
    dtypes: tuple  # of codes and of what each group has


def of(module, codes, *dtype, stochastic=False):
    def encode(x, size):
        u = noise.uniform(KEY, x.shape, run=size) if stochastic else None
        return module.encode(x, *dtype, group_size=size, noise=u)

    dtypes = codes, jnp.float32, jnp.uint8
    return Coder(encode, lambda e, size: module.decode(e, group_size=size), dtypes)


def in_blocks(*dtype, **how):
    return Coder(
        lambda x, size: blocks.to_blocks(x, *dtype, size=size, **how),
        lambda b, size: blocks.from_blocks(b, size=size),
        (*(dtype or (E4M3,)), jnp.uint8),
    )


TO_NEAREST = {
    "expansion": of(expansion, E4M3),
    "integers": of(integers, jnp.int8),
    "logarithms": of(logarithms, jnp.uint8),
    "blocks": in_blocks(),
}
CODERS = TO_NEAREST | {
    "expansion at random": of(expansion, E5M2, E5M2, stochastic=True),
    "integers at random": of(integers, jnp.int8, stochastic=True),
    "logarithms at random": of(logarithms, jnp.uint8, stochastic=True),
    "blocks at random": in_blocks(E5M2, stochastic=True),
}


@jax.jit
def encoded(x):
    return {name: coder.encode(x, SIZE) for name, coder in CODERS.items()}


@jax.jit
def decoded(every):
    return {name: CODERS[name].decode(e, SIZE) for name, e in every.items()}


@jax.jit
def both(x):
    every = encoded(x)
    return every, decoded(every)


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_same(got, want):
    """The same codes; values, which end in exp2 of up to 32, to 2^-18."""
    assert_equal(got[0], want[0])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2.0**-18), got[1], want[1])


def test_leading_axes_other_groups_and_what_is_fused_change_nothing():
    """XLA may drop a cast and its inverse where it is told so; here it must not."""
    every = encoded(X)
    want = every, decoded(every)
    assert_same(both(X), want)
    stacked = both(X.reshape(2, 8, 768))
    assert_same(jax.tree.map(lambda a: a.reshape(16, -1), stacked), want)
    changed = X.copy()
    changed[:, SIZE : 2 * SIZE] *= 1e10
    for pair in zip(*map(jax.tree.leaves, (encoded(changed), every)), strict=True):
        assert_equal(*(np.delete(np.reshape(part, (16, 12, -1)), 1, axis=1) for part in pair))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("a"), P("a", "b"), P(None, ("a", "b"))], ids=str)
def test_no_mesh_changes_the_result_and_what_groups_have_is_sharded_as_they_are(spec, kind):
    """96 columns on each of 8 devices cut groups of 64.

    XLA gathers them; an explicit sharding is refused, and the error says how not to cut.
    """
    x = jax.device_put(X, jax.NamedSharding(jax.make_mesh((2, 4), ("a", "b"), (kind,) * 2), spec))
    if kind == AxisType.Auto:
        assert_same(both(x), both(X))
    elif len(spec) == 2 and spec[0] is None:
        for coder in CODERS.values():
            with pytest.raises(ValueError, match=r"into 8 parts.*groups of 64.*divides 96\."):
                jax.eval_shape(lambda x, coder=coder: coder.encode(x, SIZE), x)
    else:
        found = both(x)
        assert_same(found, both(X))
        for part in jax.tree.leaves(found):
            assert jax.typeof(part).sharding.spec == P(*spec, *[None] * (2 - len(spec)))


def test_vmap_changes_nothing_and_half_precision_is_stored_as_its_float32():
    """But under vmap a last place of a scale: XLA may divide by multiplying."""

    def nearest(x):
        return [coder.encode(x, SIZE) for coder in TO_NEAREST.values()]

    pairs = map(jax.tree.leaves, (jax.jit(jax.vmap(nearest))(X), jax.jit(nearest)(X)))
    for a, b in zip(*pairs, strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=2.0**-22)
    for narrow in (jnp.bfloat16, jnp.float16):
        x = X.astype(narrow)
        assert_equal(encoded(x), encoded(x.astype(np.float32)))


def test_dtypes_and_shapes_are_as_documented():
    every, values = jax.eval_shape(both, jax.ShapeDtypeStruct((3, 200), jnp.bfloat16))
    for name, (codes, *of_groups) in ((name, jax.tree.leaves(e)) for name, e in every.items()):
        assert (codes.dtype, *(part.dtype for part in of_groups)) == CODERS[name].dtypes, name
        assert codes.shape == values[name].shape == (3, 200)
        assert {part.shape for part in of_groups} == {(3, 4)}
        assert values[name].dtype == jnp.float32


@pytest.mark.parametrize("shape", [(4, 48), (7,), ()], ids=str)
def test_a_group_larger_than_its_axis_is_the_whole_axis(shape):
    """Not padded, which would take terabytes."""
    x = np.asarray(np.random.default_rng(0).exponential(size=shape), np.float32)

    @jax.jit
    def coded(x):
        return [{name: code(x, size) for name, code in CODED.items()} for size in (10**12, 48)]

    assert_equal(*coded(x))


def there_and_back(coder):
    return lambda x, size: coder.decode(coder.encode(x, size), size)


CODED = {name: there_and_back(coder) for name, coder in TO_NEAREST.items()} | {
    "quantizer": lambda x, size: Quantizer("E4M3", over="group", size=size)(x),
    "quantizer in blocks": lambda x, size: Quantizer("INT8", over="block", size=size)(x),
}


@pytest.mark.parametrize("name", CODED)
def test_wrong_sizes_and_dtypes_are_refused(name):
    for size in (0, -1, 1.5, True, "16", None):
        with pytest.raises(ValueError, match=r"size.*must be a .*whole number"):
            CODED[name](jnp.ones(4), size)
    for dtype in ("int32", "bool", "complex64"):
        with pytest.raises(TypeError, match=rf"x has dtype {dtype}.*real floats"):
            CODED[name](jnp.ones(4, dtype), 16)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float8_e4m3b11fnuz, "fp8", None])
def test_only_fp8_is_written_and_read(dtype):
    x = jnp.ones(4)
    stored = Expanded(x, jnp.ones(1), jnp.full(1, 16, jnp.uint8))
    for call in (
        lambda: blocks.to_blocks(x, dtype, size=16),
        lambda: expansion.encode(x, dtype),
        lambda: expansion.decode(stored),
    ):
        with pytest.raises(ValueError, match=r"not an FP8 format.*coat\.formats\.E4M3"):
            call()


CALLS = {
    **{name: coder.encode for name, coder in TO_NEAREST.items()},
    "blocks at random": CODERS["blocks at random"].encode,
    "dithered": lambda x, size: expansion.encode(x, group_size=size, noise=x, dithered=True),
    "noise": lambda x, size: noise.uniform_pair(KEY, x.shape, run=size),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_program_and_in_a_program_there_is_no_call(name, caplog):
    """So that what surrounds it is fused with it. Of a shape that no other test has compiled."""
    x = jnp.ones((3, 1, 2, 1, 80))
    with jax.log_compiles():
        CALLS[name](x, 16)
    compiled = [r for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert len(compiled) == 1
    program = jax.jit(CALLS[name], static_argnums=1).lower(x, 16).as_text()
    functions = ("to_blocks", "encode", "uniform_pair")
    assert not [function for function in functions if f"@{function}(" in program]
