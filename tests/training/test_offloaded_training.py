"""A run whose moments are in host memory trains as one whose moments are on the device."""

import dataclasses

import jax
import numpy as np
import pytest
from steps import assert_equal
from train_cases import ONE, good_and_bad, random_batches, small, stepper

from coat_jax.optax.partitioned import offload
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.config import TelemetryConfig
from coat_jax.training.report.accounting import account
from coat_jax.training.report.telemetry import Telemetry

UNROLLED = {"scan": False, "layers": 1}


@pytest.fixture(autouse=True)
def all_arrays_are_large(monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 1)
    monkeypatch.setattr(offload, "PART", 1)


def step_of(offloads, sizes=ONE, model=UNROLLED, **optimizer):
    # No other test has this seed: steps are cached by their configs.
    config = small(model=model, optimizer={"offload": offloads} | optimizer, seed=77)
    return stepper(config, sizes)


def on_host(state):
    leaves = jax.tree.leaves_with_path(state)
    return [jax.tree_util.keystr(p) for p, a in leaves if a.sharding.memory_kind == "pinned_host"]


def assert_close(got, wanted, rtol=1e-4):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        # XLA may contract a * b + c in one of the programs: rarely, a code is the next one then.
        assert np.mean(~np.isclose(np.float32(a), np.float32(b), rtol=rtol, atol=1e-6)) < 0.01


@pytest.mark.costly
@pytest.mark.parametrize(
    ("sizes", "optimizer", "moved"),
    [
        ((1, 2, 2), {"round_params": "24_bits"}, ("corrections", ".mu", ".nu")),
        (ONE, {"name": "adamw", "round_params": "24_bits"}, ("corrections", "mu", "nu")),
        ((1, 4, 1), {"release_gradients": True}, (".codes",)),
    ],
    ids=str,
)
def test_losses_and_parameters_are_the_same(sizes, optimizer, moved):
    bf16 = "round_params" in optimizer
    model = UNROLLED | ({"param_dtype": "bfloat16"} if bf16 else {})
    (plain, before), (hosted, after) = (
        step_of(offloads, sizes, model, **optimizer).run(random_batches(3))
        for offloads in (False, True)
    )
    assert on_host(plain) == []
    for name in moved:
        assert any(name in path for path in on_host(hosted))
    assert not any("params" in path.split("moments")[0] for path in on_host(hosted))
    # Of BF16 parameters a contraction may change the last place.
    losses = ([report.loss for report in reports] for reports in (after, before))
    np.testing.assert_allclose(*losses, rtol=1e-3 if bf16 else 1e-6)
    assert_close(hosted.params, plain.params, rtol=2**-6 if bf16 else 1e-4)


def test_a_step_that_is_not_finite_changes_nothing():
    step = step_of(True)
    good, bad = good_and_bad()
    before, _ = step.run([good])
    kept = jax.tree.map(np.array, before.moments)
    after, (report,) = step.run([bad], before)
    assert report.skipped == 1
    assert_equal(after.moments, kept)


@pytest.mark.parametrize("begins", [False, True])
def test_a_run_may_resume_with_moments_in_the_other_memory(begins, tmp_path):
    first, second = step_of(begins), step_of(not begins)
    batches = random_batches(2)
    with Checkpoints(tmp_path) as checkpoints:
        state, _ = first.run(batches[:1])
        checkpoints.save(1, state, {})
        state, through = first.run(batches[1:], state)  # overwrites what is being saved
        restored = checkpoints.restore(second.abstract).state
    assert bool(on_host(restored)) != begins
    end, resumed = second.run(batches[1:], restored)
    np.testing.assert_allclose(resumed[-1].loss, through[-1].loss, rtol=1e-6)
    assert_close(end, state)


def test_the_account_tells_both_memories_apart():
    plain, hosted = (
        account(step.config, step.abstract, step.program, batch_parts=1, device=jax.devices()[0])
        for step in map(step_of, (False, True))
    )
    assert plain.on_host == 0 < hosted.on_host
    assert hosted.optimizer + hosted.on_host == plain.optimizer
    assert hosted.on_host > 0.8 * plain.optimizer


def test_telemetry_reads_moments_in_host_memory():
    step = step_of(True)
    config = dataclasses.replace(step.config, telemetry=TelemetryConfig(every=1))
    with jax.set_mesh(step.mesh):
        telemetry = Telemetry(config, step.setup.graph, step.abstract, step.mesh)
        state, (batch,) = step.state(), random_batches(1)
        found = telemetry.measure(1, state, step.place(batch))
    assert any(name.endswith("/nu/k") for name in found)
