"""Muon with an 8-bit momentum: it is optax's but for the storage, and independent of the mesh."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from optax.contrib import muon as optax_muon
from small_model import SMALL

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.optax.muon.matrices import matrices_of
from coat_jax.optax.muon.newton_schulz import orthogonalize

STANDARD = np.array([3.4445, -4.7750, 2.0315])
IN_FP32 = coat.Storage(min_size=1 << 30)
AXES = ("fsdp", "tensor")
SHAPES = {"embedding": (96, 32), "wide": (32, 160), "tall": (160, 32), "square": (2, 64, 64)}


def normal(seed, shape):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def tree(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: normal(rng, shape) for name, shape in (shapes | {"bias": (32,)}).items()}


def distance(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel())


def apart(tree):
    """The tree with the matrices of its stack as separate leaves."""
    return {**tree, "square": list(tree["square"])}


def steps_of(tx, params, count=4, view=lambda tree: tree):
    """The updates of several steps, whose gradients have a mean as those of training do."""
    params = view(params)

    @jax.jit
    def step(state, noise, mean):
        grads = view(jax.tree.map(lambda a, b: a + 0.5 * b, noise, mean))
        return tx.update(grads, state, params)

    state, updates, mean = tx.init(params), [], tree(99)
    for seed in range(count):
        update, state = step(state, tree(seed), mean)
        updates.append(update)
    return updates, state


SETTINGS = {
    "defaults": {},
    "no nesterov": {"nesterov": False, "weight_decay": 0.1},
    "schatten": {"preconditioning": "schatten", "ns_steps": 4},
    "spectral": {"preconditioning": "spectral", "ns_steps": 3},
    "aol": {"preconditioning": "aol", "consistent_rms": 0.2},
    "dion": {"ns_coeffs": "dion", "adaptive": True},
    "adam": {"adam_b2": 0.95, "adam_weight_decay": 0.1, "adam_learning_rate": 1e-3},
}


@pytest.mark.costly
@pytest.mark.parametrize("name", SETTINGS)
def test_with_fp32_storage_it_is_optax_muon(name):
    """With each matrix a leaf: where it is adaptive, optax sums over all matrices of a leaf."""
    params, settings = tree(7), SETTINGS[name]
    numbers = coat.optax.hidden_matrices(apart(params))
    exact = optax_muon(0.02, muon_weight_dimension_numbers=numbers, **settings)
    ours = coat.optax.fp8_muon(0.02, ns_dtype=jnp.float32, storage=IN_FP32, **settings)
    wanted = steps_of(exact, params, view=apart)[0]
    for got, want in zip(steps_of(ours, params)[0], wanted, strict=True):
        for leaf in params:
            assert distance(got[leaf], np.asarray(want[leaf])) < 2e-5, leaf


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_stack_is_updated_as_its_matrices_are_by_themselves(adaptive):
    """To 2^-8, one rounding of the BF16 products, which XLA may order in another way."""
    tx = coat.optax.scale_by_fp8_muon(adaptive=adaptive, storage=IN_FP32)
    stack = np.asarray(normal(0, (2, 16, 24))) * np.float32([1, 100])[:, None, None]
    matrices, update = {"a": stack[0], "b": stack[1]}, jax.jit(tx.update)
    together, _ = update({"w": stack}, tx.init({"w": stack}))
    alone, _ = update(matrices, tx.init(matrices))
    for got, name in zip(together["w"], alone, strict=True):
        np.testing.assert_allclose(got, alone[name], rtol=2**-8, atol=2**-8 * abs(got).max())


def test_eight_bits_turn_an_update_by_little():
    """A code is off by at most 1/254 of its group's largest, which is 3 deviations of a normal."""
    params = tree(7)
    shapes = coat.Storage(min_size=0)
    exact = coat.optax.fp8_muon(0.02, ns_dtype=jnp.float32, storage=IN_FP32)
    ours = coat.optax.fp8_muon(0.02, ns_dtype=jnp.float32, storage=shapes)
    updates, state = steps_of(ours, params)
    for got, want in zip(updates, steps_of(exact, params)[0], strict=True):
        assert all(distance(got[leaf], want[leaf]) < 0.04 for leaf in ("wide", "tall", "square"))
    of_muon = state.inner_states["muon"].inner_state[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(of_muon.mu.codes)} == {"int8"}


def test_state_of_a_matrix_takes_less_than_1_1_bytes_a_parameter():
    params = {"w": jnp.zeros((256, 1024))}
    state = jax.eval_shape(coat.optax.scale_by_fp8_muon().init, params)
    taken = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert taken <= 1.1 * params["w"].size


