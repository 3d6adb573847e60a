"""Telemetry of a run: what it records, warns of, and leaves as it is."""

import copy
import dataclasses
import functools
import io
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console
from train_cases import ONE, mesh_of, random_batches, small, stepper

import coat_jax as coat
from coat_jax.training import loop, setup
from coat_jax.training.config import CheckpointConfig, TelemetryConfig
from coat_jax.training.data import DataConfig
from coat_jax.training.report.telemetry import Telemetry
from coat_jax.training.setup import TrainSetup, prepare
from coat_jax.training.step import Report

# In FP32, and wide enough for moments in FP8.
WIDE = {"precision": "coat", "dtype": jnp.float32, "layers": 1, "scan": False, "ffn": 256}
LINEAR = WIDE | {"precision": "fp8_linear"}  # which is compiled sooner, for laws of any FP8
IN_BF16 = WIDE | {"precision": "bf16"}
EVERY_STEP = TelemetryConfig(every=1)


def telemetry_of(config, sizes=ONE):
    """The telemetry of a run. Its programs do not depend on the steps that it looks at."""
    every_step = dataclasses.replace(config, telemetry=EVERY_STEP, bf16_steps=0)
    looking = copy.copy(new_telemetry(every_step, sizes))
    looking._config, looking._warned = config, set()
    return looking


@functools.cache
def new_telemetry(config, sizes=ONE):
    config, mesh, _, graph, state, _ = prepare(config, mesh_of(sizes))
    return Telemetry(config, graph, state, mesh)


def recorded(config, sizes=ONE, batch=None, change=lambda params: params):
    """The numbers of the first step, and the telemetry; `change` is of the parameters."""
    of_step, watching = stepper(config, sizes), telemetry_of(config, sizes)
    with jax.set_mesh(of_step.mesh):
        state, placed = of_step.state(), of_step.place(batch or random_batches(1)[0])
        state = state._replace(params=change(state.params))
        return watching.measure(1, state, placed), watching


def test_a_record_has_tensors_and_moments():
    whole, _ = recorded(small(model=WIDE, telemetry=EVERY_STEP))
    assert all(key.startswith("fp8/") for key in whole)
    assert all(np.isfinite(value) for value in whole.values())
    for tensor in ("attention/query/gradient", "mlp/input", "mlp/gate/saved", "mlp/down/weight"):
        for statistic in ("underflow", "subnormal", "saturated", "headroom", "error"):
            assert f"fp8/layers/0/{tensor}/{statistic}" in whole
    assert whole["fp8/layers/0/mlp/gate/mu/k"] >= 1
    assert whole["fp8/layers/0/mlp/gate/nu/zero"] == 1  # before the first step


def test_numbers_depend_neither_on_parts_nor_on_the_mesh_nor_on_scanning():
    """Only the largest values of inputs and gradients depend on the parts.

    Their scales are powers of two, so a part moves the headroom by less than one binade. Most
    labels are in the first half, so that neither part has the numbers of both.
    """
    (batch,) = random_batches(1)
    batch.labels[8:, 1:] = -100
    whole, _ = recorded(small(model=WIDE, telemetry=EVERY_STEP), batch=batch)
    partitioned = small(
        model=WIDE | {"scan": True}, telemetry=EVERY_STEP, gradient_accumulation_steps=2
    )
    found, _ = recorded(partitioned, (2, 2, 2), batch)
    assert set(found) == set(whole)
    for key, value in whole.items():
        atol = 1.0 if key.endswith(("input/headroom", "gradient/headroom")) else 0.01
        np.testing.assert_allclose(found[key], value, rtol=0.1, atol=atol, err_msg=key)


def test_steps_between_records_and_steps_in_bf16_have_none():
    telemetry = TelemetryConfig(every=3)
    watching = telemetry_of(small(model=WIDE, telemetry=telemetry, bf16_steps=4))
    assert [watching.measure(step, None, None) for step in (1, 2, 3, 4, 5)] == [None] * 5


# --- What there is not -----------------------------------------------------------------------


def test_moments_of_a_transformation_are_recorded():
    config = small(
        model=IN_BF16,
        telemetry=EVERY_STEP,
        optimizer={"transformation": lambda rate: coat.optax.compress(optax.adam(rate))},
    )
    found, _ = recorded(config)
    assert {f"fp8/layers/0/mlp/gate/{moment}/k" for moment in ("mu", "nu")} <= found.keys()


def test_a_run_in_bf16_has_nothing_to_tell():
    assert telemetry_of(small(model=IN_BF16, optimizer={"name": "adamw"})).empty


