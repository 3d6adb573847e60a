"""Scripts that measure on GPUs also run on a CPU, on tiny sizes, and find what pages quote."""

from argparse import Namespace

import pytest

from experiments import records, timing
from experiments.command import RESULTS
from experiments.layers import Sizes, in_jax, measure
from experiments.layers.__main__ import _marginal
from experiments.layers.saved import OPERATORS, SIZES
from experiments.optimizer_step import __main__ as optimizer_step
from experiments.optimizer_step import cases
from experiments.timing import medians_ms

TINY = Namespace(elements=14, model="tiny", layers=1)


def test_runs_take_turns_and_only_batches_after_the_warmup_count(monkeypatch):
    clock, calls = iter(range(100)), []
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    runs = [(lambda name=name: calls.append(name), lambda: calls.append("wait")) for name in "ab"]
    assert medians_ms(runs, warmup=1, batches=2, calls=2) == [500.0, 500.0]
    assert calls == 3 * [*("wait", "a", "a", "wait"), *("wait", "b", "b", "wait")]


@pytest.mark.parametrize(
    ("kind", "number", "state"),
    [("adamw", 3, 2.08), ("muon", 1, 1.04)],
)
def test_a_step_is_timed_and_its_state_is_as_large_as_it_is(kind, number, state, monkeypatch):
    once = {"warmup": 0, "batches": 1, "calls": 1}
    monkeypatch.setattr(timing, "medians_ms", lambda runs, **_: medians_ms(runs, **once))
    found = optimizer_step.measure(kind, cases.KINDS[kind](TINY)[number], TINY)
    assert found["ms"] > 0
    assert found["extra_bytes"] >= 0
    assert found["state_bytes_per_param"] == pytest.approx(state, rel=0.05)


def test_every_optimizer_is_compared_on_both_models_if_there_is_a_gpu():
    both = {(one["model"], one["optimizer"]) for one in cases.adamw(Namespace(elements=28))}
    assert len(both) == 2 * len(cases.ADAMW) - 1  # the chain through XLA only on one array
    assert {one["model"] for one in cases.adamw(TINY)} == {"one_leaf"}


def test_a_layer_is_what_is_between_two_stacks(monkeypatch):
    monkeypatch.setattr("experiments.layers.medians_ms", lambda runs: [3.0, 7.0])
    sizes = Sizes(32, 16, 1, 16)
    stacks = {depth: in_jax.prepare(sizes, depth, in_jax.PRESETS["BF16"]) for depth in (1, 2)}
    layer = _marginal("BF16", measure(stacks))
    assert layer["ms"] == layer["forward_ms"] == 4.0
    w = in_jax.abstract_weights(sizes)
    function, arrays = in_jax.operators(sizes, in_jax.PRESETS["BF16"])["forward"]
    assert layer["saved_bytes"] == in_jax.saved_bytes(function, w, *arrays)


def test_what_is_saved_is_what_the_results_say():
    """They are of a GPU, where attention saves 0.016 U more."""
    units = records.read(RESULTS / "activation_memory.json")["units"]
    for one in in_jax.saved(SIZES, OPERATORS):
        assert one["counted"] == pytest.approx(units[one["way"]], abs=0.02)