@pytest.mark.parametrize("storage", [coat.Storage(min_size=0), coat.storage.PAPER])
def test_momentum_without_a_gradient_decays_to_zero(storage):
    """A code that rounding to nearest would hold up must go on to fall."""
    tx = coat.optax.scale_by_fp8_muon(ns_steps=1, storage=storage)
    params = {"w": jnp.zeros((128, 256))}
    large = np.zeros((128, 256), bool)
    large[:, 0] = large[0] = True  # holds all scales up
    gradient = {"w": np.where(large, np.float32(100), normal(0, large.shape))}
    state = tx.init(params)
    step = jax.jit(tx.update)
    _, state = step(gradient, state)
    alone = {"w": np.where(large, np.float32(100), np.float32(0))}
    for _ in range(120):
        _, state = step(alone, state)
    assert np.mean(np.abs(momentum(state, storage)[1:, 1:128])) < 0.01


def momentum(state, storage, name="w"):
    """The stored momentum of one leaf, in FP32."""
    mu = jax.tree.map(lambda tree: tree[name], state.mu, is_leaf=lambda x: type(x) is dict)
    return np.asarray(storage.read(mu, storage.first)) * np.asarray(state.columns[name])


def test_the_seed_decides_how_the_momentum_is_rounded():
    def codes(seed):
        storage = coat.Storage(min_size=0, seed=seed)
        tx = coat.optax.scale_by_fp8_muon(ns_steps=1, storage=storage)
        gradient = {"w": normal(0, (32, 64))}
        return jax.jit(tx.update)(gradient, tx.init(gradient))[1].mu.codes["w"]

    one, other, again = map(codes, (0, 1, 0))
    assert 0.01 < np.mean(one != other) < 0.5
    np.testing.assert_array_equal(one, again)


def test_the_error_of_a_column_is_as_small_as_the_column():
    """Not as small as the largest of 128 columns, which share a scale."""
    storage = coat.Storage(min_size=0)
    tx = coat.optax.scale_by_fp8_muon(storage=storage)
    sizes = np.logspace(-6, 0, 256, dtype=np.float32)
    gradient = {"w": sizes * np.asarray(normal(0, (64, 256)))}
    _, state = jax.jit(tx.update)(gradient, tx.init(gradient))
    error = momentum(state, storage) - 0.05 * gradient["w"]
    # A group's largest is up to 4 deviations, and rounding is off by one 127th of it at most.
    relative = np.linalg.norm(error, axis=0) / np.linalg.norm(gradient["w"], axis=0)
    assert relative.max() < 0.05 * 4 / 127


def test_columns_of_zeros_and_of_infinities_leave_the_others_alone():
    storage = coat.Storage(min_size=0)
    tx = coat.optax.scale_by_fp8_muon(storage=storage)
    w = np.array(normal(0, (64, 256)))
    w[:, 3], w[5, 7], w[6, 8] = 0, np.inf, np.nan
    _, state = jax.jit(tx.update)({"w": w}, tx.init({"w": w}))
    m = momentum(state, storage)
    assert np.all(np.isfinite(m))
    assert not np.any(m[:, 3])
    others = np.delete(np.arange(64), [5, 6])  # an infinity mutes its own group
    np.testing.assert_allclose(m[others], 0.05 * w[others], atol=0.05 * 4 / 127 * 2)


def test_columns_are_those_of_the_side_that_the_last_axis_belongs_to():
    numbers = {"out": ((0, 1), 2), "query": (0, (1, 2)), "transposed": (2, 0)}
    numbers = {name: MuonDimensionNumbers(*axes) for name, axes in numbers.items()}
    params = {"out": jnp.ones((4, 8, 32)), "query": jnp.ones((32, 4, 8))}
    params["transposed"] = jnp.ones((5, 3, 7))
    state = coat.optax.scale_by_fp8_muon(weight_dimension_numbers=numbers).init(params)
    shapes = {name: column.shape for name, column in state.columns.items()}
    assert shapes == {"out": (1, 1, 32), "query": (1, 4, 8), "transposed": (1, 3, 7)}