def test_the_program_of_a_step_is_the_same_with_telemetry(monkeypatch):
    """The telemetry is traced, which might change a cached trace; compiling it could not."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered: None)

    def lowered(every):
        config = small(model=LINEAR, telemetry=TelemetryConfig(every=every))
        if every:
            new_telemetry.__wrapped__(config)
        return prepare(config, mesh_of(ONE)).lower().as_text()

    without = lowered(0)
    assert lowered(1) == without
    assert "f8E4M3" in without


# --- Warnings --------------------------------------------------------------------------------


def test_a_gradient_that_underflows_is_warned_of_once():
    """For 30 % of the hidden width what comes after the gate is small, and so is what it gates.

    Each by so much that its own codes still hold it; the gate's gradient is the product of both.
    """

    def change(params):
        up, down = (params["layers"][0]["mlp"][name] for name in ("up", "down"))
        lost = int(0.3 * down[...].shape[0])
        down[...] = down[...].at[:lost].multiply(2.0**-15)
        up[...] = up[...].at[..., :lost].multiply(2.0**-16)
        return params

    config = small(model=WIDE, telemetry=EVERY_STEP)
    numbers, watching = recorded(config, change=change)
    lost = numbers["fp8/layers/0/mlp/gate/gradient/underflow"]
    assert lost == pytest.approx(0.3, abs=0.02)
    only = {key: value for key, value in numbers.items() if "gate/gradient" in key}
    gate = f"layers/0/mlp/gate/gradient: {lost:.0%} of its values became zero."
    assert watching.warning(only) == gate
    assert watching.warning(only) is None
    said = watching.warning(numbers)
    assert "became zero" in said
    assert "more are off" in said
    assert "\n" not in said


@pytest.fixture(scope="module")
def any_telemetry():
    return telemetry_of(small(model=IN_BF16, optimizer={"name": "adamw"}, telemetry=EVERY_STEP))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("gradient/underflow", 0.1, "10% of its values became zero"),
        ("gradient/underflow", 0.09, None),
        ("input/saturated", 0.25, "25.0% of its values are beyond the largest code"),
        ("input/saturated", 0.0, None),
        ("input/subnormal", 0.75, "75% of its codes are subnormal"),
        ("weight/error", 0.3, "its relative error is 30%"),
        ("weight/error", float("nan"), "it is not finite"),
        ("gradient/error", 0.06, None),
        ("gradient/headroom", float("nan"), None),
        ("mu/zero", 1.0, None),
    ],
)
def test_bad_statistics_are_warned_of_in_words(any_telemetry, key, value, said):
    any_telemetry._warned.clear()
    line = f"a/{key.partition('/')[0]}: {said}."
    assert any_telemetry.warning({f"fp8/a/{key}": value}) == (said and line)


def test_operands_in_int8_have_a_limit_of_their_own(any_telemetry):
    """Small values of a row become zero with no larger an error than others."""
    telemetry = copy.copy(any_telemetry)
    telemetry._int8 = True
    assert telemetry.warning({"fp8/a/input/underflow": 0.6, "fp8/a/weight/error": 0.02}) is None
    said = "a/input: its relative error in INT8 is 5%, where FP8 has 3%."
    assert telemetry.warning({"fp8/a/input/error": 0.05, "fp8/a/gradient/underflow": 0.09}) == said


# --- A run -----------------------------------------------------------------------------------


def train(config):
    """Its records, and what was printed."""
    file = io.StringIO()
    loop.train(config, Console(file=file, width=200))
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], file.getvalue()


def without_times(records):
    times = {"seconds", "tokens_per_second"}
    return [{k: v for k, v in record.items() if k not in times} for record in records]


def test_a_run_records_it_resumes_and_trains_as_without_it(tmp_path, monkeypatch):
    """The loop with a telemetry that other tests have compiled, and a step that only counts."""
    of_step = stepper(small(model=WIDE))

    def step(state, batch):
        loss = jnp.float32(np.sum(batch.tokens))
        report = Report(loss, loss, jnp.float32(0), jnp.int32(9), state.skipped)
        return state._replace(step=state.step + 1), report

    def compiled(config, *_):
        return telemetry_of(small(model=WIDE, telemetry=config.telemetry))

    monkeypatch.setattr(loop, "Telemetry", compiled)
    monkeypatch.setattr(loop, "make_mesh", lambda config: of_step.mesh)
    monkeypatch.setattr(setup, "_compile", lambda *arguments, **options: step)
    monkeypatch.setattr(TrainSetup, "new_state", lambda self: of_step.state())

    tokens = tmp_path / "tokens.npy"  # without documents: rows are not packed
    np.save(tokens, np.random.default_rng(0).integers(0, 256, 10_000, np.uint16))

    def config(name, every):
        return small(
            model=WIDE,
            data=DataConfig(train=(str(tokens),)),
            telemetry=TelemetryConfig(every=every),
            checkpoint=CheckpointConfig(every=4),
            total_steps=8,
            out=str(tmp_path / name),
        )

    plain, _ = train(config("plain", 0))
    records, said = train(config("watched", 3))
    assert "Compiled the telemetry in" in said
    looked = [record for record in records if "fp8/layers/0/mlp/gate/gradient/error" in record]
    assert [record["step"] for record in looked] == [3, 6]
    assert without_times(r for r in records if r not in looked) == without_times(plain)

    shutil.rmtree(tmp_path / "watched" / "checkpoints" / "8")
    again, said = train(config("watched", 3))
    assert "Resumes after step 4 of 8." in said
    assert without_times(again) == without_times(records)
