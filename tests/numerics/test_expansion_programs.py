"""Expansion in programs: any shape, mesh and transformation gives the same; and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expansion_cases import PLAIN, Case, decode, encode, hostile, hostile_noise, round_trip
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.numerics import expansion, noise
from coat_jax.numerics.expansion import Expanded
from coat_jax.numerics.formats import E4M3, E5M2


def test_result_does_not_depend_on_the_leading_shape():
    shape, group_size = PLAIN
    x, u = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN), hostile_noise(0, shape)
    want = encode(x, group_size=group_size, noise=u)
    for lead in ((2, 2), (4, 1)):
        new = (*lead, shape[-1])
        got = encode(x.reshape(new), group_size=group_size, noise=u.reshape(new))
        y = decode(got, group_size=group_size)
        flat = (*want, decode(want, group_size=group_size))
        for part, flat_part in zip((*got, y), flat, strict=True):
            assert part.shape[:-1] == lead
            np.testing.assert_array_equal(part.reshape(flat_part.shape), flat_part)


def test_groups_do_not_see_each_other():
    x = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN)
    case = Case(*PLAIN, E4M3, True)
    want = round_trip(x, case)
    for group in range(4):
        changed, rest = x.copy(), np.arange(4) != group
        changed[:, 64 * group : 64 * group + 64] *= 1e10
        e, y = round_trip(changed, case)
        for got, reference in zip((e.codes, y), (want[0].codes, want[1]), strict=True):
            kept = got.reshape(4, 4, 64)[:, rest]
            np.testing.assert_array_equal(kept, reference.reshape(4, 4, 64)[:, rest])
        np.testing.assert_array_equal(e.amax[:, rest], want[0].amax[:, rest])
        assert np.all(e.amax[:, group] > want[0].amax[:, group])


def test_result_does_not_depend_on_the_mesh():
    """Also where shards cut groups: 768 columns over 4 or 8 devices, in groups of 128."""
    x = hostile([(0.0, 12.0, 0.1, 0.5)], 0, (16, 768), 128)

    def step(x):
        e = expansion.encode(x)
        u = noise.uniform(noise.leaf_key(0, 3, 1), x.shape, run=128)
        return e, expansion.decode(e), expansion.encode(x, E5M2, noise=u)

    want = jax.tree.leaves(jax.jit(step)(x))
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y"))
    for spec in (P("x", "y"), P(None, ("x", "y"))):
        sharding = NamedSharding(mesh, spec)
        sharded = jax.jit(step)(jax.device_put(x, sharding))
        for got, reference in zip(jax.tree.leaves(sharded), want, strict=True):
            np.testing.assert_array_equal(got, reference)


def test_vmap_and_single_operations_change_nothing():
    """But for images within FP32 rounding of a tie: here are none.

    Decoding ends in exp2 of a number of at most 32, of which FP32 leaves 2^-19.
    """
    shape, size = PLAIN
    x, u = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN), hostile_noise(0, shape)
    want = encode(x, group_size=size, noise=u)
    decoded = decode(want, group_size=size)
    with jax.disable_jit():
        single = expansion.encode(jnp.asarray(x), group_size=size, noise=u)
        single_decoded = expansion.decode(single, group_size=size)
    mapped = jax.vmap(lambda x, u: encode(x, group_size=size, noise=u))(x, u)
    for got in (single, mapped):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_allclose(single_decoded, decoded, rtol=2**-18)
    rows = jax.vmap(lambda e: decode(e, group_size=size))(mapped)
    np.testing.assert_allclose(rows, decoded, rtol=2**-18)


def test_fusing_encode_with_decode_keeps_the_rounding():
    """XLA may drop a cast and its inverse where it is told so; here it must not."""
    x = hostile([(0.0, 12.0, 0.1, 0.5)], 0, *PLAIN)
    fused = jax.jit(lambda x: expansion.decode(expansion.encode(x, group_size=64), group_size=64))
    apart = decode(encode(x, group_size=64), group_size=64)
    np.testing.assert_allclose(fused(x), apart, rtol=2**-18)


@pytest.mark.parametrize("source", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_encoded_as_its_float32(source):
    x = np.asarray(hostile([(0.0, 8.0, 0.1, 0.5)], 0, *PLAIN), source)
    got, want = encode(x, group_size=64), encode(x.astype(np.float32), group_size=64)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_dtypes_are_as_documented():
    e = encode(np.ones((3, 200), np.float32), E5M2)
    assert (e.codes.dtype, e.codes.shape) == (E5M2, (3, 200))
    assert (e.amax.dtype, e.amax.shape) == (jnp.float32, (3, 2))
    assert (e.k16.dtype, e.k16.shape) == (jnp.uint8, (3, 2))
    assert decode(e).dtype == jnp.float32


def test_expanded_passes_through_jit_as_a_tree():
    e = encode(np.ones((3, 200), np.float32))
    doubled = jax.jit(lambda e: e._replace(amax=2 * e.amax))(e)
    assert isinstance(doubled, Expanded)
    np.testing.assert_array_equal(decode(doubled), np.full((3, 200), 2.0))
    assert len(jax.tree.leaves(e)) == 3
    shapes = jax.eval_shape(expansion.encode, jax.ShapeDtypeStruct((3, 200), jnp.bfloat16))
    assert [leaf.shape for leaf in shapes] == [leaf.shape for leaf in e]


def test_works_inside_what_is_differentiated():
    """A moment carries no gradient; what is multiplied with it does."""

    def loss(w, m):
        return jnp.sum(w * jax.lax.stop_gradient(expansion.decode(expansion.encode(m * w))))

    w, m = np.full(16, 3, np.float32), np.arange(16, dtype=np.float32)
    gradient = jax.jit(jax.grad(loss))(w, m)
    np.testing.assert_allclose(gradient, decode(encode(w * m)), rtol=2**-18)


@pytest.mark.parametrize("group_size", [0, -1, 1.5, True, "16", None])
def test_a_wrong_group_size_is_refused(group_size):
    with pytest.raises(ValueError, match=r"group_size must be a positive whole number"):
        expansion.encode(jnp.ones(4), group_size=group_size)
    stored = Expanded(jnp.ones(4, E4M3), jnp.ones(1), jnp.full(1, 16, jnp.uint8))
    with pytest.raises(ValueError, match=r"group_size must be a positive whole number"):
        expansion.decode(stored, group_size=group_size)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.bool_, jnp.complex64])
def test_only_real_floats_are_encoded(dtype):
    with pytest.raises(TypeError, match=rf"x has dtype {jnp.dtype(dtype).name}.*real floats"):
        expansion.encode(jnp.ones(4, dtype))


def test_only_fp8_is_encoded_to_and_decoded_from():
    with pytest.raises(ValueError, match=r"not an FP8 format.*coat\.formats\.E4M3"):
        expansion.encode(jnp.ones(4), jnp.float16)
    stored = Expanded(jnp.ones(4), jnp.ones(1), jnp.full(1, 16, jnp.uint8))
    with pytest.raises(ValueError, match=r"not an FP8 format.*coat\.formats\.E4M3"):
        expansion.decode(stored)