def test_vocabulary_vectors_and_the_rest_go_to_adam():
    params = {
        "token_embedding": jnp.zeros((64, 32)),
        "lm_head": jnp.zeros((32, 64)),
        "multi_head_attention": {"query": jnp.zeros((32, 32)), "bias": jnp.zeros(32)},
        "layers": {"w": jnp.zeros((4, 32, 64)), "norm": jnp.zeros((4, 1, 32))},
    }
    numbers = coat.optax.hidden_matrices(params)
    assert numbers == {
        "token_embedding": None,
        "lm_head": None,
        "multi_head_attention": {"query": MuonDimensionNumbers(0, 1), "bias": None},
        "layers": {"w": MuonDimensionNumbers(1, 2), "norm": None},
    }
    state = coat.optax.fp8_muon(0.02).init(params)
    assert isinstance(state.inner_states["muon"].inner_state[0], coat.optax.ScaleByFP8MuonState)
    followed = state.inner_states["adam"].inner_state[0].mu.codes
    assert [len(jax.tree.leaves(followed[name])) for name in params] == [1, 1, 1, 1]


FLAX = {
    "nnx": lambda: nnx.state(nnx.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0)), nnx.Param),
    "linen": lambda: linen.MultiHeadDotProductAttention(4).init(
        jax.random.key(0), jnp.ones((1, 2, 32))
    ),
}


@pytest.mark.parametrize("attention", FLAX.values(), ids=FLAX)
def test_all_heads_of_flax_are_one_matrix(attention):
    params = attention()
    state = coat.optax.fp8_muon(0.02).init(params)
    columns = state.inner_states["muon"].inner_state[0].columns
    shapes = {jax.tree_util.keystr(p): x.shape for p, x in jax.tree.leaves_with_path(columns)}
    assert len(shapes) == 4
    for name, shape in shapes.items():
        assert shape == ((1, 1, 32) if "out" in name else (1, 4, 8)), name


@pytest.mark.parametrize("shape", [(3, 3, 16, 8), (2, 16, 32), (2, 32, 4, 8)])
def test_other_kernels_of_flax_are_refused_where_nothing_says_what_their_axes_are(shape):
    params = {"query": {"kernel": jnp.ones(shape)}}
    with pytest.raises(UserError, match=r"\['query'\]\['kernel'\] of shape .*hidden_matrices"):
        coat.optax.fp8_muon(0.02).init(params)
    numbers = coat.optax.hidden_matrices  # says it
    coat.optax.fp8_muon(0.02, muon_weight_dimension_numbers=numbers).init(params)


@pytest.mark.parametrize("changes", [{}, {"norms": "after", "qk_norm": "all"}], ids=str)
def test_the_layers_of_a_model_have_the_same_matrices_stacked_or_not(changes):
    chosen = {}
    for scan in (False, True):
        config = dataclasses.replace(SMALL, scan=scan, qkv_bias=True, **changes)
        _, params = models.abstract(config)
        numbers = coat.optax.hidden_matrices(params)
        taken = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(numbers)}
        chosen[scan] = {re.sub(r"\[\d\]", "", name) for name in taken}
    names = {"query", "key", "value", "out", "gate", "up", "down"}
    assert {name.split("'")[-2] for name in chosen[True]} == names
    assert chosen[True] == chosen[False]


@pytest.mark.parametrize(
    ("name", "is_vector"),
    [
        *[(name, True) for name in ("scale", "query_bias", "biases", "rms_scales")],
        *[(name, True) for name in ("gamma", "ln_1", "ln_f", "ln", "bias_hh")],
        *[(name, True) for name in ("norm", "norm1", "norm_2", "input_layernorm", "LayerNorm_0")],
        *[
            (name, False)
            for name in ("upscale", "scaled", "multi_scale_mix", "normal", "w", "kiln_1")
        ],
    ],
)
def test_stacked_vectors_are_recognized_by_their_names(name, is_vector):
    numbers = coat.optax.hidden_matrices({"layers": {name: {"weight": jnp.zeros((4, 32))}}})
    assert (numbers["layers"][name]["weight"] is None) == is_vector


def test_dimension_numbers_may_be_a_prefix_and_name_several_axes():
    params = {"attention": {"out": jnp.zeros((4, 8, 32)), "query": jnp.zeros((32, 4, 8))}}
    numbers = {
        "attention": {
            "out": MuonDimensionNumbers((0, 1), 2),
            "query": MuonDimensionNumbers(0, (1, 2)),
        }
    }
    out, query = matrices_of(numbers, params)
    assert (out.fan_in, out.fan_out, query.fan_in, query.fan_out) == (32, 32, 32, 32)
    x = normal(0, (5, 3, 7))
    (matrix,) = matrices_of(MuonDimensionNumbers(2, 0), x)
    assert matrix.stack(x).shape == (3, 7, 5)
    np.testing.assert_array_equal(matrix.unstack(matrix.stack(x)), x)
    tx = coat.optax.fp8_muon(0.02, muon_weight_dimension_numbers=numbers)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


