"""Arguments are optax's, in optax's order, and a wrong one is refused when it is given."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from coat_jax.errors import UserError
from coat_jax.numerics.formats import E4M3
from coat_jax.optax import (
    Storage,
    apply_updates,
    compress,
    fp8_adamw,
    fp8_muon,
    fused_fp8_adamw,
    global_norm_scale,
    in_host_memory,
    in_place,
    scale_by_fp8_adam,
    stochastic_round_updates,
)

PARAMS = jax.device_put({"w": np.ones((4, 128), np.float32), "b": np.ones(8, np.float32)})
FP8 = Storage(min_size=0)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(fp8_adamw, optax.adamw), (scale_by_fp8_adam, optax.scale_by_adam)],
)
def test_arguments_stand_where_optax_has_them(ours, theirs):
    def described(f):
        return [(name, p.kind, p.default) for name, p in inspect.signature(f).parameters.items()]

    assert described(ours)[: len(described(theirs))] == described(theirs)
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in described(ours)[-2:])


def test_after_eps_root_other_arguments_are_named():
    names = list(inspect.signature(fused_fp8_adamw).parameters.values())
    after = names[[p.name for p in names].index("eps_root") + 1 :]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in after)


def test_a_dtype_for_the_first_moment_is_refused():
    with pytest.raises(ValueError, match=r"mu_dtype=bfloat16: .*Storage\(first"):
        fp8_adamw(1e-3, 0.9, 0.999, 1e-8, 0.0, jnp.bfloat16, 0.1)
    with pytest.raises(ValueError, match=r"mu_dtype=bfloat16"):
        scale_by_fp8_adam(0.9, 0.999, 1e-8, 0.0, jnp.bfloat16)


NUMBERS = ("learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay")
NO_NUMBERS = [None, "1e-3", True, jnp.bfloat16, 1j, np.ones((1,))]
NO_NUMBERS += [jax.device_put(np.ones(3, np.float32)), jax.device_put(np.bool_(True))]
MAKERS = (fp8_adamw, fused_fp8_adamw, scale_by_fp8_adam)


@pytest.mark.parametrize("make", MAKERS)
def test_a_direction_needs_a_second_moment_that_lasts(make):
    """Without, m over sqrt(v) grows while there are no gradients, and the codes become coarse."""
    given = {"learning_rate": 1e-3} if "learning_rate" in inspect.signature(make).parameters else {}

    def init(**arguments):
        make(**given, **arguments).init({"bias": jnp.ones(256), "w": jnp.ones((128, 128))})

    for b2 in (0.0, 0.6, 0.78):
        with pytest.raises(ValueError, match=rf"b2={b2} with b1=0.9: .*0.788943.*Storage\(first="):
            init(b1=0.9, b2=b2)
    with pytest.raises(ValueError, match=r"b2 must be at least 0.977641"):
        init(b1=0.99, b2=0.95)
    init(b1=0.9, b2=0.788943)  # what the error says is enough
    init(b1=0.95, b2=0.891001)
    init(b1=0.95, b2=0.9)
    init(b1=0.0, b2=0.0)
    init(b1=0.9, b2=0.0, storage=Storage(first=E4M3))
    init(b1=0.99, b2=0.9, storage=Storage(min_size=128 * 128 + 1))  # all moments are in FP32


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", NUMBERS)
def test_only_numbers_are_accepted(make, name):
    accepted = inspect.signature(make).parameters
    given = {"learning_rate": 1e-3} if "learning_rate" in accepted else {}
    for value in NO_NUMBERS if name in accepted else ():
        with pytest.raises(TypeError, match=f"{name}=.* must be a number"):
            make(**{**given, name: value})
    for value in (np.float32(-1), jnp.float32(jnp.nan), np.float64(np.inf), -1):
        if name in accepted:
            with pytest.raises(ValueError, match=f"{name}=.* is outside its range"):
                make(**{**given, name: value})
    if name in ("b1", "b2", "eps", "eps_root") and name in accepted:
        with pytest.raises(TypeError, match=r"must be a number"):
            make(**{**given, name: lambda step: 0.9})


@pytest.mark.parametrize("make", [fp8_adamw, fused_fp8_adamw])
def test_numbers_may_come_from_numpy_and_jax(make):
    for one in (np.float32(1e-3), np.array(1e-3), jnp.float32(1e-3), jnp.bfloat16(1e-3), 0, 1):
        make(one, weight_decay=one)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"mask": 0.1}, "mask=0.1 must be True or False"),
        ({"mask": {"w": 1}}, r"mask\['w'\]=1 must be True or False"),
        ({"mask": jnp.bfloat16}, "mask.*must be True or False"),
        ({"storage": {"group_size": 64}}, "must be a coat_jax.Storage"),
        ({"nesterov": 1}, "nesterov=1 must be True or False"),
    ],
)
@pytest.mark.parametrize("make", [fp8_adamw, fused_fp8_adamw])
def test_settings_of_a_wrong_type_are_refused(make, argument, message):
    with pytest.raises(TypeError, match=message):
        make(1e-3, **argument)
    make(1e-3, mask={"w": True, "b": np.bool_(False)})
    make(1e-3, mask=lambda params: params)


def test_the_fused_step_follows_a_schedule_of_weight_decay():
    schedule = optax.linear_schedule(0.5, 0.0, 2)
    chain = fp8_adamw(1e-2, weight_decay=schedule, storage=FP8)
    fused = fused_fp8_adamw(1e-2, weight_decay=schedule, storage=FP8)
    (params, state), (fused_params, fused_state) = (
        (PARAMS, tx.init(PARAMS)) for tx in (chain, fused)
    )
    update, step = jax.jit(chain.update), jax.jit(fused.step)
    for _ in range(3):
        updates, state = update(PARAMS, state, params)
        params = optax.apply_updates(params, updates)
        fused_params, fused_state = step(fused_params, PARAMS, fused_state)
        for name in PARAMS:
            np.testing.assert_allclose(fused_params[name], params[name], rtol=2**-22)


RATES = {
    "learning_rate": (fp8_adamw, fused_fp8_adamw, fp8_muon),
    "weight_decay": (fp8_adamw, fused_fp8_adamw, fp8_muon),
    "adam_learning_rate": (fp8_muon,),
    "adam_weight_decay": (fp8_muon,),
}


@pytest.mark.parametrize(("name", "make"), [(n, make) for n in RATES for make in RATES[n]])
def test_a_schedule_returns_numbers(name, make):
    def trace(schedule):
        optimizer = make(**{"learning_rate": 1e-3, name: schedule})
        state = jax.eval_shape(optimizer.init, PARAMS)
        if make is fused_fp8_adamw:
            return jax.eval_shape(optimizer.step, PARAMS, PARAMS, state)
        return jax.eval_shape(optimizer.update, PARAMS, state, PARAMS)

    for value in (None, "1e-3", True, 1j, np.ones((1,)), jnp.ones(3)):
        with pytest.raises(TypeError, match=rf"^{name}\(count\)=.* must be a number"):
            trace(lambda count, value=value: value)
    with pytest.raises(TypeError, match=rf"^{name}\(count\)=.* must be a number"):
        trace(lambda count: count > 0)
    for value in (1, 1e-3, np.float32(1e-3), jnp.float32(1e-3), nnx.Variable(jnp.float32(1e-3))):
        trace(lambda count, value=value: value)
    for value in (1e-3, 1, np.float32(1e-3), np.array(1e-3), jnp.bfloat16(1e-3)):
        trace(lambda count, value=value: value)
    trace(lambda count: count)


def test_arguments_of_a_step_are_checked():
    def step(grad_scale=1.0, state=None, **arguments):
        fused = fused_fp8_adamw(**{"learning_rate": 1e-3, "storage": FP8, **arguments})
        state = fused.init(PARAMS) if state is None else state
        return fused.step(PARAMS, PARAMS, state, grad_scale=grad_scale)

    with pytest.raises(TypeError, match=r"learning_rate\(count\)=None must be a number"):
        step(learning_rate=lambda count: None)
    with pytest.raises(TypeError, match=r"grad_scale='1' must be a number"):
        step(grad_scale="1")
    with pytest.raises(TypeError, match=r"mask=0.5 must be True or False"):
        step(mask=lambda params: 0.5)
    with pytest.raises(TypeError, match=r"but is a tuple.*pass the link"):
        step(state=fp8_adamw(1e-3, storage=FP8).init(PARAMS))
    with pytest.raises(TypeError, match=r"but is a ScaleByAdamState, which another optimizer made"):
        step(state=optax.scale_by_adam().init(PARAMS))


def test_a_state_of_another_storage_is_refused():
    def compressed(rate, storage):
        return compress(optax.adamw(rate), storage=storage)

    grouped, small = Storage(min_size=0, group_size=64), Storage()
    e5m2 = Storage(min_size=0, first=jnp.float8_e5m2, other=jnp.float8_e5m2)
    for make, storage in [
        (fp8_adamw, grouped),
        (fp8_adamw, small),
        (fp8_adamw, e5m2),
        (compressed, grouped),
        (compressed, e5m2),
    ]:
        state = jax.eval_shape(make(1e-3, storage=storage).init, PARAMS)
        with pytest.raises(ValueError, match=r"The state's .*but its Storage asks for"):
            jax.eval_shape(make(1e-3, storage=FP8).update, PARAMS, state, PARAMS)
    with pytest.raises(TypeError, match=r"must be a CompressedState"):
        compress(optax.adamw(1e-3)).update(PARAMS, optax.adamw(1e-3).init(PARAMS), PARAMS)


@pytest.mark.parametrize("tx", [optax.lion, None, fused_fp8_adamw(1e-3)])
def test_compress_takes_transformations_only(tx):
    with pytest.raises(TypeError, match=r"compress takes an optax transformation"):
        compress(tx)


def test_errors_name_an_optimizer_without_the_addresses_of_its_functions():
    fused = fused_fp8_adamw(1e-3)
    with pytest.raises(TypeError, match=r"update, not a FusedOptimizer\. It is a whole step"):
        compress(fused)
    with pytest.raises(UserError, match=r"its own, not a GradientTransformationExtraArgs\. Make"):
        in_host_memory(optax.sgd(1e-3))


def test_seeds_and_norms_are_checked():
    for seed in ("0", 0.5, True, None):
        with pytest.raises(TypeError, match=r"seed=.* must be a whole number"):
            stochastic_round_updates(seed)
        with pytest.raises(TypeError, match=r"seed=.* must be a whole number"):
            apply_updates(PARAMS, PARAMS, step=1, seed=seed)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=r"seed=.* whole number from 0 to 4,294,967,295"):
            stochastic_round_updates(seed)
        with pytest.raises(ValueError, match=r"seed=.* whole number from 0 to 4,294,967,295"):
            apply_updates(PARAMS, PARAMS, step=1, seed=seed)
    stochastic_round_updates(np.uint32(2**32 - 1))
    with pytest.raises(ValueError, match=r"max_norm=-1.0 is outside its range"):
        global_norm_scale(PARAMS, -1.0)
    with pytest.raises(TypeError, match=r"max_norm=None must be a number"):
        global_norm_scale(PARAMS, None)


@pytest.mark.parametrize(
    "optimizer", [fused_fp8_adamw(1e-3), in_place(optax.lion(1e-3))], ids=["fused", "in_place"]
)
@pytest.mark.parametrize(
    "skip", [1.0, "no", None, np.ones(128, bool), np.array([True]), np.int32(1)], ids=str
)
def test_skip_is_one_boolean(optimizer, skip):
    """An array would be broadcast: only some columns would take the step."""
    with pytest.raises(TypeError, match=r"skip=.* must be True, False or one boolean"):
        optimizer.step(PARAMS, PARAMS, optimizer.init(PARAMS), skip=skip)
    for one in (True, np.bool_(True), jnp.array(True)):
        params, _ = optimizer.step(PARAMS, PARAMS, optimizer.init(PARAMS), skip=one)
        jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
