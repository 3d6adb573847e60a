"""A step is a function of state and batch alone: not of how the batch is cut, nor of the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from steps import assert_equal
from train_cases import ONE, good_and_bad, norm_of, random_batches, small, stepper

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.training.step import _number, clip_or_skip

IN_FP32 = {"dtype": jnp.float32, "layers": 1, "scan": False}
WIDE = {"ffn": 256}  # enough for moments in FP8
COAT = WIDE | {"precision": "coat"}
FP8 = small(model=IN_FP32, optimizer={"clip_norm": 0.1})
# With b1 = 0 the first moments are the gradients after clipping.
EXACT = dataclasses.replace(
    small(
        model={**IN_FP32, "z_loss": 0.1}, optimizer={"name": "adamw", "clip_norm": 0.01, "b1": 0.0}
    ),
    metrics={
        "norm_again": lambda step: coat.optax.global_norm(step.grads),
        "weight_norm": lambda step: coat.optax.global_norm(step.params),
        "loss_again": lambda step: step.loss,
    },
)


def test_the_same_seed_gives_the_same_numbers():
    once, again = (stepper(FP8).run(random_batches(2)) for _ in range(2))
    assert_equal(once, again)
    other = stepper(FP8).run(random_batches(1, seed=1))[1]
    assert other[0].loss != once[1][0].loss
    _, reports = stepper(FP8).run(random_batches(1) * 8)  # text that repeats itself is learned
    assert reports[-1].loss < 0.8 * reports[0].loss


def test_a_step_reports_its_loss_rate_and_metrics_and_clips_gradients_to_their_global_norm():
    """The mean over labels, token 0 among them, of the cross-entropy and of z log^2 sum exp."""
    (batch,) = random_batches(1)
    batch.labels[6:, ::2] = 0
    run = stepper(EXACT)
    graph, _ = models.abstract(EXACT.model)

    @jax.jit
    def of_tokens(params, tokens):
        logits = nnx.merge(graph, params)(tokens)
        return jax.nn.log_softmax(logits), jax.nn.logsumexp(logits, axis=-1)

    logs, sums = map(np.asarray, of_tokens(run.state().params, batch.tokens))
    state, (report,) = run.run([batch])
    counts = batch.labels >= 0
    of_labels = np.take_along_axis(logs, np.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    wanted = np.mean(0.1 * sums**2 - of_labels, where=counts)
    np.testing.assert_allclose(report.loss, wanted, rtol=1e-5)
    assert report.labels == counts.sum() == 16 * 32 - 3 * 10 - 32
    assert report.learning_rate == pytest.approx(3e-3)  # after one step of warmup, at the peak
    assert report.metrics["loss_again"] == report.loss
    np.testing.assert_allclose(report.metrics["weight_norm"], norm_of(state.params), rtol=1e-5)
    assert report.gradient_norm > 0.1  # before clipping
    np.testing.assert_allclose(report.metrics["norm_again"], report.gradient_norm, rtol=1e-5)
    np.testing.assert_allclose(norm_of(state.moments.inner[0].mu), 0.01, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_norm_or_a_loss_that_is_not_finite_skips_the_step(clip_norm):
    config = small(optimizer={"clip_norm": clip_norm})
    for norm, loss in ((2.0, 1.0), (2.0, np.inf), (2.0, np.nan), (np.inf, 1.0), (np.nan, 1.0)):
        scale, skip = clip_or_skip(config, jnp.float32(norm), jnp.float32(loss))
        assert skip == (not np.isfinite(norm + loss))
        assert scale == (1.0 if clip_norm is None else 0.25) or not np.isfinite(norm)


@pytest.mark.parametrize("config", [EXACT, FP8], ids=["adamw", "fp8_adamw"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(config):
    """The run goes on as if that batch had not been. All states are updated in place."""
    run = stepper(config)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(run.abstract))
    assert run.program.memory_analysis().alias_size_in_bytes >= size
    good, bad = good_and_bad()
    before, _ = run.run([good])
    kept = jax.tree.map(np.array, (before.params, before.moments))
    after, (report,) = run.run([bad], before)
    assert np.isnan(report.loss)
    assert report.skipped == 1
    assert after.step == 2
    assert_equal((after.params, after.moments), kept)
    undisturbed, wanted = run.run([good, good])
    resumed, (got,) = run.run([good], after)
    assert_equal(resumed.params, undisturbed.params)
    assert got.learning_rate == wanted[1].learning_rate


@pytest.mark.costly
@pytest.mark.parametrize("name", ["adamw", "fp8_adamw"])
def test_a_batch_in_parts_is_the_batch(name):
    """Also where the parts have different numbers of labels, and one of them none."""
    batches = random_batches(3)
    for batch in batches:
        batch.labels[4:8] = -100
    metrics = {"norm_again": lambda step: coat.optax.global_norm(step.grads)}
    config = small(model=IN_FP32, optimizer={"name": name, "clip_norm": 0.1})
    partitioned = dataclasses.replace(config, metrics=metrics, gradient_accumulation_steps=4)
    whole, parts = (stepper(each).run(batches)[1] for each in (config, partitioned))
    for a, b in zip(whole, parts, strict=True):
        assert a.labels == b.labels
        # Sums in another order. An FP8 moment on the edge between two codes may turn over.
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-6 if name == "adamw" else 1e-5)
        for norm in (b.gradient_norm, b.metrics["norm_again"]):
            np.testing.assert_allclose(a.gradient_norm, norm, rtol=1e-4)


def test_a_metric_that_is_no_real_number_is_refused():
    for value, shown in (
        (jnp.zeros(2), r"float32\[2\]"),
        ({"w": 1.0}, "{'w': 1.0}"),
        (jnp.complex64(1j), r"complex64\[\]"),
        (jax.random.key(0), r"key<fry>\[\]"),
        ("many", "'many'"),
    ):
        with pytest.raises(UserError, match=rf"metrics\['m'\] returns {shown}, and must return a"):
            _number("m", value)
    assert _number("m", 3) == 3


def lion(schedule):
    return coat.optax.compress(optax.lion(schedule, weight_decay=0.1))


# Sums over devices are added in another order: some 2^-24 times the root of their length in a loss.
# Adam moves a parameter by the learning rate whatever its gradient, and rounding may turn the sign
# of one that is nearly zero, hence 1e-4 after some steps; a step of lion is the sign of its
# direction. In FP8 a code in a million turns into its neighbour, 2^-4 away, which later layers and
# steps spread: see tests/models/test_llama.py.
@pytest.mark.costly
@pytest.mark.parametrize(
    ("model", "optimizer", "sizes", "first", "later"),
    [
        ({}, {"name": "adamw"}, (8, 1, 1), 1e-6, 1e-4),
        (WIDE, {"transformation": lion, "learning_rate": 1e-3}, (2, 2, 2), 1e-3, 1e-3),
        (COAT, {}, (2, 2, 2), 2e-4, 2e-3),
        # Four devices for two key heads.
        (COAT, {}, (1, 1, 4), 2e-4, 2e-3),
    ],
    ids=["adamw", "transformation", "coat", "more devices than heads"],
)
def test_losses_do_not_depend_on_the_mesh(model, optimizer, sizes, first, later):
    config = small(model=IN_FP32 | model, optimizer=optimizer)
    batches = random_batches(3)
    _, alone = stepper(config, ONE).run(batches)
    state, spread = stepper(config, sizes).run(batches)
    np.testing.assert_allclose(spread[0].loss, alone[0].loss, rtol=first)
    np.testing.assert_allclose(spread[0].gradient_norm, alone[0].gradient_norm, rtol=10 * later)
    for a, b in zip(spread, alone, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=later)
    for leaf in jax.tree.leaves((state.params, state.moments)):
        _, fsdp, tensor = sizes
        if leaf.size >= 64 * 64:  # a matrix or its codes: nothing large is whole anywhere
            assert leaf.addressable_shards[0].data.size == leaf.size // (fsdp * tensor)