OF_SMALL_GROUPS = coat.optax.fp8_muon(0.02, storage=coat.Storage(min_size=0, group_size=16))


def two_steps(params, grads, state):
    def step(_, carry):
        params, state = carry
        updates, state = OF_SMALL_GROUPS.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, 2, step, (params, state))


@pytest.fixture(scope="module")
def alone():
    """Parameters, gradients, and what two steps on one device make of them.

    Stacks of 1, 3 and 7 matrices: 8 devices cannot share them equally.
    """
    shapes = {"embedding": (64, 32), "a": (64, 32), "b": (3, 32, 64), "c": (5, 64, 64)}
    shapes["d"] = (2, 64, 64)
    params, grads = tree(1, shapes), tree(2, shapes)
    return params, grads, jax.jit(two_steps)(params, grads, OF_SMALL_GROUPS.init(params))


def on_mesh(sizes, names):
    """A mesh, and how it shards a matrix of this name; "d" is sharded as the output of heads."""
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))

    def sharding(name, ndim):
        rows_and_columns = [axis if axis in names else None for axis in AXES]
        last_two = rows_and_columns[:: -1 if name == "d" else 1] if ndim > 1 else []
        return NamedSharding(mesh, P(*[None] * (ndim - len(last_two)), *last_two))

    return mesh, sharding


@pytest.mark.costly
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)])
def test_updates_do_not_depend_on_the_mesh(alone, sizes):
    params, grads, wanted = alone
    tx = OF_SMALL_GROUPS
    mesh, sharding = on_mesh(sizes, ("data", *AXES))

    def sharded(tree):
        return {name: jax.device_put(x, sharding(name, x.ndim)) for name, x in tree.items()}

    with jax.set_mesh(mesh):
        params, grads = sharded(params), sharded(grads)
        state = jax.jit(tx.init, out_shardings=coat.optax.state_shardings(tx, params))(params)
        together = jax.jit(two_steps)(params, grads, state)
    for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(wanted), strict=True):
        if got.dtype == jnp.float32:
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.max(np.abs(want)))


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((2, 4), ("data", "fsdp")), ((4, 2), ("fsdp", "tensor")), ((2, 2, 2), ("data", *AXES))],
)
def test_devices_exchange_matrices_and_gather_none(sizes, names, capfd):
    """Except over "data", where parameters are replicated: each stack is gathered once."""
    mesh, sharding = on_mesh(sizes, names)
    shapes = {"a": (8, 128, 128), "d": (3, 128, 128), "wide": (5, 128, 256)}
    step = coat.optax.in_place(OF_SMALL_GROUPS)
    with jax.set_mesh(mesh):
        params = {
            name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding(name, 3))
            for name, shape in shapes.items()
        }
        shardings = coat.optax.state_shardings(step, params)
        state = jax.tree.map(
            lambda x, s: x.update(sharding=s), jax.eval_shape(step.init, params), shardings
        )
        program = jax.jit(step.step, donate_argnums=(0, 2)).lower(params, params, state).compile()
    assert "rematerialization" not in capfd.readouterr().err  # XLA warns where it replicates
    gathered = re.findall(r"all-gather(?:-start)?\(", program.as_text())
    assert len(gathered) == (2 if "data" in names else 0)


def test_on_a_mesh_updates_can_be_batched_and_differentiated():
    tx = coat.optax.scale_by_fp8_muon(ns_dtype=jnp.float32, storage=IN_FP32)
    grads = {name: normal(seed, (16, 24)) for seed, name in enumerate("abc")}

    def square(grads):
        return optax.tree.norm(tx.update(grads, tx.init(grads))[0], squared=True)

    def both(grads):
        return jax.grad(square)(grads), jax.vmap(square)(jax.tree.map(lambda g: g[None], grads))

    wanted = jax.jit(both)(grads)
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))):
        got = jax.jit(both)(grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, wanted)


