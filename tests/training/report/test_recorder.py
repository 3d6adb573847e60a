"""Records tell of every step once, a step late, and do not wait for the device."""

import contextlib
import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from train_cases import small

from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.config import MeshConfig
from coat_jax.training.report import recorder as recorders
from coat_jax.training.report.recorder import Diverged, Recorder
from coat_jax.training.step import Report


@pytest.fixture
def kept():
    """Stands in for metrics and progress."""
    records, notes = [], []
    return types.SimpleNamespace(
        records=records, write=records.append, notes=notes, note=notes.append, update=id
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set."""
    now = [100.0]
    monkeypatch.setattr(recorders.time, "perf_counter", lambda: now[0])
    return now


def recorder(kept, config=None, *, step=0, skipped=0, seconds=0.0, **changes):
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    before = {"step": step, "skipped": skipped, "seconds": seconds}
    return Recorder(config or small(**changes), mesh, kept, kept, **before)


def report(loss=1.0, skipped=0):
    numbers = (jnp.float32(loss), jnp.float32(2.0), jnp.float32(3e-4), jnp.int32(500))
    return Report(*numbers, jnp.int32(skipped))


def test_a_record_comes_with_the_next_step(kept):
    records = recorder(kept)
    records.take(1, report(4.0))
    assert kept.records == []
    records.take(2, report(3.0))
    assert [r["step"] for r in kept.records] == [1]
    records.flush()
    records.flush()
    assert [(r["step"], r["loss"]) for r in kept.records] == [(1, 4.0), (2, 3.0)]
    assert records.loss == 3.0


def test_telemetry_has_a_record_of_its_own_and_a_line_where_it_warns(kept):
    records = recorder(kept, step=4)
    records.take_telemetry(5, {"fp8/a/error": 0.5}, "a: its relative error is 50%.")
    records.take_telemetry(6, {"fp8/a/error": 0.5}, None)
    assert [(r["step"], r["fp8/a/error"]) for r in kept.records] == [(5, 0.5), (6, 0.5)]
    assert kept.records[0]["tokens"] == 5 * 16 * 32
    assert kept.notes == ["step 5: a: its relative error is 50%."]


def test_a_record_has_pace_and_time_since_the_run_began(kept, clock):
    records = recorder(kept, step=4, seconds=50.0)
    records.take(5, report())
    clock[0] += 2.0
    records.take(6, report())
    clock[0] += 4.0
    records.flush()
    first, second = kept.records
    assert first["tokens_per_second"] == 16 * 32 / 2
    assert second["tokens_per_second"] == 16 * 32 / 4
    assert (second["seconds"], second["tokens"]) == (56.0, 6 * 16 * 32)
    assert "mfu" not in first  # a CPU has no peak
    clock[0] += 100.0
    records.pause(6)
    records.take(7, report())
    clock[0] += 1.0
    records.flush()
    assert kept.records[2]["tokens_per_second"] == 16 * 32


def test_between_records_steps_are_passed_over_but_the_last(kept, clock):
    records = recorder(kept, log_every=4)
    for step in range(1, 11):
        records.take(step, report())
        clock[0] += 1.0
    records.flush()
    assert [r["step"] for r in kept.records] == [4, 8, 10]
    assert kept.records[1]["tokens_per_second"] == 16 * 32


def take(records, skipped, first=1):
    """Steps of which these many were skipped in all, step by step."""
    for step, count in enumerate(skipped, start=first):
        records.take(step, report(skipped=count))
    records.flush()


def test_the_first_of_several_skipped_steps_is_reported(kept):
    take(recorder(kept), (0, 1, 1, 2, 3, 4, 4))
    assert [note[:7] for note in kept.notes] == ["step 2:", "step 4:"]
    assert kept.notes[0] == (
        "step 2: skipped 1 step since the last record, whose loss or gradients are not finite; "
        "1 so far."
    )
    take(recorder(kept, step=4, skipped=2), [2], first=5)
    assert len(kept.notes) == 2


# Every fourth step has a record, of the steps since the last one.
SPARSE = {"max_skipped_steps": 8, "log_every": 4, "total_steps": 100}


@pytest.mark.parametrize(
    ("changes", "skipped", "in_row"),
    [
        ({"max_skipped_steps": 3, "total_steps": 100}, (0, 1, 2, 2, 3, 4, 5), 3),
        (SPARSE, (0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9), 8),
        (SPARSE, (0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9), None),  # of each four one was taken
        ({"max_skipped_steps": 3, "step": 50, "skipped": 2, "total_steps": 100}, (3, 4, 5), 3),
        ({"total_steps": 4}, (1, 2, 3, 4), 4),  # nothing was learned
        ({"total_steps": 4}, (0, 1, 2, 3), None),
    ],
)
def test_too_many_skipped_steps_in_a_row_end_the_run(kept, changes, skipped, in_row):
    records, first = recorder(kept, **changes), 1 + changes.get("step", 0)
    last = first + len(skipped) - 1
    take(records, skipped[:-1], first)
    message = f"last {in_row} steps, up to step {last}, were skipped"
    with pytest.raises(Diverged, match=message) if in_row else contextlib.nullcontext():
        take(records, skipped[-1:], last)
    assert kept.records[-1]["step"] == last
    assert Diverged.exit_code == 4


def test_a_transformation_with_its_own_learning_rate_has_none_in_records(kept):
    for optimizer in (optax.lion, optax.lion(1e-3)):
        take(recorder(kept, dataclasses.replace(small(), optimizer=optimizer)), [0])
    made, ready = kept.records
    assert made.keys() - ready.keys() == {"learning_rate"}


@pytest.mark.parametrize(("loss", "perplexity"), [(2.0, np.exp(2.0)), (1e4, np.inf)])
def test_a_held_out_loss_has_its_perplexity(kept, loss, perplexity):
    recorder(kept).take_held_out(7, loss, {"accuracy": 0.5})
    (record,) = kept.records
    assert (record["held_out_loss"], record["held_out_accuracy"]) == (loss, 0.5)
    assert record["perplexity"] == pytest.approx(perplexity)


def test_a_step_in_bf16_is_measured_against_the_peak_of_16_bits(kept, clock, monkeypatch):
    monkeypatch.setattr(recorders, "PEAKS", {"": (1e12, 4e12)})
    records = recorder(kept, model={"precision": "coat"}, bf16_steps=1, total_steps=4)
    for step in (1, 2):
        records.take(step, report())
        clock[0] += 1.0
    records.flush()
    work = sum(small(model={"precision": "bf16"}).model.work_per_token(32))
    in_bf16, in_fp8 = (record["mfu"] for record in kept.records)
    assert in_bf16 == pytest.approx(16 * 32 * work / 1e12 / 2)
    assert in_fp8 < 0.9 * in_bf16
