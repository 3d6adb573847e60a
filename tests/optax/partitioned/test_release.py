"""A step that frees gradients in its backward pass is the step that computes all of them first."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from steps import assert_equal

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.optax import Stage, fp8_adamw, global_norm, in_place, step_by_stages

LAYERS = 3
X = jax.device_put(np.random.default_rng(0).standard_normal((16, 128), np.float32))
OPTIMIZERS = {
    "fused": lambda: in_place(fp8_adamw(1e-2, weight_decay=0.1)),
    "adamw": lambda: in_place(optax.adamw(optax.linear_schedule(1e-2, 0.0, 10))),
    "lion in FP8": lambda: in_place(coat.optax.compress(optax.lion(1e-3))),
    "rounded": lambda: in_place(fp8_adamw(1e-2), round_params="stochastic"),
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
    optimizer = in_place(optax.trace(0.0))  # the state is the last gradient
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


def layer_past_explosion(params, x):
    return layer(params, explode(x))


def exploding_layer(params, x):
    return layer(params | {"w": explode(params["w"])}, x)


@pytest.mark.parametrize(
    ("apply", "layers", "table"),
    [
        (layer_past_explosion, [False, True, True], False),
        (exploding_layer, [True, False, True], True),
    ],
)
def test_only_stages_whose_gradients_are_finite_are_updated_and_the_step_not_counted(
    apply, layers, table
):
    """Infinite are those of all stages before the explosion, or of one stage's weights alone."""
    stages = list(STAGES)
    stages[2] = Stage(stages[2].select, apply)
    optimizer, params = OPTIMIZERS["fused"](), parameters()
    done = jax.jit(lambda p, s: step_by_stages(optimizer, stages, p, s))(
        params, optimizer.init(params)
    )
    assert done.skipped
    assert not np.isfinite(done.gradient_norm)
    assert done.state.count == 0
    for i, changed in enumerate(layers):
        was, now = params["layers"][i]["w"], done.params["layers"][i]["w"]
        assert np.array_equal(was, now) != changed, i
    assert np.array_equal(params["table"], done.params["table"]) != table


@pytest.mark.parametrize("infinite", [lambda loss: loss / 0, lambda loss: loss + jnp.inf])
def test_a_loss_that_is_not_finite_changes_nothing(infinite):
    """Even if its gradients are finite. Parameters and state can be donated."""
    stages = [*STAGES[:-1], Stage(STAGES[-1].select, lambda w, x: infinite(STAGES[-1].apply(w, x)))]
    optimizer, params = OPTIMIZERS["fused"](), parameters()
    state = optimizer.init(params)
    step = jax.jit(lambda p, s: step_by_stages(optimizer, stages, p, s), donate_argnums=(0, 1))
    donated = jax.tree.map(jnp.copy, (params, state))
    done = step(*donated)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated) if leaf.size > 128)
    assert done.skipped
    assert_equal((done.params, done.state), (params, state))


def test_a_stage_may_select_a_leaf_twice():
    params = {"w": parameters()["table"]}
    twice = [Stage(lambda p: (p["w"], p["w"]), lambda ws, _: jnp.mean((X @ ws[0] @ ws[1]) ** 2))]
    once = [Stage(lambda p: p["w"], lambda w, _: jnp.mean((X @ w @ w) ** 2))]
    optimizer = in_place(optax.sgd(1.0))
    got, wanted = (
        step_by_stages(optimizer, stages, params, optimizer.init(params)).params
        for stages in (twice, once)
    )
    np.testing.assert_allclose(got["w"], wanted["w"], rtol=1e-5, atol=1e-5)


SCALAR = Stage(lambda params: params["table"], lambda table, x: x @ table)
LABELS = in_place(coat.optax.fp8_muon(1e-2))
ADAMW = OPTIMIZERS["adamw"]()
REFUSED = [
    (ADAMW, [*STAGES[:3], STAGES[-1]], r"selects params\['layers'\]\[2\]\['b'\]"),
    (ADAMW, [*STAGES[:-1], SCALAR], r"returned float32\[16, 128\]: it must return the loss"),
    (ADAMW, None, r"must be a list or tuple of coat_jax\.optax\.Stage"),
    (ADAMW, [lambda params, x: x], r"must be a list or tuple of coat_jax\.optax\.Stage"),
    (LABELS, STAGES, r"masked states, as optax\.partition"),
]
# Gradients would be those of what a stage computes while it selects, not of the parameters.
REFUSED += [
    (ADAMW, [STAGES[0], Stage(select, layer)], f"`select` of stage 1 .* as they are: .*{said}")
    for select, said in (
        (lambda p: p["table"] * 2, "unsupported operand"),
        (lambda p: p["table"].T, "no attribute 'T'"),
        (lambda p: p["table"][:64], "not subscriptable"),
        (lambda p: (p["table"], X), "has no attribute .number"),
    )
]


@pytest.mark.parametrize(("optimizer", "stages", "message"), REFUSED)
def test_stages_and_optimizers_that_do_not_fit_are_refused(optimizer, stages, message):
    params = parameters()
    with pytest.raises((TypeError, ValueError, UserError), match=message):
        step_by_stages(optimizer, stages, params, optimizer.init(params))