def test_in_a_group_of_equal_shapes_each_leaf_gets_its_own_matrix_back():
    stacks = [normal(i, (i, 24, 40)) for i in (1, 3, 2)]
    stacks.insert(1, normal(9, (2, 40, 24)))
    orthogonalized = jax.jit(lambda stacks: orthogonalize(stacks, STANDARD, dtype=jnp.float32))
    together = jax.device_get(orthogonalized(stacks))
    for stack, result in zip(jax.device_get(stacks), together, strict=True):
        assert result.shape == stack.shape
        for x, u in zip(stack, result, strict=True):
            (alone,) = orthogonalized([x[None]])
            np.testing.assert_allclose(u, alone[0], atol=1e-5)
            singular = np.linalg.svd(u, compute_uv=False)
            assert singular.min() > 0.3
            assert singular.max() < 1.3


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ns_steps": 0}, ValueError, "ns_steps=0"),
        ({"ns_coeffs": "keller"}, ValueError, "standard, dion"),
        ({"ns_coeffs": (1.0, 2.0)}, ValueError, "three numbers"),
        ({"beta": 1.0}, ValueError, "beta=1.0"),
        ({"mu_dtype": jnp.bfloat16}, ValueError, "mu_dtype"),
        ({"preconditioning": "nuclear"}, ValueError, "frobenius, spectral, aol, schatten"),
        ({"nesterov": 1}, TypeError, "nesterov"),
        ({"consistent_rms": -1.0}, ValueError, "consistent_rms"),
        ({"ns_steps": jnp.array(5)}, ValueError, r"static_args=\(.ns_steps., .ns_dtype.\)"),
        ({"ns_dtype": jnp.bfloat16(0)}, ValueError, r"static_args=\(.ns_steps., .ns_dtype.\)"),
        ({"ns_dtype": jnp.float16}, ValueError, "ns_dtype=.*float16.* smaller range"),
        ({"ns_dtype": coat.E5M2}, ValueError, "ns_dtype=.*float8_e5m2.* smaller range"),
        ({"ns_dtype": jnp.int8}, ValueError, r"ns_dtype=.*int8.* must be bfloat16 or float32"),
        ({"learning_rate": None, "adam_learning_rate": 1e-3}, TypeError, "learning_rate=None"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1"),
        ({"adam_b1": 2}, ValueError, "adam_b1=2 is outside its range, 0 <= adam_b1 < 1"),
        ({"adam_b2": jnp.cos}, TypeError, "adam_b2=.* must be a number"),
        ({"adam_eps_root": -1.0}, ValueError, "adam_eps_root=-1.0"),
        ({"adam_weight_decay": True}, TypeError, r"adam_weight_decay=True .*or a schedule"),
        ({"adam_learning_rate": -1.0}, ValueError, "adam_learning_rate=-1.0"),
        ({"weight_decay_mask": "w"}, TypeError, "mask='w' must be True or False"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(arguments, error, words):
    with pytest.raises(error, match=words):
        coat.optax.fp8_muon(**{"learning_rate": 0.02, **arguments})


@pytest.mark.parametrize(
    ("numbers", "leaf", "words"),
    [
        ({"a": None}, "b", r"say 'nothing' of \['b'\]"),
        ({"b": "muon"}, "b", r"say 'muon' of \['b'\] .* They are a tree"),
        ("muon", "b", r"say 'muon' of \['b'\] .* They are a tree"),
        (MuonDimensionNumbers(0, 5), "b", "an axis that"),
        (MuonDimensionNumbers(0, 0), "b", "twice"),
    ],
)
def test_wrong_dimension_numbers_are_refused_by_leaf(numbers, leaf, words):
    tx = coat.optax.fp8_muon(0.1, muon_weight_dimension_numbers=numbers)
    with pytest.raises(ValueError, match=words):
        tx.init({leaf: jnp.zeros((3, 3))})


def test_its_numbers_can_be_injected():
    make = optax.inject_hyperparams(coat.optax.fp8_muon, static_args=("ns_steps", "ns_dtype"))
    params = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
    injected, plain = make(optax.constant_schedule(0.02)), coat.optax.fp8_muon(0.02)
    updates, _ = jax.jit(injected.update)(params, injected.init(params), params)
    wanted, _ = jax.jit(plain.update)(params, plain.init(params), params)
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-5), updates, wanted)


