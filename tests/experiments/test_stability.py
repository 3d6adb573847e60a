"""The stability study: a program of many runs is many runs; what names a result; what is shown."""

import dataclasses
import sys
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
from experiments.stability import __main__ as command
from experiments.stability import measure, results, table, train
from experiments.stability.arm import Arm, Settings, Size, differences, in_xla, model_config
from experiments.stability.arms import ARMS, BASELINE, SIZES
from experiments.stability.events import Events, Spike, events_of
from experiments.stability.picture import draw, draw_curves
from experiments.stability.train import Signals, shape_of_rate, windows
from experiments.stability.unscaled import without_scales

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
            return nnx.merge(graph, params).loss(batch[:, :-1], batch[:, 1:])

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
    grid = train.train(arm, SIZE, SETTINGS, TEXT, SEEDS, RATES)
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
def test_every_arm_can_be_traced(name):
    program = train.program_of(ARMS[name], SIZE, SETTINGS)
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


def test_all_arms_of_a_seed_begin_with_the_same_parameters():
    def begins(arm):
        new_state = partial(train.new_state, model_config(arm, SIZE), optax.adamw(1e-3))
        return jax.tree.leaves(jax.jit(new_state)(jnp.int32(3)).params)

    for rounded, exact in zip(begins(ARMS["params_bf16"]), begins(ARMS[BASELINE]), strict=True):
        assert rounded.dtype == jnp.bfloat16
        np.testing.assert_array_equal(rounded, np.asarray(exact).astype(jnp.bfloat16))


def test_e8m7_is_bf16():
    """Operands are in BF16 already, so rounding them changes nothing; gradients differ by order."""
    size = dataclasses.replace(SIZE, model=dataclasses.replace(SIZE.model, dtype=jnp.bfloat16))

    @partial(jax.jit, static_argnums=0)
    def begin(config):
        params = nnx.state(models.Llama(config, rngs=nnx.Rngs(0)))
        return params, windows(SETTINGS, jnp.asarray(TEXT), jnp.uint32(0), jnp.int32(0))

    # Which the precision of products does not change.
    params, batch = begin(model_config(ARMS["bf16"], size))
    found = []
    for name in ("bf16", "e8m7", "e8m3"):
        graph, _ = models.abstract(model_config(ARMS[name], size))
        loss_of = partial(train.loss_and_sharpness, ARMS[name], graph)
        found.append(jax.jit(jax.value_and_grad(loss_of, has_aux=True))(params, batch))
    ((loss, sharpness), grads), ((same, alike), others), ((rounded, _), _) = jax.device_get(found)
    assert same == pytest.approx(float(loss), rel=1e-6)
    assert alike == pytest.approx(float(sharpness), rel=1e-6)
    for grad, other in zip(*map(jax.tree.leaves, (grads, others)), strict=True):
        assert np.linalg.norm(grad - other) <= 2**-8 * np.linalg.norm(grad)
    assert abs(rounded - loss) > 1e-5 * loss


def test_no_arm_needs_triton():
    for arm in ARMS.values():
        precision = in_xla(arm.precision)
        rounds = precision.fp8_linear or precision.block is not None
        assert precision.simulated == rounds


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


def test_the_learning_rate_rises_and_falls():
    settings = Settings(100, 1, 1, warmup=0.1)
    shape = np.array([shape_of_rate(settings, step) for step in range(100)])
    np.testing.assert_allclose(shape[:10], np.arange(1, 11) / 10, rtol=1e-6)
    assert np.all(np.diff(shape[10:]) < 0)
    assert shape[55] == pytest.approx(0.5, abs=1e-6)
    half = dataclasses.replace(settings, final_ratio=0.5)
    assert shape_of_rate(half, 55) == pytest.approx(0.75, abs=1e-6)
    constant = dataclasses.replace(settings, final_ratio=1.0)
    assert [float(shape_of_rate(constant, step)) for step in (9, 55, 99)] == [1, 1, 1]


def test_settings_have_a_title_with_what_is_unusual():
    assert Settings(300, 8, 128).title == "300 steps of 8 x 128 bytes"
    pushed = Settings(300, 8, 128, final_ratio=1.0, clip_norm=1e9).title
    assert pushed.endswith("bytes, learning rate constant, gradients clipped to 1e+09")
    falling = Settings(300, 8, 128, final_ratio=0.1).title
    assert falling.endswith("bytes, learning rate down to 0.1 of the highest")
    with pytest.raises(UserError, match=r"final_ratio=1\.5 must be from 0 to 1"):
        Settings(300, 8, 128, final_ratio=1.5)


