"""Muon with an 8-bit momentum: it is optax's but for the storage, and independent of the mesh."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from optax.contrib import muon as optax_muon
from small_model import SMALL
from steps import normal

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.optax import fp8_muon, hidden_matrices, scale_by_fp8_muon
from coat_jax.optax.muon import newton_schulz
from coat_jax.optax.muon.matrices import matrices_of
from coat_jax.optax.muon.newton_schulz import coefficients_of, orthogonalize

STANDARD = np.array([3.4445, -4.7750, 2.0315])
IN_FP32 = coat.Storage(min_size=1 << 30)
IN_8_BITS = coat.Storage(min_size=0)
SHAPES = {"embedding": (96, 32), "wide": (32, 160), "stack": (2, 96, 48)}


def tree(seed, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: normal(rng, shape) for name, shape in (shapes | {"bias": (32,)}).items()}


def distance(a, b):
    a, b = np.asarray(a), np.asarray(b)
    return np.linalg.norm((a - b).ravel()) / np.linalg.norm(b.ravel())


# --- Orthogonalizing ---------------------------------------------------------------------------


def theirs(x, coefficients, steps, preconditioning):
    orthogonalized = optax.contrib._muon.orthogonalize_via_newton_schulz
    return orthogonalized(x, jnp.asarray(coefficients, jnp.float32), steps, preconditioning)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("preconditioning", "coefficients", "steps"),
    [
        ("frobenius", STANDARD, 5),
        ("spectral", STANDARD, 1),
        ("schatten", np.array(newton_schulz.DION), 2),
        ("aol", STANDARD, 2),
    ],
)
def test_each_matrix_is_orthogonalized_as_by_optax(
    preconditioning, coefficients, steps, monkeypatch
):
    """Also where a stack is larger than what is multiplied, or communicated, at once."""
    monkeypatch.setattr(newton_schulz, "TOGETHER", 2 * 24 * 40)
    monkeypatch.setattr(newton_schulz, "STACKED", 5 * 24 * 40)
    stacks = [normal(1, (1, 24, 40)), normal(2, (2, 40, 24)), normal(3, (7, 24, 40))]

    @jax.jit
    def both(stacks):
        ours = orthogonalize(
            stacks,
            coefficients_of(coefficients, steps),
            eps=1e-8,
            preconditioning=preconditioning,
            dtype=jnp.float32,
        )
        one = jax.vmap(lambda x: theirs(x, coefficients, steps, preconditioning))
        return ours, [one(stack) for stack in stacks]

    for got, want in zip(*both(stacks), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
        if preconditioning == "frobenius":
            singular = np.linalg.svd(got, compute_uv=False)
            assert 0.3 < singular.min() < singular.max() < 1.3


def test_zeros_are_orthogonalized_to_zeros():
    """With any preconditioning, also where eps is zero in the dtype of the products."""

    @jax.jit
    def all_ways():
        return [
            orthogonalize(
                [jnp.zeros((1, 4, 6))], [STANDARD], eps=eps, preconditioning=how, dtype=dtype
            )
            for how in ("frobenius", "spectral", "aol", "schatten")
            for dtype, eps in ((jnp.float16, 1e-8), (jnp.bfloat16, 0.0))
        ]

    for (u,) in all_ways():
        assert not jnp.any(u)


# --- Steps -------------------------------------------------------------------------------------


def apart(tree):
    """The tree with the matrices of its stack as separate leaves."""
    return {**tree, "stack": list(tree["stack"])}


def steps_of(txs, params, views, count=2):
    """Updates and state of several steps, whose gradients have a mean as those of training do.

    All transformations run in one program, each on its own view of the same gradients.
    """
    params = [view(params) for view in views]

    @jax.jit
    def step(states, noise, mean):
        grads = jax.tree.map(lambda a, b: a + 0.5 * b, noise, mean)
        together = zip(txs, views, states, params, strict=True)
        return [tx.update(view(grads), state, p) for tx, view, state, p in together]

    states = [tx.init(p) for tx, p in zip(txs, params, strict=True)]
    updates, mean = [], tree(99)
    for seed in range(count):
        stepped = step(states, tree(seed), mean)
        updates.append([update for update, _ in stepped])
        states = [state for _, state in stepped]
    return updates, states


SETTINGS = {
    "no nesterov": {"nesterov": False, "weight_decay": 0.1, "consistent_rms": 0.2, "ns_steps": 3},
    "adaptive": {
        "ns_coeffs": "dion",
        "adaptive": True,
        "beta": 0.9,
        "adam_b1": 0.8,
        "adam_b2": 0.95,
        "adam_weight_decay": 0.1,
        "adam_learning_rate": 1e-3,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
def test_with_fp32_storage_it_is_optax_muon_and_8_bits_turn_an_update_by_little(name):
    """With each matrix a leaf: where it is adaptive, optax sums over all matrices of a leaf.

    A code is off by at most 1/254 of its group's largest, which is 3 deviations of a normal.
    """
    params, settings = tree(7), SETTINGS[name]
    exact = optax_muon(
        0.02, muon_weight_dimension_numbers=hidden_matrices(apart(params)), **settings
    )
    ours = fp8_muon(0.02, ns_dtype=jnp.float32, storage=IN_FP32, **settings)
    in_8_bits = fp8_muon(0.02, ns_dtype=jnp.float32, storage=IN_8_BITS, **settings)
    txs, views = (exact, ours, in_8_bits), (apart, lambda tree: tree, lambda tree: tree)
    updates, (*_, state) = steps_of(txs, params, views)
    for wanted, got, rounded in updates:
        for leaf in params:
            want = np.asarray(wanted[leaf])
            assert distance(got[leaf], want) < 2e-5, leaf
            assert leaf in ("embedding", "bias") or distance(rounded[leaf], want) < 0.05, leaf
    of_muon = state.inner_states["muon"].inner_state[0]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(of_muon.mu.codes)} == {"int8"}


# --- Momentum ----------------------------------------------------------------------------------


def momentum(state):
    """The stored momentum of the leaf "w", in FP32."""
    mu = jax.tree.map(lambda tree: tree["w"], state.mu, is_leaf=lambda x: type(x) is dict)
    return np.asarray(IN_8_BITS.read(mu, IN_8_BITS.first)) * np.asarray(state.columns["w"])


def first_step(w):
    """The state after one step; the rounding of the update does not matter."""
    tx = scale_by_fp8_muon(ns_steps=1, storage=IN_8_BITS)
    return jax.jit(tx.update)({"w": w}, tx.init({"w": w}))[1]


def test_the_state_of_a_matrix_takes_less_than_1_1_bytes_a_parameter():
    state = jax.eval_shape(scale_by_fp8_muon().init, {"w": jnp.zeros((256, 1024))})
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) <= 1.1 * 2**18


def test_the_error_of_a_column_is_as_small_as_the_column():
    """Not as small as the largest of 128 columns, which share a scale.

    A group's largest is up to 4 deviations, and rounding is off by one 127th of it at most.
    Columns of zeros, of infinities and of NaN leave the others alone.
    """
    w = np.logspace(-6, 0, 256, dtype=np.float32) * np.array(normal(0, (64, 256)))
    w[:, 3], w[5, 7], w[6, 8] = 0, np.inf, np.nan
    state = first_step(w)
    m = momentum(state)
    assert np.all(state.columns["w"] > 0)  # also of a column of zeros, which is divided by it
    assert np.all(np.isfinite(m))
    assert not np.any(m[:, 3])
    rows = np.delete(np.arange(64), [5, 6])  # an infinity mutes its own group
    sizes = np.linalg.norm(w[rows], axis=0)
    error = np.linalg.norm(m[rows] - 0.05 * w[rows], axis=0)
    assert np.all(error <= 0.05 * 4 / 127 * sizes)


# --- Which leaves are which matrices -----------------------------------------------------------


def test_vocabulary_vectors_and_the_rest_go_to_adam():
    params = {
        "token_embedding": jnp.zeros((64, 32)),
        "lm_head": jnp.zeros((32, 64)),
        "multi_head_attention": {"query": jnp.zeros((32, 32)), "bias": jnp.zeros(32)},
        "layers": {"w": jnp.zeros((4, 32, 64)), "norm": jnp.zeros((4, 1, 32))},
    }
    assert hidden_matrices(params) == {
        "token_embedding": None,
        "lm_head": None,
        "multi_head_attention": {"query": MuonDimensionNumbers(0, 1), "bias": None},
        "layers": {"w": MuonDimensionNumbers(1, 2), "norm": None},
    }
    state = fp8_muon(0.02).init(params)
    assert isinstance(state.inner_states["muon"].inner_state[0], coat.optax.ScaleByFP8MuonState)
    followed = state.inner_states["adam"].inner_state[0].mu.codes
    assert [len(jax.tree.leaves(followed[name])) for name in params] == [1, 1, 1, 1]


FLAX = {
    "nnx": lambda: nnx.state(nnx.MultiHeadAttention(4, 32, rngs=nnx.Rngs(0)), nnx.Param),
    "linen": lambda: jax.eval_shape(
        linen.MultiHeadDotProductAttention(4).init, jax.random.key(0), jnp.ones((1, 2, 32))
    ),
}


@pytest.mark.parametrize("attention", FLAX.values(), ids=FLAX)
def test_all_heads_of_flax_are_one_matrix(attention):
    state = jax.eval_shape(fp8_muon(0.02).init, attention())
    columns = state.inner_states["muon"].inner_state[0].columns
    shapes = {jax.tree_util.keystr(p): x.shape for p, x in jax.tree.leaves_with_path(columns)}
    assert len(shapes) == 4
    for name, shape in shapes.items():
        assert shape == ((1, 1, 32) if "out" in name else (1, 4, 8)), name


def test_other_kernels_of_flax_are_refused_where_nothing_says_what_their_axes_are():
    for shape in ((3, 3, 16, 8), (2, 16, 32), (2, 32, 4, 8)):
        params = {"query": {"kernel": jnp.ones(shape)}}
        with pytest.raises(UserError, match=r"\['query'\]\['kernel'\] of shape .*hidden_matrices"):
            fp8_muon(0.02).init(params)
        says_it = fp8_muon(0.02, muon_weight_dimension_numbers=hidden_matrices)
        jax.eval_shape(says_it.init, params)


def test_the_layers_of_a_model_have_the_same_matrices_stacked_or_not():
    chosen = {}
    for scan in (False, True):
        changes = {"norms": "after", "qk_norm": "all", "qkv_bias": True}
        config = dataclasses.replace(SMALL, scan=scan, **changes)
        numbers = hidden_matrices(models.abstract(config)[1])
        taken = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(numbers)}
        chosen[scan] = {re.sub(r"\[\d\]", "", name) for name in taken}
    names = {"query", "key", "value", "out", "gate", "up", "down"}
    assert {name.split("'")[-2] for name in chosen[True]} == names
    assert chosen[True] == chosen[False]


VECTORS = "scale query_bias biases rms_scales gamma betas bias_hh ln_1 ln_f ln norm norm1 norm_2"
VECTORS += " norms input_layernorm LayerNorm_0 vocab_table unembedding embed wte wpe lm_head"
MATRICES = "upscale scaled multi_scale_mix normal w kiln_1 headroom members"


def test_stacked_vectors_and_vocabularies_are_recognized_by_their_names():
    names = VECTORS.split() + MATRICES.split()
    layers = {name: {"weight": jnp.zeros((4, 32))} for name in names}
    numbers = hidden_matrices({"layers": layers})["layers"]
    assert [name for name in names if numbers[name]["weight"] is None] == VECTORS.split()


def test_dimension_numbers_may_be_a_prefix_and_name_several_axes():
    """A column is an axis of the side that the last axis does not belong to."""
    params = {"attention": {"out": jnp.ones((4, 8, 32)), "query": jnp.ones((32, 4, 8))}}
    params["transposed"] = normal(0, (5, 3, 7))
    numbers = {
        "attention": {
            "out": MuonDimensionNumbers((0, 1), 2),
            "query": MuonDimensionNumbers(0, (1, 2)),
        },
        "transposed": MuonDimensionNumbers(-1, 0),
    }
    out, query, transposed = matrices_of(numbers, params)
    assert (out.fan_in, out.fan_out, query.fan_in, query.fan_out) == (32, 32, 32, 32)
    stack = transposed.stack(params["transposed"])
    assert stack.shape == (3, 7, 5)
    np.testing.assert_array_equal(transposed.unstack(stack), params["transposed"])
    matrices = out, query, transposed
    assert [m.columns_shape for m in matrices] == [(1, 1, 32), (1, 4, 8), (1, 3, 7)]
    tx = fp8_muon(0.02, muon_weight_dimension_numbers=numbers)
    updates = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p)[0], params)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)


def test_matrices_without_elements_are_refused_by_name_and_stacks_without_matrices_updated():
    for shape in ((0, 32), (32, 0), (3, 0, 32)):
        params, axes = {"w": jnp.ones(shape)}, (len(shape) - 2, len(shape) - 1)
        tx = fp8_muon(1e-3, muon_weight_dimension_numbers={"w": MuonDimensionNumbers(*axes)})
        with pytest.raises(ValueError, match=r"'w'.* has matrices without elements.* to AdamW"):
            tx.init(params)
        tx = fp8_muon(1e-3)  # by default they are AdamW's
        jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), params)
    params = {"none": jnp.ones((0, 16, 32)), "w": jnp.ones((16, 32))}
    tx = scale_by_fp8_muon(adaptive=True)
    updates, state = jax.jit(tx.update)(params, tx.init(params))
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
    assert state.mu.codes["none"].shape == (0, 16, 32)


# --- Meshes ------------------------------------------------------------------------------------

OF_SMALL_GROUPS = fp8_muon(0.02, ns_steps=1, storage=coat.Storage(min_size=0, group_size=16))


def two_steps(params, grads, state):
    def step(_, carry):
        params, state = carry
        updates, state = OF_SMALL_GROUPS.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, 2, step, (params, state))


def test_updates_do_not_depend_on_the_mesh():
    """Stacks of 1 and 5 matrices: 8 devices cannot share them equally.

    "d" is sharded as the output of heads.
    """
    shapes = {"embedding": (64, 32), "a": (64, 32), "b": (3, 64, 64), "d": (2, 64, 64)}
    params, grads, tx = tree(1, shapes), tree(2, shapes), OF_SMALL_GROUPS
    wanted = jax.jit(two_steps)(params, grads, tx.init(params))
    names = ("data", "fsdp", "tensor")
    specs = {"bias": P(), "b": P(None, "fsdp", "tensor"), "d": P(None, "tensor", "fsdp")}
    with jax.set_mesh(jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Auto,) * 3)):

        def sharded(tree):
            spec_of = {name: specs.get(name, P("fsdp", "tensor")) for name in tree}
            return {name: jax.device_put(x, spec_of[name]) for name, x in tree.items()}

        params, grads = sharded(params), sharded(grads)
        state = jax.jit(tx.init, out_shardings=coat.optax.state_shardings(tx, params))(params)
        together = jax.jit(two_steps)(params, grads, state)
    for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(wanted), strict=True):
        if got.dtype == jnp.float32:
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-3 * np.max(np.abs(want)))


def test_on_a_mesh_updates_can_be_batched_and_differentiated():
    tx = scale_by_fp8_muon(ns_steps=2, ns_dtype=jnp.float32, storage=IN_FP32)
    grads = {name: normal(seed, (16, 24)) for seed, name in enumerate("abc")}

    def square(grads):
        return optax.tree.norm(tx.update(grads, tx.init(grads))[0], squared=True)

    def both(grads):
        return jax.grad(square)(grads), jax.vmap(square)(jax.tree.map(lambda g: g[None], grads))

    wanted = jax.jit(both)(grads)
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))):
        got = jax.jit(both)(grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), got, wanted)


def test_matrices_that_are_sharded_explicitly_are_updated_and_stay_sharded():
    tx = scale_by_fp8_muon(ns_steps=1, storage=coat.Storage(min_size=0, group_size=16))
    params = {"w": normal(0, (4, 32)), "stack": normal(1, (3, 16, 8))}
    expected, _ = jax.jit(tx.update)(params, tx.init(params), params)
    with jax.set_mesh(jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Explicit,))):
        specs = {"w": P("fsdp", None), "stack": P(None, "fsdp", None)}
        placed = {name: jax.device_put(params[name], spec) for name, spec in specs.items()}
        updates, _ = jax.jit(tx.update)(placed, tx.init(placed), placed)
    for name, spec in specs.items():
        assert jax.typeof(updates[name]).sharding.spec == spec
        np.testing.assert_allclose(updates[name], expected[name], rtol=1e-4, atol=1e-6)


# --- Dtypes and refusals -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ns_steps": 0}, ValueError, "ns_steps=0"),
        ({"ns_coeffs": "keller"}, ValueError, "'standard' or 'dion'"),
        ({"ns_coeffs": (1.0, 2.0)}, ValueError, "three numbers"),
        ({"beta": 1.0}, ValueError, "beta=1.0"),
        ({"preconditioning": "nuclear"}, ValueError, "'spectral' or 'aol'"),
        ({"consistent_rms": -1.0}, ValueError, "consistent_rms"),
        ({"ns_steps": jnp.array(5)}, ValueError, r"ns_steps=int32\[\] must be a whole number"),
        ({"ns_dtype": jnp.float16}, ValueError, "ns_dtype=.*float16.* smaller range"),
        ({"learning_rate": None, "adam_learning_rate": 1e-3}, TypeError, "learning_rate=None"),
        ({"adam_b1": 2}, ValueError, "adam_b1=2 is outside its range, 0 <= adam_b1 < 1"),
        ({"adam_b2": jnp.cos}, TypeError, "adam_b2=.* must be a number"),
        ({"adam_eps_root": -1.0}, ValueError, "adam_eps_root=-1.0"),
        ({"adam_weight_decay": True}, TypeError, r"adam_weight_decay=True .*or a schedule"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_made(arguments, error, words):
    with pytest.raises(error, match=words):
        fp8_muon(**{"learning_rate": 0.02, **arguments})


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"a": None}, r"say 'nothing' of \['b'\]"),
        ({"b": "muon"}, r"say 'muon' of \['b'\] .* They are a tree"),
        ("muon", r"say 'muon' of \['b'\] .* They are a tree"),
        (MuonDimensionNumbers(0, 5), "each once"),
        (MuonDimensionNumbers(0, 0), "each once"),
    ],
)
def test_wrong_dimension_numbers_are_refused_by_leaf(numbers, words):
    with pytest.raises(ValueError, match=words):
        fp8_muon(0.1, muon_weight_dimension_numbers=numbers).init({"b": jnp.zeros((3, 3))})


def test_leaves_that_are_not_matrices_of_real_floats_and_other_states_are_refused():
    params = {"w": jnp.zeros((32, 32))}
    with pytest.raises(ValueError, match=r"\['b'\].*no hidden matrix"):
        scale_by_fp8_muon().init({"b": jnp.zeros(3)})
    for tx in (fp8_muon(0.1), scale_by_fp8_muon()):
        for dtype in (jnp.int32, jnp.complex64):
            with pytest.raises(TypeError, match=rf"\['w'\] .*{dtype.__name__}"):
                tx.init({"w": jnp.zeros((32, 32), dtype)})
            with pytest.raises(TypeError, match=rf"\['w'\] .*{dtype.__name__}"):
                tx.update({"w": jnp.zeros((32, 32), dtype)}, tx.init(params), params)
    with pytest.raises(ValueError, match="another optimizer"):
        scale_by_fp8_muon().update(params, optax.EmptyState())
