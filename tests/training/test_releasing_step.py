"""A run that frees gradients in the backward pass trains as one that has them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_cases import ONE, norm_of, random_batches, small, stepper

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.training.config import TelemetryConfig
from coat_jax.training.resume_rules import changes as changes_of
from coat_jax.training.resume_rules import to_json
from coat_jax.training.stages import scale_of_stage

UNROLLED = {"scan": False, "dtype": jnp.float32, "layers": 1}


def run(release, *, sizes=ONE, model=None, **optimizer):
    config = small(
        model=UNROLLED | (model or {}), optimizer={"release_gradients": release} | optimizer
    )
    return stepper(config, sizes).run(random_batches(4))


@pytest.mark.costly
@pytest.mark.parametrize("name", ["adamw", "fp8_adamw"])
@pytest.mark.parametrize("tied", [False, True])
def test_without_clipping_the_losses_are_those_of_the_step_that_has_all_gradients(name, tied):
    # Two layers, since the gradient of the second becomes that of the first.
    settings = {"name": name, "clip_norm": None, "model": {"tied": tied, "layers": 2}}
    state, freed = run(True, **settings)
    wanted_state, wanted = run(False, **settings)
    for a, b in zip(freed, wanted, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-5)
        np.testing.assert_allclose(a.gradient_norm, b.gradient_norm, rtol=1e-4)
        assert (a.labels, a.skipped, a.learning_rate) == (b.labels, b.skipped, b.learning_rate)
    assert jax.tree.structure(state.moments.inner) == jax.tree.structure(wanted_state.moments)


def test_coat_and_recomputed_layers_train_alike():
    model = {"precision": coat.COAT, "remat": "layer", "dtype": jnp.bfloat16}
    settings = {"clip_norm": None, "model": model}
    for a, b in zip(run(True, **settings)[1], run(False, **settings)[1], strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-3)


def test_gradients_are_clipped_by_the_norm_of_the_step_before():
    """With b1 = 0 the first moments are the gradients; all stages of a first step are below."""
    settings = {"name": "adamw", "b1": 0.0, "clip_norm": 0.01}
    config = small(model=UNROLLED, optimizer={"release_gradients": True} | settings)
    stepped = stepper(config)
    state, (first,) = stepped.run(random_batches(1))
    of_first = norm_of(state.moments.inner.inner[0].mu)
    np.testing.assert_allclose(of_first, 0.01, rtol=1e-5)
    state, (second,) = stepped.run(random_batches(2)[1:], state)
    expected = second.gradient_norm * 0.01 / first.gradient_norm
    of_second = norm_of(state.moments.inner.inner[0].mu)
    np.testing.assert_allclose(of_second, expected, rtol=1e-5)


@pytest.mark.parametrize("norm_before", [np.nan, np.inf])
def test_an_unknown_norm_gives_each_stage_an_equal_share(norm_before):
    scales = [scale_of_stage(1.0, jnp.float32(norm_before), 4, jnp.float32(n)) for n in (2, 0.1)]
    np.testing.assert_allclose(scales, [0.25, 1.0])


@pytest.mark.costly
@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2)], ids=str)
def test_it_trains_alike_on_any_mesh(sizes):
    _, alone = run(True)
    _, spread = run(True, sizes=sizes)
    assert alone[-1].loss < alone[0].loss
    for a, b in zip(spread, alone, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-4)


def test_a_step_that_is_not_finite_is_counted_and_changes_nothing():
    stepped = stepper(small(model=UNROLLED, optimizer={"release_gradients": True}))
    good, bad = random_batches(2)
    bad.tokens[0, 0] = 999  # outside the vocabulary: NaN
    before, _ = stepped.run([good])
    kept = [np.asarray(leaf) for leaf in jax.tree.leaves((before.params, before.moments.inner))]
    after, (report,) = stepped.run([bad], before)
    assert report.skipped == 1
    now = jax.tree.leaves((after.params, after.moments.inner))
    for a, b in zip(now, kept, strict=True):
        np.testing.assert_array_equal(a, b)
    _, (report,) = stepped.run([good], after)
    assert np.isfinite(report.loss)
    assert report.skipped == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"model": {"scan": True}}, "model.scan"),
        ({"optimizer": {"transformation": coat.optax.fp8_adamw}}, r"optimizer\.transformation"),
        ({"metrics": {"norm": lambda step: coat.optax.global_norm(step.grads)}}, "metrics"),
        ({"telemetry": TelemetryConfig(every=5)}, r"telemetry\.every=5"),
    ],
)
def test_options_that_need_all_gradients_are_refused(changes, words):
    arguments = {"model": UNROLLED, "optimizer": {}} | changes
    arguments["optimizer"] = {"release_gradients": True} | arguments["optimizer"]
    with pytest.raises(UserError, match=f"keeps no gradients, and {words}"):
        small(**arguments)


def test_a_run_goes_on_as_it_began():
    """Its checkpoints have the norm of the last gradients, or they do not."""
    released, ordinary = (
        small(model=UNROLLED, optimizer={"release_gradients": release}) for release in (True, False)
    )
    for now, before, named in ((released, ordinary, "false"), (ordinary, released, "true")):
        with pytest.raises(UserError, match=f"as it began, with --optimizer.release_.* {named};"):
            changes_of(now, to_json(before))
    of_earlier_version = to_json(ordinary)
    del of_earlier_version["optimizer"]["release_gradients"]
    assert changes_of(ordinary, of_earlier_version) == []


def test_a_step_that_is_not_finite_does_not_move_the_learning_rate():
    stepped = stepper(small(model=UNROLLED, optimizer={"release_gradients": True}))
    good, bad = random_batches(2)
    bad.tokens[0, 0] = 999  # outside the vocabulary: NaN
    first, _, *later = (report.learning_rate for report in stepped.run([good, bad, good, good])[1])
    wanted = [report.learning_rate for report in stepped.run([good] * 3)[1]]
    assert [first, *later] == wanted
    assert wanted[0] != wanted[2]


def test_token_zero_is_a_label_like_any_other():
    (batch,) = random_batches(1)
    batch.labels[:, ::2] = 0
    config = small(model=UNROLLED, optimizer={"release_gradients": True})
    _, (report,) = stepper(config).run([batch])
    assert report.labels == np.sum(batch.labels >= 0)