# --- Rows ------------------------------------------------------------------------------------


def row_of(name="coat", rate=1e-2, seeds=range(4), text="a text", size=SIZE, settings=SETTINGS):
    return results.row_of(name, ARMS[name], "tiny", size, settings, rate, seeds, text)


def test_key_is_that_of_all_that_decides_a_result():
    wider = dataclasses.replace(SIZE, model=dataclasses.replace(SIZE.model, ffn=128))
    others = [
        row_of("bf16"),
        row_of(rate=1e-3),
        row_of(seeds=range(4, 8)),
        row_of(text="another"),
        row_of(size=wider),
        row_of(settings=dataclasses.replace(SETTINGS, steps=40)),
    ]
    assert len({row["key"] for row in [row_of(), *others]}) == 7
    together = dataclasses.replace(SIZE, together=9, learning_rates=(1.0,))
    assert row_of(size=together)["key"] == row_of()["key"]


def test_every_arm_is_another_run_and_says_how():
    assert len({row_of(name)["key"] for name in ARMS}) == len(ARMS)
    assert len({differences(arm) for arm in ARMS.values()}) == len(ARMS)
    assert differences(ARMS["e4m3_unscaled"]).endswith("scaled=False")


def measured(name, rate, losses, seeds=None, **changes):
    """A row with runs of these losses."""
    losses = np.asarray(losses, float)
    row = row_of(name, rate, seeds=seeds or range(len(losses)), **changes)
    signals = Signals(losses, 10 * losses, 0.1 * losses)
    events = [events_of(one, ceiling=3.2) for one in losses]
    return results.measured(row, events, signals, [0] * len(losses), 3.2, 1.0)


STEPS = 60
LONG = Settings(STEPS, 2, 16, every=2)
GOOD = 2 + 3.5 * np.exp(-np.arange(STEPS) / 5)
BAD = np.where(np.arange(STEPS) < 40, GOOD, 9.0)
SPIKED = np.where(np.arange(STEPS) == 45, 9.0, GOOD)
NEVER = np.full(STEPS, np.nan)


def rows_of_two_arms():
    """At the lower rate all is well. At the higher one, one run of BF16 fails and six of COAT."""
    return [
        measured("bf16", 1e-3, [GOOD] * 8, settings=LONG),
        measured("coat", 1e-3, [GOOD] * 7 + [SPIKED], settings=LONG),
        measured("bf16", 1e-2, [GOOD] * 7 + [BAD], settings=LONG),
        measured("coat", 1e-2, [BAD] * 5 + [NEVER] + [GOOD] * 2, settings=LONG),
    ]


def test_curves_and_events_come_back_from_the_file(tmp_path: Path):
    path = tmp_path / "rows.json"
    results.write(path, rows_of_two_arms())
    (found,) = results.conditions_of(results.read([path]))
    sample = found.arms["coat"][1e-2]
    assert sample.seeds == tuple(range(8))
    np.testing.assert_allclose(sample.signals.loss[0], BAD[::2], rtol=2**-10)
    np.testing.assert_allclose(sample.signals.gradient_norm[7], 10 * GOOD[::2], rtol=2**-10)
    assert np.all(np.isnan(sample.signals.loss[5]))
    assert sample.events[0] == Events("diverged", 9.0, 40, (Spike(40, None),))
    assert sample.events[5].final == np.inf
    assert found.arms["coat"][1e-3].events[7].recovered
    assert (found.size, found.settings, found.ceiling) == ("tiny", LONG, 3.2)


def test_a_thousand_runs_fit_a_megabyte():
    """Of 300 steps, of which every fifth is stored; noise is what compresses least."""
    noise = np.random.default_rng(0).standard_normal((3, 64, 60))
    assert len(results.packed(2 + 0.1 * noise)["float16"]) / 64 < 500


def test_keeping_adds_what_is_new_and_keeps_what_was_measured(tmp_path: Path):
    path = tmp_path / "folder" / "rows.json"
    first, second = measured("bf16", 1e-3, [GOOD]), measured("coat", 1e-3, [GOOD])
    assert results.keep(path, [first]) == [first]
    assert results.keep(path, [second, first | {"final": [9.0]}]) == [first, second]


def test_code_decides_nothing_and_the_version_of_the_study_does(monkeypatch):
    row = row_of()
    of_older_code = {name: row[name] for name in row if name != "version"} | {"code": "older"}
    assert results.key_of(of_older_code) == row["key"]
    monkeypatch.setattr(results, "VERSION", results.VERSION + 1)
    assert row_of()["key"] != row["key"]