def test_leaves_that_are_not_matrices_and_other_states_are_refused():
    tx = coat.optax.scale_by_fp8_muon()
    with pytest.raises(ValueError, match=r"\['b'\].*no hidden matrix"):
        tx.init({"b": jnp.zeros(3)})
    with pytest.raises(TypeError, match="another optimizer"):
        tx.update({"w": jnp.zeros((3, 3))}, optax.EmptyState())


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_matrices_of_other_numbers_than_real_floats_are_refused(dtype):
    """As AdamW refuses them."""
    for tx in (coat.optax.fp8_muon(0.1), coat.optax.scale_by_fp8_muon()):
        with pytest.raises(TypeError, match=rf"\['w'\] .*{dtype.__name__}"):
            tx.init({"w": jnp.zeros((32, 32), dtype)})
        params = {"w": jnp.zeros((32, 32))}
        with pytest.raises(TypeError, match=rf"\['w'\] .*{dtype.__name__}"):
            tx.update({"w": jnp.zeros((32, 32), dtype)}, tx.init(params), params)


@pytest.mark.parametrize("other", [coat.optax.fp8_adamw, optax.adamw, coat.optax.scale_by_fp8_muon])
def test_the_state_of_another_optimizer_is_named(other):
    params = {"w": jnp.ones((32, 32))}
    state = (other() if other is coat.optax.scale_by_fp8_muon else other(1e-3)).init(params)
    with pytest.raises(TypeError, match=r"must be a PartitionState, but is a .* another"):
        coat.optax.fp8_muon(1e-3).update(params, state, params)


DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("of_params", DTYPES)
@pytest.mark.parametrize("of_grads", DTYPES)
def test_updates_have_the_dtypes_that_they_have_in_optax(of_params, of_grads):
    params = {"w": jnp.ones((32, 32), of_params), "b": jnp.ones(32, of_params)}
    grads = jax.tree.map(lambda p: p.astype(of_grads), params)
    ours, theirs = (
        jax.eval_shape(lambda tx=tx: tx.update(grads, tx.init(params), params)[0])
        for tx in (coat.optax.fp8_muon(0.02), optax_muon(0.02))
    )
    assert ours == theirs
    matrix = {"w": params["w"]}
    alone = coat.optax.scale_by_fp8_muon()
    update = jax.eval_shape(lambda: alone.update({"w": grads["w"]}, alone.init(matrix), matrix)[0])
    assert update["w"].dtype == theirs["w"].dtype


def test_zeros_are_orthogonalized_to_zeros():
    """With any preconditioning, also where eps is zero in the dtype of the products."""
    zeros = [jnp.zeros((1, 4, 6))]

    @jax.jit
    def all_ways():
        return [
            orthogonalize(
                zeros,
                STANDARD,
                eps=eps,
                preconditioning=how,
                dtype=dtype,
            )
            for how in ("frobenius", "spectral", "aol", "schatten")
            for dtype in (jnp.float16, jnp.bfloat16)
            for eps in (1e-8, 0.0)
        ]

    for (u,) in all_ways():
        assert not jnp.any(u)


@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (3, 0, 32)])
def test_matrices_without_elements_are_refused_by_name(shape):
    params, axes = {"w": jnp.ones(shape)}, (len(shape) - 2, len(shape) - 1)
    numbers = {"w": optax.contrib.MuonDimensionNumbers(*axes)}
    with pytest.raises(ValueError, match=r"'w'.* has matrices without elements.* to AdamW"):
        coat.optax.fp8_muon(1e-3, muon_weight_dimension_numbers=numbers).init(params)
    state = coat.optax.fp8_muon(1e-3).init(params)  # by default they are AdamW's
    coat.optax.fp8_muon(1e-3).update(params, state, params)


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_stack_without_matrices_is_updated(adaptive):
    params = {"none": jnp.ones((0, 16, 32)), "w": jnp.ones((16, 32))}
    tx = coat.optax.scale_by_fp8_muon(adaptive=adaptive)
    updates, state = jax.jit(tx.update)(params, tx.init(params))
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype("float32")}
    assert state.mu.codes["none"].shape == (0, 16, 32)


def test_matrices_that_are_sharded_explicitly_are_updated_and_stay_sharded():
    tx = coat.optax.fp8_muon(0.02, storage=coat.Storage(min_size=0, group_size=16))
    rng = np.random.default_rng(0)
    params = {"w": rng.standard_normal((4, 32)), "stack": rng.standard_normal((3, 16, 8))}
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    expected, _ = jax.jit(tx.update)(params, tx.init(params), params)
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))):
        specs = {"w": P("fsdp", None), "stack": P(None, "fsdp", None)}
        placed = {name: jax.device_put(params[name], spec) for name, spec in specs.items()}
        updates, _ = jax.jit(tx.update)(placed, tx.init(placed), placed)
    for name, spec in specs.items():
        assert jax.typeof(updates[name]).sharding.spec == spec
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-4, atol=1e-6)
