"""Arguments are optax's, in optax's order, and a wrong one is refused when it is given."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.numerics.formats import E4M3
from coat_jax.optax import (
    Storage,
    compress,
    fp8_adamw,
    fp8_muon,
    global_norm_scale,
    in_place,
    scale_by_fp8_adam,
    with_rounding,
)

PARAMS = jax.device_put({"w": np.ones((4, 128), np.float32), "b": np.ones(8, np.float32)})
LARGE = {"w": jnp.ones((128, 128))}
SGDM = optax.sgd(1e-3, momentum=0.9)
FP8 = Storage(min_size=0)
MAKERS = (fp8_adamw, scale_by_fp8_adam)


def parameters(make):
    return inspect.signature(make).parameters


def made(make, **arguments):
    """An optimizer with these arguments, and a learning rate if it needs one."""
    given = {"learning_rate": 1e-3} if "learning_rate" in parameters(make) else {}
    return make(**{**given, **arguments})


@pytest.mark.parametrize(
    ("ours", "theirs"), [(fp8_adamw, optax.adamw), (scale_by_fp8_adam, optax.scale_by_adam)]
)
def test_arguments_and_defaults_are_those_of_optax(ours, theirs):
    def described(f):
        return [(name, p.kind, p.default) for name, p in parameters(f).items()]

    extra = [(name, inspect.Parameter.KEYWORD_ONLY, None) for name in ("storage", "implementation")]
    assert described(ours) == described(theirs) + extra


@pytest.mark.parametrize("make", MAKERS)
def test_a_direction_needs_a_second_moment_that_lasts(make):
    """Without, m over sqrt(v) grows while there are no gradients, and the codes become coarse."""

    def init(**arguments):
        optimizer = made(make, **arguments)
        jax.eval_shape(optimizer.init, {"bias": jnp.ones(256), "w": jnp.ones((128, 128))})

    for b2 in (0.0, 0.78):
        with pytest.raises(ValueError, match=rf"b2={b2} with b1=0.9: .*0.788943.*Storage\(first="):
            init(b1=0.9, b2=b2)
    with pytest.raises(ValueError, match=r"b2 must be at least 0.977641"):
        init(b1=0.99, b2=0.95)
    init(b1=0.9, b2=0.788943)  # what the error says is enough
    init(b1=0.95, b2=0.891001)
    init(b1=0.0, b2=0.0)
    init(b1=0.9, b2=0.0, storage=Storage(first=E4M3))
    init(b1=0.99, b2=0.9, storage=Storage(min_size=128 * 128 + 1))  # all moments are in FP32


NO_NUMBERS = [None, "1e-3", True, 1j, np.ones((1,)), np.bool_(True)]
NO_NUMBERS += [jax.device_put(np.ones(3, np.float32)), jax.device_put(np.bool_(True))]
OUTSIDE = [-1, -1e-8, np.float32(-1), jnp.float32(jnp.nan), np.float64(np.inf)]


@pytest.mark.parametrize("make", MAKERS)
def test_numbers_are_numbers_in_their_range(make):
    names = {"learning_rate": "inf", "b1": 1, "b2": 1, "eps": "inf", "eps_root": "inf"}
    names["weight_decay"] = "inf"
    for name, end in names.items():
        if name not in parameters(make):
            continue
        for value in NO_NUMBERS:
            with pytest.raises(TypeError, match=f"{name}=.* must be a number"):
                made(make, **{name: value})
        for value in OUTSIDE if end == "inf" else [*OUTSIDE, 1, 1.0, 1.5]:
            with pytest.raises(ValueError, match=f"{name}=.* its range, 0 <= {name} < {end}"):
                made(make, **{name: value})
        if name not in ("learning_rate", "weight_decay"):
            with pytest.raises(TypeError, match=f"{name}=.* must be a number"):
                made(make, **{name: lambda step: 0.9})
        elif make is not scale_by_fp8_adam:
            for one in (np.float32(1e-3), np.array(1e-3), jnp.bfloat16(1e-3), 0, 1):
                made(make, **{name: one})


def test_settings_of_a_wrong_type_are_refused():
    for make in (fp8_adamw, scale_by_fp8_adam, fp8_muon):
        with pytest.raises(ValueError, match="must be a Storage or None"):
            made(make, storage={"group_size": 64})
        with pytest.raises(ValueError, match=r"mu_dtype=bfloat16: .*Storage\(first"):
            made(make, mu_dtype=jnp.bfloat16)
    for tx in (fp8_adamw(1e-3, implementation="cuda"), compress(SGDM, implementation="cuda")):
        with pytest.raises(ValueError, match='must be None, "xla" or "triton", not \'cuda\''):
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), LARGE)


def fused(learning_rate=1e-3, **arguments):
    return in_place(fp8_adamw(learning_rate, **arguments))


def step(grad_scale=1.0, state=None, **arguments):
    optimizer = fused(**{"learning_rate": 1e-3, "storage": FP8, **arguments})
    state = optimizer.init(PARAMS) if state is None else state
    return optimizer.step(PARAMS, PARAMS, state, grad_scale=grad_scale)


def rounding(seed):
    return with_rounding(optax.sgd(1.0), "stochastic", seed=seed)


SEED = r"seed=.* must be a whole number from 0 to 4,294,967,295"
REFUSED = [
    (lambda: step(grad_scale="1"), TypeError, r"grad_scale='1' must be a number"),
    (
        lambda: step(state=fp8_adamw(1e-3, storage=FP8).init(PARAMS)),
        ValueError,
        r"state.count is missing. The state was made by another optimizer",
    ),
    (lambda: step(state=optax.scale_by_adam().init(PARAMS)), ValueError, "codes.* is missing"),
    (lambda: rounding("0"), ValueError, SEED),
    (lambda: rounding(True), ValueError, SEED),
    (lambda: rounding(2**32), ValueError, SEED),
    (lambda: in_place(optax.sgd(1.0), seed=-1), ValueError, SEED),
    (lambda: global_norm_scale(PARAMS, None), TypeError, r"max_norm=None must be a number"),
    (lambda: fp8_adamw(1e-3).update(PARAMS, fp8_adamw(1e-3).init(PARAMS)), ValueError, "params"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_arguments_of_functions_and_steps_are_checked(call, error, message):
    with pytest.raises(error, match=message):
        call()


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
        with pytest.raises(ValueError, match=r"is .* instead of .*Storage that"):
            jax.eval_shape(make(1e-3, storage=FP8).update, PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match=r"state.step is missing. The state was made by another"):
        compress(optax.adamw(1e-3)).update(PARAMS, optax.adamw(1e-3).init(PARAMS), PARAMS)


@pytest.mark.parametrize(
    "optimizer", [fused(), in_place(optax.lion(1e-3))], ids=["fused", "in_place"]
)
def test_skip_is_one_boolean(optimizer):
    """An array would be broadcast: only some columns would take the step."""
    state = optimizer.init(PARAMS)
    for skip in (1.0, "no", None, np.ones(128, bool), np.array([True]), np.int32(1)):
        with pytest.raises(TypeError, match=r"skip=.* must be True, False or one boolean"):
            optimizer.step(PARAMS, PARAMS, state, skip=skip)
    for one in (True, np.bool_(True), jnp.array(True)):
        params, _ = jax.jit(partial(optimizer.step, skip=one))(PARAMS, PARAMS, state)
        jax.tree.map(np.testing.assert_array_equal, params, PARAMS)
