"""The stability study: a program of many runs is many runs; which runs are compared."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.kernels import gemm
from coat_jax.numerics.minifloat import minifloat
from experiments.row_files import Row
from experiments.stability import show as shown
from experiments.stability import training
from experiments.stability.arm import Arm, Settings, Size, in_xla, model_config
from experiments.stability.arms import ARMS, BASELINE, SIZES
from experiments.stability.conditions import conditions_of, of_today
from experiments.stability.curves import Signals, packed
from experiments.stability.events import Events
from experiments.stability.study import STUDY
from experiments.stability.training import Grid, of_runs, shape_of_rate, windows
from experiments.stability.unscaled import without_scales
from experiments.study.study import Job, Stopped

SETTINGS = Settings(steps=20, batch=2, sequence=16, every=2)
SIZE = Size(
    models.Config(
        vocab=256, width=32, layers=1, heads=2, kv_heads=2, head_dim=16, ffn=64, context=16,
        dtype=jnp.float32,
    ),
    SETTINGS,
    learning_rates=(1e-3, 1e-2),
    together=2,
)  # fmt: skip
TEXT = np.random.default_rng(0).integers(97, 123, 4096).astype(np.uint8)
SEEDS, RATES = np.array([0, 1, 0, 1]), np.array([1e-3, 1e-3, 1e-2, 1e-2])


# --- Training --------------------------------------------------------------------------------


def alone(arm):
    """A run by its seed and rate: without `vmap`, by the model's own loss and optax's own AdamW."""
    config = model_config(arm, SIZE)
    graph = models.abstract(config)[0]

    def decays(path, leaf):
        return leaf.ndim - (path[0].key == "layers") >= 2

    def transformation(rate):
        adamw = optax.adamw(
            lambda step: rate * shape_of_rate(SETTINGS, step),
            b1=0.9,
            b2=0.95,
            weight_decay=SETTINGS.weight_decay,
            mask=partial(jax.tree.map_with_path, decays),
        )
        return optax.chain(optax.clip_by_global_norm(SETTINGS.clip_norm), adamw)

    @jax.jit
    def begin(seed, rate):
        params = nnx.state(models.Llama(config, rngs=nnx.Rngs(jax.random.key(seed))))
        return params, transformation(rate).init(params)

    @jax.jit
    def step(params, state, seed, rate, number):
        batch = windows(SETTINGS, jnp.asarray(TEXT), seed, number)

        def loss_of(params):
            return nnx.merge(graph, params).loss(models.Batch(batch[:, :-1], batch[:, 1:])).mean

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = transformation(rate).update(grads, state, params)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
        return optax.apply_updates(params, updates), state, loss, norm

    def run(seed, rate):
        (params, state), found = begin(seed, rate), []
        for number in range(SETTINGS.steps):
            params, state, *reported = step(params, state, jnp.uint32(seed), rate, number)
            found.append(reported)
        return np.array(found).T

    return run


@pytest.mark.costly
@pytest.mark.parametrize(
    ("precision", "least"),
    # In BF16 only the order of sums differs. In FP8 a sum that crosses the border between two codes
    # changes one by 2^-4 of itself, one of thousands; gradients have codes twice as far apart.
    [(coat.BF16, 1e-4), (coat.COAT, 2e-2)],
    ids=["bf16", "coat"],
)
def test_a_run_among_others_is_the_run_alone(precision, least):
    arm = Arm(precision)
    grid = training.train(arm, SIZE, SETTINGS, TEXT, SEEDS, RATES)
    assert grid.signals.loss.shape == (4, SETTINGS.steps)
    alone_of = alone(arm)
    for run in (0, 3):
        loss, norm = alone_of(SEEDS[run], RATES[run])
        np.testing.assert_allclose(grid.signals.loss[run], loss, rtol=least)
        np.testing.assert_allclose(grid.signals.gradient_norm[run], norm, rtol=5 * least)
    assert np.all(grid.signals.sharpness > 0)
    # The same seeds at another learning rate: the same start and the same batches.
    np.testing.assert_allclose(grid.signals.loss[:2, 0], grid.signals.loss[2:, 0], rtol=least)
    assert not np.any(np.isclose(grid.signals.loss[0], grid.signals.loss[1], rtol=1e-4))
    assert np.all(grid.skipped == 0)


@pytest.mark.costly
@pytest.mark.parametrize("name", ARMS)
def test_every_arm_can_be_traced_and_needs_no_triton(name):
    precision = in_xla(ARMS[name].precision)
    assert precision.simulated == (precision.fp8_linear or precision.block is not None)
    program = training.program_of(ARMS[name], SIZE, SETTINGS)
    seeds = jax.ShapeDtypeStruct((3,), jnp.uint32)
    rates = jax.ShapeDtypeStruct((3,), jnp.float32)
    states = jax.eval_shape(program.init, seeds)
    text = jax.ShapeDtypeStruct((512,), jnp.uint8)
    after, signals = jax.eval_shape(program.advance, states, text, seeds, rates, 0)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, states)
    assert {leaf.dtype for leaf in jax.tree.leaves(states.params)} == {
        jnp.dtype(jnp.float32 if ARMS[name].params == "fp32" else jnp.bfloat16)
    }
    assert signals.loss.shape == (2, 3)


def test_a_run_measures_its_rows_and_stops_when_asked(call_of, monkeypatch, tmp_path, after):
    monkeypatch.setitem(SIZES, "tiny", SIZE)
    call = call_of(STUDY, "--size", "tiny", "--seeds", "0:2")
    rows = STUDY.rows_of(call, "bf16", call.seeds, STUDY.prepare(call, [], False))
    job = Job(rows, tmp_path, tmp_path)
    with pytest.raises(Stopped):
        training.measure(job._replace(asked=after(3)))
    assert (tmp_path / "progress.txt").read_text() == "4/20"
    measured = training.measure(job)
    assert [row["learning_rate"] for row in measured] == [1e-3, 1e-2]
    assert [of_today(row) for row in measured] == measured
    (found,) = conditions_of(measured)
    assert found.arms["bf16"].keys() == {1e-3, 1e-2}
    for runs in found.arms["bf16"].values():
        assert [*runs] == [0, 1]
        assert all(run.signals.shape == (3, 10) for run in runs.values())


def test_e8m7_is_bf16():
    """Operands are in BF16 already, so rounding them changes nothing; gradients differ by order."""
    model = dataclasses.replace(SIZE.model, dtype=jnp.bfloat16, scan=False)
    size = dataclasses.replace(SIZE, model=model)

    @partial(jax.jit, static_argnums=0)
    def begin(config):
        params = nnx.state(models.Llama(config, rngs=nnx.Rngs(0)))
        return params, windows(SETTINGS, jnp.asarray(TEXT), jnp.uint32(0), jnp.int32(0))

    # Which the precision of products does not change.
    params, batch = begin(model_config(ARMS["bf16"], size))
    found = []
    for name in ("bf16", "e8m7", "e8m3"):
        graph, _ = models.abstract(model_config(ARMS[name], size))
        loss_of = partial(training.loss_and_sharpness, graph)
        program = loss_of if name == "e8m3" else jax.value_and_grad(loss_of, has_aux=True)
        found.append(jax.jit(program)(params, batch))
    ((loss, sharpness), grads), ((same, alike), others), (rounded, _) = jax.device_get(found)
    assert same == pytest.approx(float(loss), rel=1e-6)
    assert alike == pytest.approx(float(sharpness), rel=1e-6)
    for grad, other in zip(*map(jax.tree.leaves, (grads, others)), strict=True):
        assert np.linalg.norm(grad - other) <= 2**-8 * np.linalg.norm(grad)
    assert abs(rounded - loss) > 1e-5 * loss


def test_the_shifted_formats_are_the_formats():
    """The same values, all shifted by one binade."""
    for name, shifted in (("E4M3", "E4M3:bias=8"), ("E5M2", "E5M2:bias=16")):
        ours, other = minifloat(name), minifloat(shifted)
        np.testing.assert_array_equal(ours.magnitudes, 2 * other.magnitudes)


def test_without_scales_large_numbers_saturate_and_small_ones_vanish():
    fmt = minifloat("E4M3:bias=8")
    x, with_nan = (np.array([[first, 1e4, 1.0]], np.float32) for first in (1e-5, np.nan))

    def operands(*tensors):
        return jax.jit(lambda *tensors: [gemm.operand(x, fmt) for x in tensors])(*tensors)

    (scaled,) = operands(x)
    with without_scales():
        plain, lost = operands(x, with_nan)
    (again,) = operands(x)
    assert plain.values.tolist() == [[0.0, fmt.max, 1.0]]
    assert plain.scale == 1
    assert jnp.isnan(lost.scale)
    assert scaled.scale > 1
    np.testing.assert_array_equal(again.values, scaled.values)
    with pytest.raises(UserError, match="save nothing in blocks"):
        Arm(coat.COAT, scaled=False)


def test_the_learning_rate_rises_and_falls():
    settings = Settings(100, 1, 1, warmup=0.1)
    shape = np.array([shape_of_rate(settings, step) for step in range(100)])
    np.testing.assert_allclose(shape[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert np.all(np.diff(shape[10:]) < 0)
    assert shape[55] == pytest.approx(0.5, abs=1e-6)
    constant = dataclasses.replace(settings, final_ratio=1.0)
    assert [float(shape_of_rate(constant, step)) for step in (9, 55, 99)] == [1, 1, 1]
    with pytest.raises(UserError, match=r"final_ratio=1\.5 must be from 0 to 1"):
        Settings(100, 1, 1, final_ratio=1.5)
    with pytest.raises(UserError, match=r"steps=7 must be a multiple of 50"):
        Settings(7, 1, 1)


# --- Which runs are compared -----------------------------------------------------------------

STEPS = 60
LONG = ("--steps", STEPS, "--batch", 2, "--sequence", 16, "--every", 2)
GOOD = 2 + 3.5 * np.exp(-np.arange(STEPS) / 5)
BAD = np.where(np.arange(STEPS) < 40, GOOD, 9.0)
NEVER = np.full(STEPS, np.nan)


@pytest.fixture
def measured(call_of):
    """A row with runs of these losses."""

    def row(name: str, rate: float, losses, first: int = 0) -> Row:
        call = call_of(STUDY, "--size", "tiny", *LONG, "--learning-rates", rate)
        (named,) = STUDY.rows_of(call, name, range(first, first + len(losses)), "a text")
        losses = np.asarray(losses, float)
        grid = Grid(Signals(losses, 10 * losses, 0.1 * losses), np.zeros(len(losses), int))
        found = of_runs(grid, slice(None), ceiling=3.2, every=2, seconds=1.0)
        return named | found

    return row


@pytest.fixture
def two_arms(measured):
    """At the lower rate all is well. At the higher one, one run of BF16 fails and six of COAT."""
    rows = [
        measured("bf16", 1e-3, [GOOD] * 8),
        measured("coat", 1e-3, [GOOD] * 8),
        measured("bf16", 1e-2, [GOOD] * 7 + [BAD]),
        measured("coat", 1e-2, [BAD] * 5 + [NEVER] + [GOOD] * 2),
    ]
    (found,) = conditions_of(rows)
    return found


def test_curves_and_events_come_back_from_a_row(two_arms):
    runs = two_arms.arms["coat"][1e-2]
    assert [*runs] == list(range(8))
    np.testing.assert_allclose(runs[0].signals[0], BAD[::2], rtol=2**-10)
    np.testing.assert_allclose(runs[7].signals[1], 10 * GOOD[::2], rtol=2**-10)
    assert np.all(np.isnan(runs[5].signals))
    assert runs[0].events == Events("diverged", 9.0, 40)
    assert runs[5].events == Events("stuck", np.inf, None)
    assert (two_arms.size, two_arms.ceiling) == ("tiny", 3.2)
    # Noise is what compresses least: a thousand runs fit half a megabyte.
    noise = np.random.default_rng(0).standard_normal((3, 64, 60))
    assert len(packed(2 + 0.1 * noise)["float16"]) / 64 < 500


def test_a_row_of_earlier_code_has_the_version_and_the_definition_of_today(measured):
    row = measured("coat", 1e-3, [GOOD])
    older = row | {"definition": row["definition"] | {"head": False}}
    del older["version"]
    assert of_today(older) == row
    with_head = row | {"definition": row["definition"] | {"head": True}}
    assert of_today(with_head) == with_head


def test_of_a_seed_or_definition_that_was_measured_twice_the_last_one_counts(measured):
    replaced = measured("coat", 1e-2, [BAD] * 9) | {"definition": {"precision": "older"}}
    rows = [
        replaced,
        measured("coat", 1e-2, [GOOD] * 4),
        measured("coat", 1e-2, [BAD, GOOD]),
        measured("coat", 1e-2, [BAD] * 3, first=4),
    ]
    (found,) = conditions_of(rows)
    runs = found.arms["coat"][1e-2]
    assert sorted(runs) == list(range(7))
    assert {seed for seed, run in runs.items() if run.events.final > 5} == {0, 4, 5, 6}


def test_runs_of_other_settings_are_not_compared_and_have_a_picture_of_their_own(measured):
    row = measured("bf16", 1e-3, [GOOD])
    other = row | {"settings": row["settings"] | {"batch": 99, "clip_norm": 1e9}}
    found = conditions_of([row, other, other | {"model": "another"}])
    assert len({one.name for one in found}) == 3
    assert found[1].title == "tiny, 60 steps of 99 x 16 bytes, gradients clipped to 1e+09"


def test_failures_are_compared_over_the_runs_that_both_arms_have(two_arms, measured):
    bf16, ours = shown.verdicts(two_arms).values()
    assert (bf16.failed.count, bf16.failed.runs, ours.failed.count) == (1, 16, 6)
    assert {rate: one.count for rate, one in ours.by_rate.items()} == {1e-3: 0, 1e-2: 6}
    assert bf16.paired is None
    assert np.isnan(bf16.p)
    assert ours.paired[:4] == (16, 0, 6, 1)
    assert ours.p == ours.paired.p == pytest.approx(16 / 2**7)
    rows = [measured("bf16", 1e-2, [BAD] * 8), measured("coat", 1e-3, [BAD] * 6)]
    (apart,) = conditions_of(rows)
    assert shown.verdicts(apart)["coat"].paired is None


def test_losses_are_compared_by_seed_where_all_are_finite(measured):
    rows = [measured("bf16", 1e-3, [GOOD, 1.5 * GOOD, GOOD]), measured("coat", 1e-3, [NEVER] * 2)]
    rows += [measured("e8m3", 1e-3, [1.01 * GOOD, 1.5 * 1.03 * GOOD])]
    (found,) = conditions_of(rows)
    mean = np.mean(np.log([1.01, 1.03]))
    # Rows have four digits of a loss.
    assert shown.above_baseline(found, "e8m3")[1e-3].mean == pytest.approx(mean, abs=1e-3)
    assert shown.above_baseline(found, "coat") == {}


def test_tables_and_a_picture_are_made(two_arms, tmp_path: Path):
    pytest.importorskip("matplotlib")
    header, bf16, ours = shown.failure_rows(two_arms)
    assert header[:4] == ["arm", "all", "0.001", "0.01"]
    assert bf16 == [BASELINE, "1/16", "0/8", "1/8", "", ""]
    assert ours[:4] == ["coat", "6/16", "0/8", "6/8"]
    assert ours[4].startswith("+31.2 (")
    assert ours[5] == "0.12"
    assert shown.draw(two_arms, tmp_path).stat().st_size > 10_000