def test_of_two_versions_of_an_arm_the_newer_one_counts():
    old, new = measured("coat", 1e-3, [BAD]), measured("coat", 1e-3, [GOOD])
    old |= {"code": "older", "key": "older"}
    for rows in ([old, new], [new, old]):
        old["parents"] = old["parents"] | {"date": "2000-01-01"}
        (found,) = results.conditions_of(rows)
        assert found.arms["coat"][1e-3].events[0].outcome == "trained"


def test_failures_are_compared_over_the_runs_that_both_arms_have():
    rows = [
        measured("bf16", 1e-3, [GOOD] * 4, settings=LONG),
        measured("bf16", 1e-2, [BAD] * 8, settings=LONG),
        measured("coat", 1e-3, [BAD] * 6, settings=LONG),
    ]
    (found,) = results.conditions_of(rows)
    by_arm = table.verdicts(found)
    assert by_arm["coat"].paired[:4] == (4, 0, 4, 0)
    assert by_arm["coat"].p == pytest.approx(2 / 2**4)
    (apart,) = results.conditions_of(rows[1:])
    assert table.verdicts(apart)["coat"].paired is None
    assert np.isnan(table.verdicts(apart)["coat"].p)


def test_seeds_and_rates_that_newer_code_adds_join_those_of_older_code():
    older = [measured(arm, rate, [GOOD] * 4) for arm in ("bf16", "coat") for rate in (1e-3, 1e-2)]
    for row in older:
        row |= {"code": "older", "key": "older" + row["key"]}
        row["parents"] = row["parents"] | {"date": "2000-01-01"}
    newer = [
        measured("coat", 1e-2, [BAD, GOOD]),  # of seeds that older code has, too
        measured("coat", 1e-2, [BAD] * 3, seeds=range(4, 7)),
        measured("bf16", 1e-2, [GOOD], seeds=range(6, 7)),
    ]
    (found,) = results.conditions_of([*older, *newer])
    sample = found.arms["coat"][1e-2]
    assert sorted(sample.seeds) == list(range(7))
    failed = {s for s, one in zip(sample.seeds, sample.events, strict=True) if one.final > 5}
    assert failed == {0, 4, 5, 6}
    assert len(found.arms["coat"][1e-3].seeds) == 4
    # Four seeds at the lower rate; at the higher one these and seed 6.
    assert table.compared(found, "coat")[:4] == (9, 0, 2, 0)
    assert table.compared(found, "coat", 1e-2)[:4] == (5, 0, 2, 0)


def test_of_two_definitions_of_an_arm_only_the_newer_one_counts():
    old = measured("coat", 1e-3, [BAD] * 4)
    old |= {"definition": "older", "key": "older"}
    old["parents"] = old["parents"] | {"date": "2000-01-01"}
    (found,) = results.conditions_of([old, measured("coat", 1e-3, [GOOD])])
    assert found.arms["coat"][1e-3].seeds == (0,)


def test_runs_of_other_settings_are_not_compared():
    rows = [measured("bf16", 1e-3, [GOOD]), measured("coat", 1e-3, [GOOD], settings=LONG)]
    assert len(results.conditions_of(rows)) == 2


# --- What is shown ---------------------------------------------------------------------------


def test_verdicts_count_failures_and_test_them_against_the_baseline():
    (found,) = results.conditions_of(rows_of_two_arms())
    by_arm = table.verdicts(found)
    assert list(by_arm) == [BASELINE, "coat"]
    bf16, ours = by_arm.values()
    assert (bf16.failed.count, bf16.failed.runs, ours.failed.count) == (1, 16, 6)
    assert {rate: one.count for rate, one in ours.by_rate.items()} == {1e-3: 0, 1e-2: 6}
    assert bf16.paired is None
    assert np.isnan(bf16.p)
    assert ours.paired[:4] == (16, 0, 6, 1)
    assert ours.p == ours.paired.p == pytest.approx(16 / 2**7)
    # One spike that ended, and five that became divergences.
    assert (ours.spiked.count, ours.spiked.runs) == (6, 16)
    assert (ours.recovered.count, ours.recovered.runs) == (1, 6)
    assert ours.best == pytest.approx(2.0, abs=0.01)
    assert ours.sensitivity > bf16.sensitivity


def test_tables_and_a_picture_are_made(tmp_path: Path, capsys):
    (found,) = results.conditions_of(rows_of_two_arms())
    table.show(found)
    shown = capsys.readouterr().out
    assert "6/16" in shown
    assert "sharpness" in shown
    assert draw(found, tmp_path).stat().st_size > 10_000
    assert draw_curves(found, tmp_path).stat().st_size > 10_000


