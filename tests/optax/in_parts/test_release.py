"""A step that frees gradients in its backward pass is the step that computes all of them first."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.optax import Stage, global_norm, step_by_stages

LAYERS = 3
X = jax.device_put(np.random.default_rng(0).standard_normal((16, 128), np.float32))
OPTIMIZERS = {
    "fused_fp8_adamw": lambda: coat.optax.fused_fp8_adamw(1e-2, weight_decay=0.1),
    "adamw": lambda: coat.optax.in_place(optax.adamw(optax.linear_schedule(1e-2, 0.0, 10))),
    "lion in FP8": lambda: coat.optax.in_place(coat.optax.compress(optax.lion(1e-3))),
    "rounded": lambda: coat.optax.fused_fp8_adamw(1e-2, round_params=True),
}


def parameters(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), LAYERS + 1)
    layers = [
        {"w": 0.1 * jax.random.normal(key, (128, 128)), "b": jnp.zeros(128)} for key in keys[1:]
    ]
    tree = {"table": jax.random.normal(keys[0], (128, 128)), "layers": layers}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), tree)


def layer(params, x):
    return x + jnp.tanh(x @ params["w"] + params["b"])


# The table is used by the first stage and by the last one.
STAGES = [
    Stage(lambda params: params["table"], lambda table, _: X.astype(table.dtype) @ table),
    *[Stage(lambda params, i=i: params["layers"][i], layer) for i in range(LAYERS)],
    Stage(
        lambda params: params["table"],
        lambda table, x: jnp.mean(jnp.square(x @ table.T - 1).astype(jnp.float32)),
    ),
]


def loss_of(params):
    x = None
    for stage in STAGES:
        x = stage.apply(stage.select(params), x)
    return x


def numbers(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal(got, wanted):
    for a, b in zip(numbers(got), numbers(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.costly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_step_that_has_all_gradients(name):
    optimizer = OPTIMIZERS[name]()
    dtype = jnp.bfloat16 if name == "rounded" else jnp.float32
    params = parameters(dtype)
    state = optimizer.init(params)
    for _ in range(3):
        done = step_by_stages(optimizer, STAGES, params, state, grad_scale=0.5)
        loss, grads = jax.value_and_grad(loss_of)(params)
        params, state = optimizer.step(params, grads, state, grad_scale=0.5)
        np.testing.assert_allclose(done.loss, loss, rtol=1e-6)
        np.testing.assert_allclose(done.gradient_norm, global_norm(grads), rtol=1e-5)
        assert not done.skipped
        for a, b in zip(numbers((done.params, done.state)), numbers((params, state)), strict=True):
            # The table's gradient is a product in another layout. What that rounds differently
            # Adam may divide by a small root; 1e-5 is a thousandth of its step.
            np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), 1e-3, 1e-5)


def test_each_stage_can_be_clipped_by_its_own_norm():
    optimizer = coat.optax.in_place(optax.trace(0.0))  # the state is the last gradient
    params = parameters()
    clip = lambda norm: jnp.minimum(1.0, 0.1 / norm)  # noqa: E731
    done = step_by_stages(optimizer, STAGES, params, optimizer.init(params), grad_scale=clip)
    clipped = done.state.inner.trace
    assert done.gradient_norm > 1
    for part in (clipped["table"], *clipped["layers"]):
        np.testing.assert_allclose(global_norm(part), 0.1, rtol=1e-5)


@jax.custom_vjp
def explode(x):
    """`x`, with an infinite gradient."""
    return x


explode.defvjp(lambda x: (x, None), lambda _, dx: (dx * jnp.inf,))


def test_a_stage_whose_gradients_are_not_finite_stays_as_it_was():
    """One past the layer whose gradients become infinite, the others are updated."""
    stages = list(STAGES)
    stages[2] = Stage(stages[2].select, lambda params, x: layer(params, explode(x)))
    optimizer, params = OPTIMIZERS["fused_fp8_adamw"](), parameters()
    state = optimizer.init(params)
    done = step_by_stages(optimizer, stages, params, state)
    assert done.skipped
    assert not np.isfinite(done.gradient_norm)
    assert done.state.count == 0
    for i, changed in enumerate([False, True, True]):
        was, now = params["layers"][i]["w"], done.params["layers"][i]["w"]
        assert np.array_equal(was, now) != changed, i
    assert_equal(done.params["table"], params["table"])


def test_a_step_is_not_counted_if_a_stage_in_the_middle_is_skipped():
    """Its weights alone have infinite gradients, so all other stages are updated."""
    stages = list(STAGES)
    stages[2] = Stage(
        stages[2].select, lambda params, x: layer(params | {"w": explode(params["w"])}, x)
    )
    optimizer, params = OPTIMIZERS["fused_fp8_adamw"](), parameters()
    done = step_by_stages(optimizer, stages, params, optimizer.init(params))
    assert done.skipped
    assert done.state.count == 0
    for i, changed in enumerate([True, False, True]):
        was, now = params["layers"][i]["w"], done.params["layers"][i]["w"]
        assert np.array_equal(was, now) != changed, i


def test_a_loss_that_is_not_finite_changes_nothing():
    stages = [
        *STAGES[:-1],
        Stage(STAGES[-1].select, lambda table, x: STAGES[-1].apply(table, x) / 0),
    ]
    optimizer, params = OPTIMIZERS["fused_fp8_adamw"](), parameters()
    state = optimizer.init(params)
    done = step_by_stages(optimizer, stages, params, state)
    assert done.skipped
    assert_equal((done.params, done.state), (params, state))


def test_parameters_and_state_are_donated():
    optimizer, params = OPTIMIZERS["fused_fp8_adamw"](), parameters()
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: step_by_stages(optimizer, STAGES, p, s)[2:4], donate_argnums=(0, 1))
    used = step.lower(params, state).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state)) if leaf.ndim)
    assert used.alias_size_in_bytes >= size


def test_a_leaf_without_a_stage_and_a_last_stage_without_a_loss_are_refused():
    optimizer, params = OPTIMIZERS["adamw"](), parameters()
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"selects params\['layers'\]\[2\]\['b'\]"):
        step_by_stages(optimizer, [*STAGES[:3], STAGES[-1]], params, state)
    table = Stage(lambda params: params["table"], lambda table, x: x @ table)
    with pytest.raises(ValueError, match=r"must return the loss.*\(16, 128\)"):
        step_by_stages(optimizer, [*STAGES[:-1], table], params, state)


def test_an_optimizer_without_a_step_is_refused():
    params, tx = parameters(), optax.sgd(1.0)
    with pytest.raises(
        UserError, match=r"step_by_stages takes an optimizer with a step of its own"
    ):
        step_by_stages(tx, STAGES, params, tx.init(params))


@pytest.mark.parametrize(
    "stages", [None, STAGES[0], [lambda params, x: x]], ids=["none", "one", "f"]
)
def test_what_is_no_list_of_stages_is_refused(stages):
    optimizer, params = OPTIMIZERS["adamw"](), parameters()
    with pytest.raises(TypeError, match=r"must be a list or tuple of coat_jax\.optax\.Stage"):
        step_by_stages(optimizer, stages, params, optimizer.init(params))


def test_an_optimizer_that_knows_parameters_by_labels_is_refused():
    params = parameters()
    optimizer = coat.optax.in_place(coat.optax.fp8_muon(1e-2))
    with pytest.raises(ValueError, match=r"masked states, as optax\.partition"):
        step_by_stages(optimizer, STAGES, params, optimizer.init(params))


class Counts(NamedTuple):
    w: jax.Array
    count: jax.Array


def test_a_parameter_may_have_the_name_of_a_counter():
    """The path of the optimizer's own counter ends like that of the parameter."""
    params = Counts(*(0.1 * parameters()["table"] for _ in range(2)))
    stages = [
        Stage(lambda p: p.w, lambda w, _: X @ w),
        Stage(lambda p: p.count, lambda w, x: jnp.mean((x @ w - 1) ** 2)),
    ]
    optimizer = coat.optax.in_place(optax.adam(1e-2))
    got = step_by_stages(optimizer, stages, params, optimizer.init(params))
    grads = jax.grad(lambda p: jnp.mean((X @ p.w @ p.count - 1) ** 2))(params)
    wanted, _ = optimizer.step(params, grads, optimizer.init(params))
    for a, b in zip(got.params, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_a_stage_may_select_a_leaf_twice():
    params = {"w": parameters()["table"]}
    twice = [Stage(lambda p: (p["w"], p["w"]), lambda ws, _: jnp.mean((X @ ws[0] @ ws[1]) ** 2))]
    once = [Stage(lambda p: p["w"], lambda w, _: jnp.mean((X @ w @ w) ** 2))]
    optimizer = coat.optax.in_place(optax.sgd(1.0))
    got, wanted = (
        step_by_stages(optimizer, stages, params, optimizer.init(params)).params
        for stages in (twice, once)
    )
    np.testing.assert_allclose(got["w"], wanted["w"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("select", "said"),
    [
        (lambda p: p["w"] * 2, "unsupported operand"),
        (lambda p: p["w"].T, "no attribute 'T'"),
        (lambda p: p["w"][:64], "not subscriptable"),
        (lambda p: (p["w"], X), "it returns ArrayImpl"),
    ],
)
def test_a_stage_that_computes_while_it_selects_is_refused(select, said):
    """Its gradients would be those of what it computes, not of the parameters."""
    params, optimizer = {"w": parameters()["table"]}, coat.optax.in_place(optax.sgd(1.0))
    stages = [Stage(lambda p: p["w"], lambda w, _: X @ w), Stage(select, lambda w, x: jnp.sum(x))]
    with pytest.raises(ValueError, match=f"`select` of stage 1 .* as they are: .*{said}"):
        step_by_stages(optimizer, stages, params, optimizer.init(params))


def test_a_loss_that_is_infinite_changes_nothing_though_its_gradients_are_finite():
    optimizer = OPTIMIZERS["fused_fp8_adamw"]()
    params = parameters()
    state = optimizer.init(params)
    last = STAGES[-1]
    stages = [*STAGES[:-1], Stage(last.select, lambda table, x: last.apply(table, x) + jnp.inf)]
    done = step_by_stages(optimizer, stages, params, state)
    assert np.isfinite(done.gradient_norm)
    assert done.skipped
    assert_equal((done.params, done.state), (params, state))
