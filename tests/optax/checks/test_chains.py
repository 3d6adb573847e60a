"""A chain takes the state that its own init made, and says of any other what it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from coat_jax.optax import Storage, fp8_adamw, fp8_muon, fused_fp8_adamw

PARAMS = {"w": jnp.ones((32, 64)), "b": jnp.ones(32)}
FP8 = Storage(min_size=0)
MASK = {"w": True, "b": False}


def schedule(count):
    return 1e-2 / (count + 1)


OPTIMIZERS = {
    "number": fp8_adamw(1e-2, storage=FP8),
    "schedule": fp8_adamw(schedule, storage=FP8),
    "decay by a schedule": fp8_adamw(1e-2, weight_decay=schedule, storage=FP8),
    "masked": fp8_adamw(1e-2, mask=MASK, storage=FP8),
    "masked, by a schedule": fp8_adamw(1e-2, weight_decay=schedule, mask=MASK, storage=FP8),
}
OTHERS = {
    "None. Another optimizer made it": None,
    r"\(\). Another optimizer made it": (),
    "PartitionState. Another optimizer made it": fp8_muon(1e-2, storage=FP8).init(PARAMS),
    "ScaleByFP8AdamState. Another function made it, or the same one with": (
        fused_fp8_adamw(1e-2, storage=FP8).init(PARAMS)
    ),
    r"\(ScaleByAdamState, EmptyState, EmptyState\). Another optimizer made it": (
        optax.adamw(1e-2).init(PARAMS)
    ),
}


@functools.cache
def state_of(name):
    return OPTIMIZERS[name].init(PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_state_of_the_same_chain_is_accepted(name):
    tx = OPTIMIZERS[name]
    for other in OPTIMIZERS:
        state = state_of(other)
        if other == name:
            jax.eval_shape(tx.update, PARAMS, state, PARAMS)
        else:
            with pytest.raises(TypeError, match=r"must be .*, but is .* with other arguments"):
                jax.eval_shape(tx.update, PARAMS, state, PARAMS)


def test_the_state_of_another_optimizer_is_described():
    for described, state in OTHERS.items():
        with pytest.raises(TypeError, match=rf"ScheduleState\), but is {described}.*init\("):
            OPTIMIZERS["schedule"].update(PARAMS, state, PARAMS)
    number, by_schedule = fp8_muon(1e-2, storage=FP8), fp8_muon(schedule, storage=FP8)
    with pytest.raises(TypeError, match=r"be \(ScaleByFP8MuonState.*but is \(ScaleByFP8Muon"):
        number.update(PARAMS, by_schedule.init(PARAMS), PARAMS)


def test_moments_are_kept_as_the_error_says():
    """A schedule that starts at the old count continues as if it had been there all along."""
    number, by_schedule = OPTIMIZERS["number"], OPTIMIZERS["schedule"]
    _, state = jax.jit(number.update)(PARAMS, number.init(PARAMS), PARAMS)
    new = (state[0], *by_schedule.init(PARAMS)[1:])
    got, _ = jax.jit(by_schedule.update)(PARAMS, optax.tree.set(new, count=state[0].count), PARAMS)
    expected, _ = jax.jit(number.update)(PARAMS, state, PARAMS)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other / 2, rtol=1e-6)
