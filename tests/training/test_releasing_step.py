"""A run that frees gradients in the backward pass trains as one that has them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import assert_equal
from train_cases import ONE, good_and_bad, norm_of, random_batches, small, stepper

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.training.config import TelemetryConfig
from coat_jax.training.step import scale_of_stage

UNROLLED = {"scan": False, "dtype": jnp.float32, "layers": 1}
RECOMPUTED = {"precision": coat.COAT, "remat": "layer", "dtype": jnp.bfloat16}


def config_of(release=True, *, model=None, **optimizer):
    return small(
        model=UNROLLED | (model or {}), optimizer={"release_gradients": release} | optimizer
    )


@pytest.mark.costly
@pytest.mark.parametrize(
    ("name", "model", "rtol"),
    [
        ("fp8_adamw", RECOMPUTED, 1e-3),
        # Two layers, since the gradient of the second becomes that of the first.
        ("adamw", {"tied": True, "layers": 2}, 1e-5),
    ],
)
def test_without_clipping_the_losses_are_those_of_the_step_that_has_all_gradients(
    name, model, rtol
):
    (state, freed), (wanted_state, wanted) = (
        stepper(config_of(release, name=name, clip_norm=None, model=model)).run(random_batches(4))
        for release in (True, False)
    )
    for a, b in zip(freed, wanted, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=rtol)
        np.testing.assert_allclose(a.gradient_norm, b.gradient_norm, rtol=10 * rtol)
        assert (a.labels, a.skipped, a.learning_rate) == (b.labels, b.skipped, b.learning_rate)
    assert jax.tree.structure(state.moments) == jax.tree.structure(wanted_state.moments)


def test_gradients_are_clipped_by_the_norm_of_the_step_before():
    """With b1 = 0 the first moments are the gradients; all stages of a first step are below."""
    stepped = stepper(config_of(name="adamw", b1=0.0, clip_norm=0.01))
    state, (first,) = stepped.run(random_batches(1))
    of_first = norm_of(state.moments.inner[0].mu)
    np.testing.assert_allclose(of_first, 0.01, rtol=1e-5)
    state, (second,) = stepped.run(random_batches(2)[1:], state)
    expected = second.gradient_norm * 0.01 / first.gradient_norm
    of_second = norm_of(state.moments.inner[0].mu)
    np.testing.assert_allclose(of_second, expected, rtol=1e-5)


@pytest.mark.parametrize("norm_before", [np.nan, np.inf])
def test_an_unknown_norm_gives_each_stage_an_equal_share(norm_before):
    scales = [scale_of_stage(1.0, jnp.float32(norm_before), 2, jnp.float32(n)) for n in (2, 0.1)]
    np.testing.assert_allclose(scales, [0.25, 1.0])


@pytest.mark.costly
def test_it_trains_alike_on_a_mesh():
    (_, alone), (_, spread) = (
        stepper(config_of(), mesh).run(random_batches(3)) for mesh in (ONE, (2, 2, 2))
    )
    for a, b in zip(spread, alone, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)


def test_a_step_that_is_not_finite_is_counted_and_changes_nothing():
    """Nor does it move the learning rate."""
    stepped = stepper(config_of())
    good, bad = good_and_bad()
    before, (first,) = stepped.run([good])
    kept = jax.tree.map(np.array, (before.params, before.moments))
    after, (report,) = stepped.run([bad], before)
    assert report.skipped == 1
    assert_equal((after.params, after.moments), kept)
    _, (second, third) = stepped.run([good, good], after)
    assert np.isfinite(third.loss)
    assert third.skipped == 1
    wanted = [report.learning_rate for report in stepped.run([good] * 3)[1]]
    assert [first.learning_rate, second.learning_rate, third.learning_rate] == wanted
    assert wanted[0] != wanted[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"model": {"scan": True}}, "model.scan"),
        ({"metrics": {"norm": lambda step: coat.optax.global_norm(step.grads)}}, "metrics"),
        ({"telemetry": TelemetryConfig(every=5)}, "telemetry.every"),
        ({"frozen": ("embed",)}, "frozen"),
    ],
)
def test_options_that_need_all_gradients_are_refused(changes, words):
    arguments = {"model": UNROLLED, "optimizer": {"release_gradients": True}} | changes
    with pytest.raises(UserError, match=f"keeps no gradients, .* for {words}:"):
        small(**arguments)
