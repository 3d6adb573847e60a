"""Expansion in programs: any shape, mesh and transformation gives the same; and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
from expansion_cases import MODERATE, PLAIN, decode, encode, hostile, hostile_noise
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.numerics import expansion, noise
from coat_jax.numerics.formats import E4M3, E5M2

SHAPE, SIZE = PLAIN
X, NOISE = hostile(0, *PLAIN, MODERATE), hostile_noise(0, SHAPE)


def encoded(x=X, noise=NOISE):
    return encode(x, group_size=SIZE, noise=noise)


def test_the_leading_shape_and_other_groups_change_nothing():
    want, lead = encoded(), (2, 2, SHAPE[-1])
    got = encoded(X.reshape(lead), NOISE.reshape(lead))
    for part, flat in zip(got, want, strict=True):
        np.testing.assert_array_equal(part.reshape(flat.shape), flat)
    values = decode(got, group_size=SIZE).reshape(SHAPE)
    np.testing.assert_array_equal(values, decode(want, group_size=SIZE))
    changed = X.copy()
    changed[:, SIZE : 2 * SIZE] *= 1e10
    for pair in zip(encoded(changed), want, strict=True):
        others = [np.delete(np.asarray(part).reshape(4, 4, -1), 1, axis=1) for part in pair]
        np.testing.assert_array_equal(*others)


def test_result_does_not_depend_on_the_mesh():
    """Also where shards cut groups: 768 columns over 4 or 8 devices, in groups of 128."""
    x = hostile(0, (16, 768), 128, MODERATE)

    @jax.jit
    def step(x):
        e = expansion.encode(x)
        u = noise.uniform(noise.leaf_key(0, 3, 1), x.shape, run=128)
        return e, expansion.decode(e), expansion.encode(x, E5M2, noise=u)

    want = step(x)
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y"))
    for spec in (P("x", "y"), P(None, ("x", "y"))):
        sharded = step(jax.device_put(x, NamedSharding(mesh, spec)))
        jax.tree.map(np.testing.assert_array_equal, sharded, want)


def test_vmap_and_fusing_encode_with_decode_change_nothing():
    """XLA may drop a cast and its inverse where it is told so; here it must not.

    Decoding ends in exp2 of a number of at most 32, of which FP32 leaves 2^-19.
    """
    want = encoded()
    values = decode(want, group_size=SIZE)

    @jax.jit
    def fused(x, noise):
        e = expansion.encode(x, group_size=SIZE, noise=noise)
        return e, expansion.decode(e, group_size=SIZE)

    for program in (fused, jax.vmap(fused)):
        e, y = program(X, NOISE)
        jax.tree.map(np.testing.assert_array_equal, e, want)
        np.testing.assert_allclose(y, values, rtol=2**-18)


def test_half_precision_is_encoded_as_its_float32_and_dtypes_are_as_documented():
    for narrow in (jnp.bfloat16, jnp.float16):
        x = np.asarray(X, narrow)
        got, want = encoded(x, None), encoded(x.astype(np.float32), None)
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got.codes.dtype == E4M3
    e = encode(np.ones((3, 200), np.float32), E5M2)
    assert (e.codes.dtype, e.codes.shape) == (E5M2, (3, 200))
    assert (e.amax.dtype, e.amax.shape) == (jnp.float32, (3, 2))
    assert (e.k16.dtype, e.k16.shape) == (jnp.uint8, (3, 2))
    assert decode(e).dtype == jnp.float32
