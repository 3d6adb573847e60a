"""The state is sharded as the parameters are, and no mesh changes the numbers or adds traffic.

Parameters and the groups' largest values are the same to their last bit or two: XLA contracts
a * b + c to one rounding or leaves two, depending on what it fuses, and cutting an array changes
that. Codes and exponents are the same, but for the few values that those last bits carry over the
boundary of two codes.
"""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import normal, step_of

from coat_jax.optax import (
    Storage,
    compress,
    fitting_group_size,
    fp8_adamw,
    in_place,
    scale_by_fp8_adam,
    state_shardings,
)

SHAPES = {"cube": (8, 4, 512), "matrix": (64, 1024), "vector": (64,)}
MESHES = {
    (8,): {"cube": P("x"), "matrix": P(None, "x"), "vector": P()},
    (4, 2): {"cube": P(None, "x", "y"), "matrix": P("y", "x"), "vector": P("y")},
    (2, 2, 2): {"cube": P("x", "y", "z"), "matrix": P(("x", "z"), "y"), "vector": P("z")},
}
STEPS = 3
COLLECTIVES = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[-a-z]*\("
KINDS = (AxisType.Auto, AxisType.Explicit)


chain = fp8_adamw(1e-2, weight_decay=0.1)
fused = in_place(chain)
compressed = compress(optax.lion(1e-2, weight_decay=0.1))
OPTIMIZERS = {
    "chain": (chain, step_of(chain)),
    "fused": (fused, fused.step),
    "compressed": (compressed, step_of(compressed)),
}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: normal(rng, shape) for name, shape in SHAPES.items()}


@functools.cache
def walk(which, shape=None, kind=None):
    """Parameters and state after some steps on a mesh, or on one device, and the program."""
    optimizer, step = OPTIMIZERS[which]
    place, context, of_state = (lambda tree: tree), contextlib.nullcontext(), None
    if shape:
        mesh, shardings = mesh_and_shardings(shape, kind)
        place, context = placed(shardings), jax.set_mesh(mesh)
        of_state = state_shardings(optimizer, place(draw(0)))
    with context:
        params = place(draw(0))
        state = jax.jit(optimizer.init, out_shardings=of_state)(params)
        program = jax.jit(step).lower(params, params, state).compile()
        for i in range(STEPS):
            params, state = program(params, place(draw(1 + i)), state)
    return params, state, program.as_text()


def mesh_and_shardings(shape, kind):
    names = ("x", "y", "z")[: len(shape)]
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    return mesh, {name: NamedSharding(mesh, spec) for name, spec in MESHES[shape].items()}


def placed(shardings):
    return lambda tree: {name: jax.device_put(x, shardings[name]) for name, x in tree.items()}


def assert_same_but_for_last_bits(got, wanted):
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        name = jax.tree_util.keystr(path)
        if a.dtype == jnp.float32:
            np.testing.assert_allclose(a, b, rtol=2.0**-21, atol=2.0**-22, err_msg=name)
        else:
            integers = np.dtype(f"i{a.dtype.itemsize}")  # those of neighbouring codes are 1 apart
            apart = np.abs(np.int64(np.asarray(a).view(integers)) - np.asarray(b).view(integers))
            assert apart.max() <= 1, name
            assert np.count_nonzero(apart) <= 1e-4 * apart.size, name


def assert_sharded_alike(leaves, wanted):
    for (path, leaf), sharding in zip(
        jax.tree.leaves_with_path(leaves), jax.tree.leaves(wanted), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), jax.tree_util.keystr(path)


ON_MESHES = [("chain", (8,), AxisType.Explicit), ("chain", (2, 2, 2), AxisType.Auto)]
ON_MESHES += [("fused", (4, 2), AxisType.Auto), ("compressed", (4, 2), AxisType.Explicit)]
ON_MESHES += [("chain", (4, 2), AxisType.Explicit)]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("which", "shape", "kind"), ON_MESHES, ids=[f"{w} {s} {k.name}" for w, s, k in ON_MESHES]
)
def test_no_mesh_changes_the_results_or_makes_a_step_communicate(which, shape, kind):
    params, state, program = walk(which, shape, kind)
    assert_same_but_for_last_bits((params, state), walk(which)[:2])
    assert not re.findall(COLLECTIVES, program)
    _, shardings = mesh_and_shardings(shape, kind)
    assert_sharded_alike(params, shardings)
    if which == "chain":
        assert_sharded_alike(state[0].mu.codes, shardings)
        assert_sharded_alike(state[0].nu.codes, shardings)


