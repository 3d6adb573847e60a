"""A step is a function of state and batch alone: not of how the batch is cut, nor of the mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from train_cases import ONE, norm_of, random_batches, small, stepper

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.training.step import clip_or_skip

IN_FP32 = {"dtype": jnp.float32, "layers": 1}
WIDE = IN_FP32 | {"ffn": 256}  # enough for moments in FP8
CONFIG = small(model=IN_FP32)


def numbers(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def assert_equal(got, wanted):
    for a, b in zip(numbers(got), numbers(wanted), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_same_seed_gives_the_same_numbers():
    once, again = (stepper(CONFIG).run(random_batches(4)) for _ in range(2))
    assert_equal(once, again)
    other = stepper(CONFIG).run(random_batches(4, seed=1))[1]
    assert other[0].loss != once[1][0].loss


def test_it_learns():
    """Text of four repeated bytes: some are seen again in each batch."""
    _, reports = stepper(CONFIG).run(random_batches(1) * 8)
    assert reports[-1].loss < 0.8 * reports[0].loss


def test_a_report_tells_of_the_batch_and_the_schedule():
    _, reports = stepper(CONFIG).run(random_batches(2))
    first, second = reports
    assert first.labels == 16 * 32 - 3 * 10 - 32
    assert first.learning_rate == pytest.approx(3e-3)  # after one step of warmup, at the peak
    assert second.learning_rate == pytest.approx(3e-3)
    assert 0.5 < first.gradient_norm < 100


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_step_changes_nothing_where_its_norm_or_its_loss_is_not_finite(clip_norm):
    config = small(optimizer={"clip_norm": clip_norm})
    for norm, loss in ((2.0, 1.0), (2.0, np.inf), (2.0, np.nan), (np.inf, 1.0), (np.nan, 1.0)):
        scale, skip = clip_or_skip(config, jnp.float32(norm), jnp.float32(loss))
        assert skip == (not np.isfinite(norm + loss))
        assert scale == (1.0 if clip_norm is None else 0.25) or not np.isfinite(norm)


@pytest.mark.costly
@pytest.mark.parametrize("name", ["adamw", "fp8_adamw"])
def test_a_batch_in_parts_is_the_batch(name):
    """Also where the parts have different numbers of labels, and one of them none."""
    batches = random_batches(3)
    for batch in batches:
        batch.labels[4:8] = -100
    whole, parts = (
        stepper(small(model=IN_FP32, optimizer={"name": name}, gradient_accumulation_steps=a)).run(
            batches
        )
        for a in (1, 4)
    )
    for a, b in zip(whole[1], parts[1], strict=True):
        assert a.labels == b.labels
        # Sums in another order. An FP8 moment on the edge between two codes may turn over.
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-6 if name == "adamw" else 1e-5)
        np.testing.assert_allclose(a.gradient_norm, b.gradient_norm, rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "fp8_adamw"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(name):
    run = stepper(small(model=IN_FP32, optimizer={"name": name}))
    good, bad = random_batches(2)
    bad.tokens[0, 0] = 999  # outside the vocabulary: NaN
    before, _ = run.run([good])
    kept = numbers((before.params, before.moments))
    after, (report,) = run.run([bad], before)
    assert np.isnan(report.loss)
    assert report.skipped == 1
    assert after.step == 2
    for a, b in zip(numbers((after.params, after.moments)), kept, strict=True):
        np.testing.assert_array_equal(a, b)
    # The run goes on as if that batch had not been.
    undisturbed, wanted = run.run([good, good])
    resumed, (got,) = run.run([good], after)
    assert_equal(resumed.params, undisturbed.params)
    assert got.learning_rate == wanted[1].learning_rate


def test_gradients_are_clipped_to_their_global_norm():
    run = stepper(small(model=IN_FP32, optimizer={"name": "adamw", "clip_norm": 0.01, "b1": 0.0}))
    state, (report,) = run.run(random_batches(1))
    assert report.gradient_norm > 0.1  # before clipping
    first_moments = state.moments.inner[0].mu  # with b1 = 0 the gradients
    np.testing.assert_allclose(norm_of(first_moments), 0.01, rtol=1e-5)


def test_z_loss_is_the_mean_square_of_the_log_sum_exp():
    batch = random_batches(1)[0]
    configs = [small(model=IN_FP32, optimizer={"name": "adamw"}, z_loss=z) for z in (0.1, 0.0)]
    with_z, without = (stepper(config).run([batch])[1] for config in configs)
    graph, _ = models.abstract(configs[0].model)
    params = stepper(configs[0]).state().params

    @jax.jit
    def squares(params, tokens):
        return jnp.square(jax.nn.logsumexp(nnx.merge(graph, params)(tokens), axis=-1))

    mean = np.mean(squares(params, batch.tokens), where=batch.labels >= 0)
    np.testing.assert_allclose(with_z[0].loss - without[0].loss, 0.1 * mean, rtol=1e-4)


@pytest.mark.parametrize("name", ["adamw", "fp8_adamw"])
def test_state_is_updated_in_place(name):
    program = stepper(small(model=IN_FP32, optimizer={"name": name})).program
    state = stepper(small(model=IN_FP32, optimizer={"name": name})).abstract
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert program.memory_analysis().alias_size_in_bytes >= size


def lion(schedule):
    return coat.optax.compress(optax.lion(schedule, weight_decay=0.1))


# A step of lion is the sign of its direction, which rounding may turn where it is nearly zero.
@pytest.mark.costly
def test_a_transformation_of_the_config_trains_on_any_mesh():
    config = small(model=WIDE, optimizer={"transformation": lion, "learning_rate": 1e-3})
    batches = random_batches(1) * 4
    _, alone = stepper(config, ONE).run(batches)
    state, spread = stepper(config, (2, 2, 2)).run(batches)
    assert alone[-1].loss < alone[0].loss
    for a, b in zip(spread, alone, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=1e-3)
    codes = [leaf for leaf in jax.tree.leaves(state.moments) if leaf.dtype == coat.E4M3]
    assert codes
    for leaf in codes:
        assert leaf.addressable_shards[0].data.size == leaf.size // (2 * 2)


def test_a_metric_of_the_config_is_measured_in_the_step():
    metrics = {
        "weight_norm": lambda step: coat.optax.global_norm(step.params),
        "loss_again": lambda step: step.loss,
    }
    config = small(model=IN_FP32, optimizer={"name": "adamw"})

    def with_metrics(metrics):
        return stepper(dataclasses.replace(config, metrics=metrics))

    state, (report,) = with_metrics(metrics).run(random_batches(1))
    np.testing.assert_allclose(report.metrics["weight_norm"], norm_of(state.params), rtol=1e-5)
    assert report.metrics["loss_again"] == report.loss
    for measure, what in (
        (lambda step: jnp.zeros(2), r"float32\[2\]"),
        (lambda step: step.grads, "a tree of arrays"),
        (lambda step: step.loss + 1j, "complex64"),
        (lambda step: jax.random.key(0), r"key<fry>"),
        (lambda step: "many", "<class 'str'>"),
    ):
        with pytest.raises(UserError, match=rf"metrics\['m'\] returns {what}, and must return one"):
            _ = with_metrics({"m": measure}).program


# Sums over devices are added in another order: some 2^-24 times the root of their length in a loss.
# Adam moves a parameter by the learning rate whatever its gradient, and rounding may turn the sign
# of one that is nearly zero, hence 1e-4 after some steps. In FP8 a code in a million turns into
# its neighbour, 2^-4 away, which later layers and steps spread: see tests/models/test_llama.py.
TOLERANCES = {"bf16": (1e-6, 1e-4), "coat": (2e-4, 2e-3)}


@pytest.mark.costly
@pytest.mark.parametrize(
    ("precision", "scan", "sizes"),
    [
        ("bf16", True, (8, 1, 1)),
        ("bf16", True, (2, 2, 2)),
        ("coat", True, (1, 8, 1)),
        ("coat", True, (2, 2, 2)),
        ("coat", False, (1, 1, 4)),
    ],
    ids=str,
)
def test_losses_do_not_depend_on_the_mesh(precision, scan, sizes):
    """The last one has four devices for two key heads."""
    name = "adamw" if precision == "bf16" else "fp8_adamw"
    model = IN_FP32 | {"precision": precision, "scan": scan}
    config = small(model=model, optimizer={"name": name})
    batches = random_batches(4)
    _, alone = stepper(config, ONE).run(batches)
    state, spread = stepper(config, sizes).run(batches)
    first, later = TOLERANCES[precision]
    np.testing.assert_allclose(spread[0].loss, alone[0].loss, rtol=first)
    np.testing.assert_allclose(spread[0].gradient_norm, alone[0].gradient_norm, rtol=10 * later)
    for a, b in zip(spread, alone, strict=True):
        np.testing.assert_allclose(a.loss, b.loss, rtol=later)
    for leaf in jax.tree.leaves((state.params, state.moments)):
        _, fsdp, tensor = sizes
        if leaf.size >= 64 * 64:  # a matrix or its codes: nothing large is whole anywhere
            assert leaf.addressable_shards[0].data.size == leaf.size // (fsdp * tensor)


@pytest.mark.costly
def test_bf16_parameters_are_moved_by_updates_below_their_last_place():
    """Now and then, where rounding is stochastic; rounded to nearest most stay where they are."""
    slow = {"name": "adamw", "learning_rate": 1e-5, "schedule": "constant", "warmup_steps": 0}
    moved = {}
    for rounding in (True, False):
        config = small(
            model={"param_dtype": jnp.bfloat16, "layers": 1},
            optimizer=slow | {"round_stochastically": rounding},
        )
        run = stepper(config)
        before = np.asarray(run.state().params["embed"][...])
        state, _ = run.run(random_batches(1) * 8)
        moved[rounding] = np.mean(np.asarray(state.params["embed"][...]) != before)
    assert moved[True] > 2 * moved[False]


def test_token_zero_is_a_label_like_any_other():
    config = small(model=IN_FP32, optimizer={"name": "adamw"})
    batch = random_batches(1)[0]
    batch.labels[:, ::2] = 0
    _, (report,) = stepper(config).run([batch])
    graph, _ = models.abstract(config.model)

    @jax.jit
    def log_probabilities(params, tokens):
        return jax.nn.log_softmax(nnx.merge(graph, params)(tokens))

    found = np.asarray(log_probabilities(stepper(config).state().params, batch.tokens))
    counts = batch.labels >= 0
    of_labels = np.take_along_axis(found, np.maximum(batch.labels, 0)[..., None], -1)[..., 0]
    assert report.labels == counts.sum()
    np.testing.assert_allclose(report.loss, -of_labels[counts].mean(), rtol=1e-5)
