"""Training with experts: biases are state, and steps do not depend on microbatches or resumes."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import assert_equal
from train_cases import SMALL, good_and_bad, random_batches, small, stepper

import coat_jax as coat
from coat_jax.errors import UserError
from coat_jax.models import Experts
from coat_jax.training.config import MeshConfig
from coat_jax.training.loop import train
from coat_jax.training.setup import _differences

EXPERTS = Experts(count=4, chosen=2, aux_loss=0.1, z_loss=0.01, bias_rate=0.02)
MODEL = {"dtype": jnp.float32, "layers": 1, "experts": EXPERTS}
CONFIG = small(model=MODEL)


def bias_of(state):
    return np.asarray(state.params["layers"]["mlp"]["bias"][...])


def test_biases_even_out_the_loads_and_both_are_logged():
    even = dataclasses.replace(EXPERTS, aux_loss=0.0, count=16, bias_rate=2e-3)
    config = small(model=MODEL | {"experts": even}, optimizer={"learning_rate": 1e-5})
    _, reports = stepper(config).run(random_batches(1) * 40)
    loads = [float(report.metrics["load_imbalance"]) for report in reports]
    assert np.mean(loads[:5]) > 1.5
    assert np.mean(loads[-5:]) < 1.2
    assert {"aux_loss", "router_z_loss"} < reports[0].metrics.keys()


def test_a_step_that_is_skipped_leaves_the_biases():
    good, bad = good_and_bad()
    before, _ = stepper(CONFIG).run([good])
    kept = bias_of(before)
    assert set(np.round(np.abs(kept), 6).ravel()) <= {0.0, np.float32(0.02)}
    assert kept.any()
    after, (report,) = stepper(CONFIG).run([bad], before)
    assert report.skipped == 1
    np.testing.assert_array_equal(bias_of(after), kept)


@pytest.mark.costly
def test_a_batch_in_parts_is_the_batch():
    batches = random_batches(3)
    for batch in batches:
        batch.labels[4:8] = -100
    config = small(model=MODEL, optimizer={"name": "adamw"})
    whole, reports = stepper(config).run(batches)
    parts = dataclasses.replace(config, gradient_accumulation_steps=4)
    in_parts, found = stepper(parts).run(batches)
    for one, other in zip(reports, found, strict=True):
        np.testing.assert_allclose(one.loss, other.loss, rtol=1e-5)
        np.testing.assert_allclose(one.gradient_norm, other.gradient_norm, rtol=1e-4)
        for name, number in one.metrics.items():
            np.testing.assert_allclose(other.metrics[name], number, rtol=1e-4)
    np.testing.assert_array_equal(bias_of(in_parts), bias_of(whole))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("precision", "optimizer", "tolerance"),
    [
        ("bf16", {}, 1e-5),
        # What layers save is rounded with other random bits.
        ("coat", {"transformation": coat.optax.fp8_muon, "learning_rate": 1e-3}, 1e-3),
    ],
    ids=["AdamW", "Muon"],
)
def test_losses_do_not_depend_on_the_mesh(precision, optimizer, tolerance):
    """With moments in 8 bits, which are sharded as the experts are."""
    config = small(model=MODEL | {"precision": precision}, optimizer=optimizer)
    batches = random_batches(3)
    (alone, reports), *others = (
        stepper(config, sizes).run(batches) for sizes in ((1, 1, 1), (2, 2, 2), (1, 2, 2, 2))
    )
    for (spread, found), parts in zip(others, (4, 8), strict=True):
        for one, other in zip(reports, found, strict=True):
            np.testing.assert_allclose(one.loss, other.loss, rtol=tolerance)
        np.testing.assert_array_equal(bias_of(spread), bias_of(alone))
        gate = spread.params["layers"]["mlp"]["gate"][...]
        moments = [m for m in jax.tree.leaves(spread.moments) if m.size == gate.size]
        assert any(m.dtype == jnp.int8 for m in moments)
        for one in (gate, *moments):
            assert one.addressable_shards[0].data.size == gate.size // parts


def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(tmp_path):
    config = dataclasses.replace(
        small(model=MODEL),
        out=str(tmp_path),
        mesh=MeshConfig(data=-1, fsdp=1),
        total_steps=4,
        checkpoint=dataclasses.replace(SMALL.checkpoint, every=2),
        evaluation=dataclasses.replace(SMALL.evaluation, every=4, batches=1),
    )
    train(config)
    before = records_of(tmp_path)
    assert before[-1]["held_out_aux_loss"] > 0
    shutil.rmtree(tmp_path / "checkpoints/4")
    experts = dataclasses.replace(EXPERTS, bias_rate=0.01)
    with pytest.raises(UserError, match=r"model.experts.bias_rate was 0\.02, now 0\.01"):
        train(dataclasses.replace(config, model=dataclasses.replace(config.model, experts=experts)))
    train(config)
    for one, other in zip(before, records_of(tmp_path), strict=True):
        for name in ("loss", "aux_loss", "load_imbalance", "held_out_loss"):
            assert one.get(name) == other.get(name)


def records_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_penalties_are_those_of_the_run_and_not_of_the_model_that_it_begins_from():
    other = dataclasses.replace(EXPERTS, aux_loss=0.0, z_loss=0.5)
    ours, theirs = (dataclasses.replace(CONFIG.model, experts=e) for e in (EXPERTS, other))
    assert _differences(theirs, ours) == []
    more = dataclasses.replace(theirs, experts=dataclasses.replace(other, count=5))
    assert _differences(more, ours) == ["experts.count is 5 there and 4 in the config"]
    assert "experts is None there" in _differences(
        dataclasses.replace(ours, experts=None), ours
    )[0]  # fmt: skip


def test_the_penalties_need_the_gradients_of_all_layers():
    with pytest.raises(UserError, match="release_gradients=True is for models without experts"):
        small(model=MODEL | {"scan": False}, optimizer={"release_gradients": True})


def test_a_list_of_layers_takes_the_same_steps():
    config = small(model=MODEL | {"scan": False, "layers": 2})
    stacked = small(model=MODEL | {"layers": 2})
    runs = [stepper(each) for each in (config, stacked)]
    states = [run.run(random_batches(1), _zeros(run)) for run in runs]
    (one, (report,)), (other, (wanted,)) = states
    np.testing.assert_allclose(report.loss, wanted.loss, rtol=1e-6)
    biases = [one.params["layers"][i]["mlp"]["bias"][...] for i in range(2)]
    assert_equal(np.stack(biases), bias_of(other))


def _zeros(run):
    state = run.state()
    return state._replace(params=jax.tree.map(lambda p: p * 0, state.params))