@pytest.mark.costly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("which", "shape"), [("compressed", (2, 2, 2)), ("chain", (4, 2))])
def test_the_state_is_sharded_as_its_parameters(which, shape, kind):
    """Made eagerly, or under jit with `state_shardings`, from arrays or from their shapes."""
    tx, _ = OPTIMIZERS[which]
    _, shardings = mesh_and_shardings(shape, kind)
    params = placed(shardings)(draw(0))
    wanted = state_shardings(tx, params)
    structs = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
    )
    assert jax.tree.leaves(state_shardings(tx, structs)) == jax.tree.leaves(wanted)
    eager = tx.init(params)
    assert_sharded_alike(jax.jit(tx.init, out_shardings=wanted)(params), wanted)
    for leaf, sharding in zip(jax.tree.leaves(eager), jax.tree.leaves(wanted), strict=True):
        if leaf.dtype in (jnp.int8, jnp.float8_e4m3fn):  # codes of moments
            name = next(name for name, shape in SHAPES.items() if shape == leaf.shape)
            assert leaf.sharding.is_equivalent_to(shardings[name], leaf.ndim)
        if leaf.ndim:
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    if which == "chain":  # scales are sharded with their groups
        amax, exponent_x16 = eager[0].mu.amax["matrix"], eager[0].nu.exponent_x16["cube"]
        assert (amax.shape, amax.sharding.shard_shape(amax.shape)) == ((64, 8), (32, 2))
        assert exponent_x16.sharding.shard_shape((8, 4, 4)) == (8, 1, 2)


def test_state_shardings_need_placed_parameters():
    with pytest.raises(ValueError, match=r"params\['cube'\] has no NamedSharding"):
        state_shardings(chain, draw(0))
    with pytest.raises(ValueError, match=r"no leaves"):
        state_shardings(chain, {})


@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_sharded_inside_a_group_is_gathered_or_refused(kind):
    """200 columns, cut into 8 times 25 inside the groups of 128.

    JAX gathers nothing by itself on explicit axes, and the error says how to shard instead.
    """
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    values = jnp.float32(np.random.default_rng(0).standard_normal((16, 200)))
    params = jax.device_put(values, NamedSharding(mesh, P(None, "x")))
    tx = fp8_adamw(1e-2, storage=Storage(min_size=0))
    state, step = tx.init(params), jax.jit(step_of(tx))
    assert state[0].mu.codes.sharding.spec == P(None, "x")
    assert state[0].mu.amax.sharding.is_fully_replicated
    if kind == AxisType.Explicit:
        with jax.set_mesh(mesh), pytest.raises(ValueError, match="whole groups of 128"):
            step(params, params, state)
        return
    with jax.set_mesh(mesh):
        compiled = step.lower(params, params, state).compile()
        got = compiled(params, params, state)
    assert re.findall(COLLECTIVES, compiled.as_text())
    assert_same_but_for_last_bits(got, step(values, values, tx.init(values)))


# --- Wrappers that leave parameters out, and transformations of optax's own --------------------

MATRICES = {"cube": True, "matrix": True, "vector": False}
KIND_OF = {"cube": "large", "matrix": "large", "vector": "small"}


def wrappers(tx):
    return {
        "masked": optax.masked(tx, MATRICES),
        "partition": optax.partition({"large": tx, "small": optax.sgd(0.1)}, KIND_OF),
        "MultiSteps": optax.MultiSteps(tx, 2).gradient_transformation(),
    }