def test_differences_are_in_percentage_points_and_those_of_one_rate_stand_beside():
    (found,) = results.conditions_of(rows_of_two_arms())
    header, row = table.paired_rows(found, 1e-2)
    assert header[5:7] == ["difference", "difference at 0.01"]
    assert row[:5] == ["coat", "16", "0", "6", "1"]
    assert row[5].startswith("+31.2 (")
    assert row[6].startswith("+62.5 (")
    assert row[7:] == ["0.12", "0.12"]


def test_arms_are_shown_with_the_runs_whose_signals_are_compared():
    losses = np.stack([BAD] * 5 + [NEVER] + [GOOD] * 2)
    signals = np.stack([losses] * 3)
    shortly_before = 40 - table.SHORTLY  # where the loss is higher and the gradient norm lower
    signals[0, :5, shortly_before] += 0.1
    signals[1, :5, shortly_before] -= 0.1
    row = row_of("coat", 1e-2, seeds=range(8), settings=LONG)
    events = [events_of(one, ceiling=3.2) for one in losses]
    coat = results.measured(row, events, Signals(*signals), [0] * 8, 3.2, 1.0)
    (found,) = results.conditions_of([*rows_of_two_arms()[:3], coat])
    # A single run of BF16 diverged, which has no error; of COAT's six, one was stuck.
    header, cells = table.arm_warning_rows(found)
    assert header == ["arm", "diverged", "trained", "loss", "gradient norm", "sharpness"]
    assert cells == ["coat", "5", "2", "1.00 ± 0.00", "0.00 ± 0.00", "0.50 ± 0.00"]


def test_runs_of_other_settings_have_a_picture_of_their_own():
    rows = rows_of_two_arms()
    rows += [row | {"settings": row["settings"] | {"batch": 99}} for row in rows]
    rows += [row | {"model": "another"} for row in rows]
    found = results.conditions_of(rows)
    assert len({one.name for one in found}) == len(found) == 4


# --- The command -----------------------------------------------------------------------------


def called(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["stability", *map(str, arguments)])
    command.main()


@pytest.fixture
def without_training(monkeypatch):
    """Runs that all end well, at once."""

    def instead(arm, size, settings, text, seeds, learning_rates, report):
        loss = np.tile(GOOD[: settings.steps], (len(seeds), 1))
        return train.Grid(Signals(loss, loss, loss), np.zeros(len(seeds), int))

    monkeypatch.setattr(measure, "train", instead)
    small = dataclasses.replace(SIZE, settings=LONG)
    monkeypatch.setitem(SIZES, "tiny", small)


def test_a_call_measures_what_is_missing_and_the_next_one_the_rest(
    tmp_path: Path, monkeypatch, capsys, without_training
):
    arguments = ["--size", "tiny", "--seeds", 3, "--out", tmp_path, "--formats"]
    called(monkeypatch, *arguments, "bf16")
    assert "bf16: 4 runs" in capsys.readouterr().out
    called(monkeypatch, *arguments, "bf16", "coat")
    shown = capsys.readouterr().out
    assert "bf16: " not in shown
    assert "coat: 4 runs" in shown
    assert "coat: 2 runs" in shown  # two seeds in a program, then the third
    (found,) = results.conditions_of(results.read([tmp_path / results.FILE]))
    assert found.arms["coat"][1e-2].seeds == (0, 1, 2)


def test_a_call_without_time_leaves_programs_for_the_next(
    tmp_path: Path, monkeypatch, capsys, without_training
):
    times = iter(range(0, 10_000, 100))
    monkeypatch.setattr(measure.time, "monotonic", lambda: next(times))
    called(
        monkeypatch, "--size", "tiny", "--seeds", 8, "--out", tmp_path, "--formats", "bf16",
        "--minutes", 10,
    )  # fmt: skip
    assert "are left for the next call" in capsys.readouterr().out
    assert 0 < len(results.read([tmp_path / results.FILE])) < 8


def test_bad_input_is_one_clear_line(monkeypatch):
    with pytest.raises(SystemExit, match=r"steps=7 must be a multiple of 20"):
        called(monkeypatch, "--size", "tiny", "--steps", 7, "--plan")
    with pytest.raises(SystemExit, match=r"sequence=4096 is longer than .* 32"):
        called(monkeypatch, "--size", "tiny", "--sequence", 4096, "--plan")
    with pytest.raises(UserError, match="save nothing in blocks"):
        Arm(coat.COAT, scaled=False)
    with pytest.raises(UserError, match="not rounded"):
        Arm(head=True)
