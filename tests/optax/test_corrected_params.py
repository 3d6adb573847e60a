"""BF16 parameters with corrections train as FP32 parameters that are rounded to 24 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from steps import normal, step_of

from coat_jax.numerics import corrections
from coat_jax.numerics import noise as random
from coat_jax.optax import (
    CorrectedState,
    Storage,
    corrected_params,
    fused_fp8_adamw,
    in_place,
    state_shardings,
    with_corrections,
)
from coat_jax.optax.corrections import init_corrections, split_params

FP8 = Storage(min_size=512)
RATE = 1e-3


def parameters():
    """A matrix with moments in 8 bits, a vector with moments in FP32, and one that is FP32."""
    matrix, vector = normal(0, (16, 256), jnp.bfloat16), normal(1, (256,), jnp.bfloat16)
    return {"matrix": matrix, "vector": vector, "scale": normal(2, (64,))}


def gradients(params, seed):
    return {name: normal((seed, i), p.shape) for i, (name, p) in enumerate(params.items())}


def fused(**arguments):
    return fused_fp8_adamw(RATE, weight_decay=0.1, storage=FP8, correct_params=True, **arguments)


def wrapped():
    tx = with_corrections(optax.adamw(RATE, weight_decay=0.1))
    return tx.init, step_of(tx)


OPTIMIZERS = {
    "fused": lambda: tuple(fused()),
    "in place": lambda: tuple(in_place(optax.adamw(RATE, weight_decay=0.1), correct_params=True)),
    "wrapped": wrapped,
}


@jax.jit
def rounded(x):
    """FP32 numbers rounded to 24 bits."""
    return corrections.join(*corrections.split(x))


read = jax.jit(corrected_params)  # operation by operation it is many programs


def place(x):
    """The distance of neighbouring 24-bit numbers around x."""
    return np.exp2(np.floor(np.log2(np.abs(x))) - 15)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_that_of_fp32_parameters_rounded_to_24_bits(name):
    """Bit for bit but where FP32 itself is rounded otherwise: XLA may fuse p + u into u's sum.

    A skipped step changes nothing.
    """
    init, step = OPTIMIZERS[name]()
    jitted = jax.jit(step)
    params = parameters()
    state = init(params)
    for i in range(2):
        before, grads = read(params, state), gradients(params, i)
        wanted, _ = jitted(before, grads, CorrectedState(state.inner, init(before).corrections))
        params, state = jitted(params, grads, state)
        after = read(params, state)
        for leaf in ("matrix", "vector"):
            assert params[leaf].dtype == jnp.bfloat16
            assert np.any(state.corrections[leaf])
            got, exact = np.float64(after[leaf]), np.float64(rounded(wanted[leaf]))
            assert np.mean(got != exact) <= 0.01
            assert np.all(np.abs(got - exact) <= place(got))
        np.testing.assert_allclose(after["scale"], wanted["scale"], rtol=1e-6)
    if name != "wrapped":
        skipped = jitted(params, gradients(params, 1), state, skip=True)
        jax.tree.map(np.testing.assert_array_equal, skipped, (params, state))


def test_the_state_takes_a_byte_for_a_parameter_in_bf16_and_next_to_nothing_for_others():
    params = {"w": jnp.zeros((1024, 1024), jnp.bfloat16), "v": jnp.zeros((1024, 1024))}
    without = jax.eval_shape(fused_fp8_adamw(RATE).init, params)
    state = jax.eval_shape(fused_fp8_adamw(RATE, correct_params=True).init, params)
    assert jax.tree.structure(state.inner) == jax.tree.structure(without)
    assert state.corrections["w"].shape == (1024, 1024)
    assert state.corrections["v"].size <= 64
    assert {c.dtype for c in jax.tree.leaves(state.corrections)} == {jnp.dtype(jnp.int8)}


def test_on_a_mesh_corrections_are_sharded_like_their_parameters_and_the_numbers_are_the_same():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = {"matrix": P("x", "y"), "vector": P("x"), "scale": P("y")}
    alone = parameters()
    params = {n: jax.device_put(p, NamedSharding(mesh, specs[n])) for n, p in alone.items()}
    optimizer = fused()
    shardings = state_shardings(optimizer, params)
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    assert jax.tree.map(lambda c: c.sharding.spec, state.corrections) == specs
    grads = gradients(alone, 0)
    step = jax.jit(optimizer.step)
    params, state = step(params, grads, state)
    alone, state_alone = step(alone, grads, optimizer.init(alone))
    for a, b in zip(
        jax.tree.leaves(corrected_params(params, state)),
        jax.tree.leaves(corrected_params(alone, state_alone)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=2.0**-15)


def plain():
    return fused_fp8_adamw(RATE, storage=FP8)


def sgd():
    return with_corrections(optax.sgd(1.0))


def wide(params):
    return jax.tree.map(lambda a: a.astype("float32"), params)


REFUSED = {
    "correct_params=1 must be True": lambda p: fused_fp8_adamw(RATE, correct_params=1),
    "correct_params='yes'": lambda p: in_place(optax.sgd(1.0), correct_params="yes"),
    "must be a CorrectedState, but is a": lambda p: fused().step(p, p, plain().init(p)),
    "step it with correct_params=True": lambda p: plain().step(p, p, fused().init(p)),
    "an InPlaceState, but .*correct_params=True": (
        lambda p: in_place(optax.sgd(1.0)).step(p, p, fused().init(p))
    ),
    r"params\['matrix'\] is bfloat16\[16, 256\], but its correction in the state is int8": (
        lambda p: fused().step(p, p, fused().init(wide(p)))
    ),
    "The parameters have another structure": (
        lambda p: fused().step(p, p, fused().init({"matrix": p["matrix"]}))
    ),
    "The parameters have another": lambda p: corrected_params([*p.values()], fused().init(p)),
    r"updates\['matrix'\] has shape \(2, 16, 256\)": (
        lambda p: sgd().update({**p, "matrix": jnp.ones((2, 16, 256))}, sgd().init(p), p)
    ),
    "The state contains 0 CorrectedStates": lambda p: corrected_params(p, plain().init(p)),
    "needs the parameters": lambda p: sgd().update(p, sgd().init(p)),
    r"with_corrections\(optax.lion\(1e-4\)\)": lambda p: with_corrections(optax.sgd),
    "with_corrections takes an optax transf": lambda p: with_corrections(fused()),
}


@pytest.mark.parametrize("message", REFUSED)
def test_states_and_parameters_that_do_not_fit_are_refused(message):
    with pytest.raises((TypeError, ValueError), match=message):
        REFUSED[message](parameters())


def test_corrections_are_rounded_by_the_key_of_parameters_not_by_that_of_moments():
    """The parameters become 1 + 0.3 units in the last of 24 bits."""
    params = {"w": jnp.ones((32, 1024), jnp.bfloat16)}
    state = CorrectedState((), init_corrections(params))
    stepped = {"w": jnp.full((32, 1024), 1 + 0.3 * 2.0**-15)}
    _, state = split_params(stepped, params, state, (), seed=3, step=7)
    key = random.param_key(random.leaf_key(3, 7, random.leaf_ids(params)[0]))
    own = np.asarray(random.bits(key, (32, 1024), run=128) >> 8)
    np.testing.assert_array_equal(state.corrections["w"], own + round(0.3 * 256) >= 256)


def test_the_fast_parameters_of_a_lookahead_are_corrected():
    params = optax.LookaheadParams.init_synced({"w": jnp.ones((16, 256), jnp.bfloat16)})
    tx = with_corrections(optax.lookahead(optax.sgd(2.0**-12), 5, 0.5))
    state = tx.init(params)
    for _ in range(4):
        updates, state = tx.update({"w": jnp.ones((16, 256), jnp.bfloat16)}, state, params)
        params = optax.apply_updates(params, updates)
    corrected = corrected_params(params, state)
    np.testing.assert_array_equal(corrected.fast["w"], 1 - 4 * 2.0**-12)
