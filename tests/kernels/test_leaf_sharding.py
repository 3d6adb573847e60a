"""Leaves sharded over a mesh: every device works on its shard, and knows which one it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from coat_jax.kernels.leaf_sharding import LeafShard, run_sharded_leaves
from coat_jax.numerics.groups import scales_shape

GROUP = 16
LAYOUTS = [
    pytest.param((4,), ("a",), (16, 64), P(None, "a"), id="columns"),
    pytest.param((2, 4), ("a", "b"), (16, 64), P("b", "a"), id="both, crossed"),
    pytest.param((2, 4), ("a", "b"), (16, 64), P(("a", "b")), id="two axes on rows"),
    pytest.param((2, 4), ("a", "b"), (16, 64), P("b"), id="replicated over a"),
    pytest.param((2, 2, 2), ("a", "b", "c"), (4, 6, 64), P("a", "b", "c"), id="rank 3"),
    pytest.param((2, 4), ("a", "b"), (3, 8, 64), P(None, "a", "b"), id="stacked, both"),
    pytest.param((2, 2, 2), ("a", "b", "c"), (2, 4, 4, 64), P("a", "b", None, "c"), id="rank 4"),
    pytest.param((8,), ("a",), (16, 40), P("a"), id="uneven rows"),
    pytest.param((4,), ("a",), (64,), P("a"), id="sharded vector"),
    pytest.param((8,), ("a",), (), P(), id="scalar"),
]


def number_groups(shared, leaves, shards: list[LeafShard]):
    """Every group's index in the whole, from the position of the shard alone."""
    del shared
    results = []
    for (x, scales), shard in zip(leaves, shards, strict=True):
        assert x.shape == shard.shape
        i = jnp.arange(scales.size, dtype=jnp.int32)
        index = shard.start + i + sum(i // inner * jump for inner, jump in shard.jumps)
        results.append([x + 1, index.reshape(scales.shape)])
    return results


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize(("mesh_shape", "names", "shape", "spec"), LAYOUTS)
def test_every_shard_knows_its_groups(mesh_shape, names, shape, spec, kind):
    mesh = jax.make_mesh(mesh_shape, names, axis_types=(kind,) * len(names))
    sharding = NamedSharding(mesh, spec)
    x = jax.device_put(np.zeros(shape, np.float32), sharding)
    scales = jax.device_put(np.zeros(scales_shape(shape, GROUP), np.int32), sharding)
    shared = jnp.zeros(3)

    @jax.jit
    def run(shared, x, scales):
        [[y, index]] = run_sharded_leaves(number_groups, [shared], [[x, scales]], group_size=GROUP)
        assert [jax.typeof(a).sharding for a in (y, index)] == [
            jax.typeof(a).sharding for a in (x, scales)
        ]
        return y, index

    with jax.set_mesh(mesh):
        y, index = run(shared, x, scales)
    np.testing.assert_array_equal(index, np.arange(scales.size).reshape(scales.shape))
    np.testing.assert_array_equal(y, np.ones(shape))
    assert y.sharding.is_equivalent_to(sharding, y.ndim)


def test_leaves_of_different_shardings_go_together():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    shapes, specs = [(8, 64), (4, 16, 128), (48,)], [P("b"), P(None, "a", "b"), P()]
    leaves = [
        [jax.device_put(np.zeros(s, np.float32), NamedSharding(mesh, spec)) for s in pair]
        for shape, spec in zip(shapes, specs, strict=True)
        for pair in [(shape, scales_shape(shape, GROUP))]
    ]
    with jax.set_mesh(mesh):
        results = jax.jit(lambda *x: run_sharded_leaves(number_groups, [], x, group_size=GROUP))(
            *leaves
        )
    for (_, scales), (_, index) in zip(leaves, results, strict=True):
        np.testing.assert_array_equal(index, np.arange(scales.size).reshape(scales.shape))


def test_works_inside_shard_map_on_local_shards():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    x, scales = jnp.zeros((16, 64)), jnp.zeros((16, 4), jnp.int32)

    def local(x, scales):
        return run_sharded_leaves(number_groups, [], [[x, scales]], group_size=GROUP)[0][1]

    with jax.set_mesh(mesh):
        index = jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P("a")), out_specs=P("a"))
        )(x, scales)
    np.testing.assert_array_equal(index, np.tile(np.arange(8).reshape(2, 4), (8, 1)))


@pytest.mark.parametrize(
    ("mesh_shape", "spec", "columns"),
    [((8,), P(None, "a"), 64), ((4, 2), P(None, ("a", "b")), 160), ((2, 4), P("a", "b"), 96)],
    ids=str,
)
def test_an_axis_the_mesh_divides_inside_a_group_is_gathered(mesh_shape, spec, columns):
    names = ("a", "b")[: len(mesh_shape)]
    mesh = jax.make_mesh(mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))
    x = jax.device_put(np.zeros((4, columns), np.float32), NamedSharding(mesh, spec))
    groups = columns // GROUP
    with jax.set_mesh(mesh):
        [[y, index]] = jax.jit(
            lambda x: run_sharded_leaves(
                number_groups, [], [[x, jnp.zeros((4, groups), jnp.int32)]], group_size=GROUP
            )
        )(x)
    np.testing.assert_array_equal(index, np.arange(4 * groups).reshape(4, groups))
    np.testing.assert_array_equal(y, np.ones((4, columns)))