WRAPPED = {
    **{f"adamw, {name}": tx for name, tx in wrappers(fp8_adamw(1e-2)).items()},
    **{f"compress inside, {name}": tx for name, tx in wrappers(compress(optax.lion(1e-2))).items()},
    **{f"compress around, {n}": compress(tx) for n, tx in wrappers(optax.lion(1e-2)).items()},
    "compressed muon": compress(optax.contrib.muon(1e-2)),
    "lookahead": optax.lookahead(fp8_adamw(1e-2), 5, 0.5),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_any_wrapper_is_sharded_as_its_parameters(name):
    mesh, shardings = mesh_and_shardings((4, 2), AxisType.Auto)
    params = placed(shardings)(draw(0))
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    tx = WRAPPED[name]
    wanted = state_shardings(tx, params)
    shapes = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(shapes) == jax.tree.structure(wanted)
    sharded = 0
    for leaf, sharding in zip(jax.tree.leaves(shapes), jax.tree.leaves(wanted), strict=True):
        sharding.shard_shape(leaf.shape)  # raises where the mesh does not divide an axis
        for parameter, shape in SHAPES.items():
            if leaf.shape == shape and len(shape) > 1:
                assert sharding == shardings[parameter]
                sharded += 1
    assert sharded > 0
    if name == "compress around, masked":  # and can be made and stepped there
        with jax.set_mesh(mesh):
            state = jax.jit(tx.init, out_shardings=wanted)(params)
            assert_sharded_alike(state, wanted)
            jax.jit(tx.update)(params, state, params)


# --- Trainers that give scales the PartitionSpec of their parameter ----------------------------


def sharded_struct(shape, spec, parts=4):
    mesh = jax.make_mesh((8 // parts, parts), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


@pytest.mark.parametrize(
    ("shape", "spec", "size"),
    [
        ((256, 128), P(None, "fsdp"), 32),
        ((4096, 11008), P(None, "fsdp"), 64),
        ((4096, 11008), P("fsdp", None), 128),
    ],
)
def test_with_a_fitting_group_size_scales_take_their_parameters_spec(shape, spec, size):
    """Small leaves have no groups. Where no size fits, another axis must be sharded."""
    params = {"w": sharded_struct(shape, spec), "small": sharded_struct((8, 40), P(None, "fsdp"))}
    assert fitting_group_size(params) == size
    state = jax.eval_shape(scale_by_fp8_adam(storage=Storage(group_size=size)).init, params)
    for part in state.mu:
        params["w"].sharding.shard_shape(part["w"].shape)  # IndivisibleError where it fails
    with pytest.raises(ValueError, match=r"\['w'\] has 88 columns, sharded into 8 parts of 11"):
        fitting_group_size({"w": sharded_struct((1024, 88), P(None, "fsdp"), 8)})
    with pytest.raises(ValueError, match=r"has no NamedSharding"):
        fitting_group_size({"w": jnp.ones((256, 128))})


@pytest.mark.parametrize("tx", [fp8_adamw(1e-2), compress(optax.adamw(1e-2))])
@pytest.mark.parametrize("shape", [(256, 128), (32, 128)], ids=["FP8", "FP32"])
def test_annotations_of_flax_fit_the_state(tx, shape):
    """nnx.Optimizer and MaxText shard every leaf by the annotation that init passed on to it."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    box = nn.LogicallyPartitioned(jnp.ones(shape), ("embed", "mlp"))
    rules = (("embed", None), ("mlp", "fsdp"))
    state = jax.eval_shape(tx.init, {"w": box})
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(state), mesh, rules)
    state = jax.jit(lambda: nn.unbox(tx.init({"w": box})), out_shardings=shardings)()
    largest = max(jax.tree.leaves(state), key=lambda leaf: leaf.size)
    assert largest.sharding.spec == P(None, "fsdp")


@pytest.mark.parametrize("min_size", [10**9, 0], ids=["FP32", "8 bits"])
def test_a_state_that_is_made_in_shard_map_passes_through_scan(min_size):
    """In its type each leaf may differ between shards as its parameter may."""
    storage = Storage(min_size=min_size)
    tx = fp8_adamw(1e-2, storage=storage)
    optimizer = in_place(tx)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))

    def stepped(params, grads):
        def step(carry, _):
            (one, of_one), (other, of_other) = carry
            return (
                step_of(tx)(one, grads, of_one),
                optimizer.step(other, grads, of_other),
            ), None

        begin = (params, tx.init(params)), (params, optimizer.init(params))
        return [params for params, _ in jax.lax.scan(step, begin, None, length=2)[0]]

    whole = jnp.ones((4, 256))
    by_shards = jax.shard_map(stepped, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))
    wanted = jax.jit(stepped)(whole, whole)
    for got, want in zip(jax.jit(by_shards)(whole, whole), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
