"""The loss study: which runs are compared, and one run of it."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import coat_jax as coat
from coat_jax import models
from coat_jax.errors import UserError
from coat_jax.training.cluster.mesh import make_mesh
from coat_jax.training.config import MeshConfig
from experiments.loss_study import arms, training
from experiments.loss_study import text as texts
from experiments.loss_study.arm import precisions_of
from experiments.loss_study.arms import ARMS
from experiments.loss_study.conditions import (
    GONE,
    VERSION,
    VERSIONS,
    baselines_of,
    conditions_of,
    of_today,
    version_of,
)
from experiments.loss_study.routes import routes_of
from experiments.loss_study.rows import placed_rows, row_order
from experiments.loss_study.show import show
from experiments.loss_study.study import STUDY, prepare, rows_of
from experiments.row_files import Row
from experiments.study.rows import keep
from experiments.study.study import Stopped


@pytest.fixture
def measured(call_of):
    """A row of a run that has ended with this loss."""

    def row(name: str, seed: int, loss: float = 2.0, *words: object) -> Row:
        (named,) = rows_of(call_of(STUDY, "--size", "tiny", *words), name, [seed], "a text")
        forwards = {forward: [loss] for forward in ("own", "bf16", "coat")}
        found = {"losses": [loss] * 20, "skipped": 0, "held_out": forwards, "seconds": {}}
        return named | found | {"parents": {"date": "2026-01-01"}}

    return row


def test_a_row_of_earlier_code_has_the_version_and_the_definition_of_today(measured):
    row = measured("coat", 0)
    without = {n: v for n, v in row["definition"].items() if not n.startswith("start")}
    older = row | {"definition": without | GONE, "code": next(iter(VERSIONS))}
    del older["version"]
    assert of_today(older) == row | {"version": 1, "code": older["code"]}
    shaken = row | {"definition": row["definition"] | {"shaken": 1}}
    assert of_today(shaken)["definition"]["shaken"] == 1


def test_runs_that_save_what_attention_takes_have_a_version_of_their_own():
    versions = {name: version_of(ARMS[name]) for name in ("coat", "coat_lean", "muon_coat_lean")}
    assert versions == {"coat": VERSION, "coat_lean": VERSION + 1, "muon_coat_lean": VERSION + 1}


def test_an_arm_of_an_earlier_version_has_a_name_of_its_own(measured):
    old = [measured("coat", seed) | {"version": 4} for seed in (0, 1)]
    of_other_code = measured("coat", 1) | {"code": "other"}
    rows = [measured("bf16", 0), measured("coat", 0), of_other_code, *old]
    (group,) = conditions_of(rows).values()
    names = ["bf16", "coat", "coat", "coat@4", "coat@4"]
    assert sorted(row["arm"] for row in group) == names
    assert baselines_of(group) == {"bf16"}
    other = measured("coat", 2) | {"definition": measured("paper", 2)["definition"]}
    with pytest.raises(UserError, match="The arm coat was defined in two ways"):
        conditions_of([*rows, other])


def test_arms_are_compared_under_equal_settings_and_with_the_same_optimizer(measured):
    names = ("bf16", "moments", "muon", "muon_ulp", "fp8_muon")
    rows = [measured(name, 0) for name in names]
    rows += [measured("bf16", 0, 2.0, "--steps", 21)]
    groups = [{row["arm"] for row in group} for group in conditions_of(rows).values()]
    assert groups == [{"bf16", "moments"}, {"muon", "muon_ulp", "fp8_muon"}, {"bf16"}]


def test_tables_and_pictures_show_every_arm(measured, capsys, tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [measured("bf16", seed) for seed in (0, 1)] + [measured("bf16_ulp", 0, 2.0004)]
    # In COAT, seed 0 ends twice 4 % above BF16, and seed 1 once 1 %: several count as one.
    for seed, above in ((0, 0.04), (0, 0.04), (1, 0.01)):
        rows.append(measured("coat", seed, 2.0 * np.exp(above)))
    show(rows, tmp_path)
    printed = capsys.readouterr().out
    for words in ("+2.495 % ± ", "bf16_ulp (baseline)", "Noise floor: the training losses"):
        assert words in printed
    assert len(list(tmp_path.glob("loss_study_tiny_*.png"))) == 1
    show(rows[:2], tmp_path)
    assert "another arm" in capsys.readouterr().out


def test_a_plan_without_text_supposes_that_of_runs_with_the_same_settings(measured, call_of):
    call = call_of(STUDY, "--size", "tiny", "--steps", 21)
    longer = measured("coat", 1, 2.0, "--steps", 21) | {"text": "more text"}
    rows = [*(measured("bf16", seed) for seed in range(4)), longer]
    assert prepare(call, rows, True) == "more text"
    assert prepare(call, rows[:4], True) == "a text"
    assert prepare(call, [], True) == ""


# --- Running ----------------------------------------------------------------------------------


def test_a_run_reads_no_row_twice_and_refuses_more_than_one_epoch():
    settings = dataclasses.replace(arms.SIZES["tiny"].settings, steps=10, batch=4)
    tokens = np.zeros(40 * settings.sequence + 1, np.uint16)
    order = row_order(tokens, settings, seed=0)
    assert sorted(order) == list(range(40))
    assert not np.array_equal(order, row_order(tokens, settings, seed=1))
    with pytest.raises(UserError, match=r"40 rows of 64 tokens and the text has 39"):
        row_order(tokens[:-1], settings, seed=0)


def test_a_start_is_a_precision_of_the_first_steps():
    started = precisions_of(arms.ARMS["coat_after_bf16"], 400)
    assert started == {0: coat.BF16, 100: coat.COAT}
    assert precisions_of(arms.ARMS["coat"], 400) == {0: coat.COAT}


@pytest.mark.usefixtures("small")
def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(
    job_of, after, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (whole,) = training.measure(job_of(STUDY, "bf16"))
    batches: list[np.ndarray] = []  # the rows of each step that is trained

    def noted(tokens: Any, rows: np.ndarray, *arguments: Any) -> Any:
        batches.append(rows)
        return placed_rows(tokens, rows, *arguments)

    monkeypatch.setattr(training, "placed_rows", noted)
    with pytest.raises(Stopped):
        training.measure(job_of(STUDY, "bf16", folder="cut", asked=after(2)))
    assert len(batches) == 2
    (continued,) = training.measure(job_of(STUDY, "bf16", folder="cut"))
    tokens = texts.load(work / "text", "train", texts.BYTES)
    order = row_order(tokens, arms.SIZES["small"].settings, 0)
    np.testing.assert_array_equal(np.concatenate(batches), order)
    assert continued["losses"] == whole["losses"]
    assert continued["held_out"] == whole["held_out"]
    assert len(whole["losses"]) == 4
    assert whole["held_out"]["own"] == whole["held_out"]["bf16"]
    keep(tmp_path / "rows.json", [whole])
    assert STUDY.read([tmp_path / "rows.json"]) == [whole]


def test_held_out_losses_are_named_by_their_precision(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "losses_in", lambda precision, *arguments: [precision])
    size = arms.SIZES["tiny"]
    config = training.train_config(arms.ARMS["coat_lean"], size, size.settings, 0)
    found: Any = training.held_out({}, config, None, [])
    assert found == {"own": [coat.COAT_LEAN], "bf16": [coat.BF16], "coat": [coat.COAT_PAPER]}


def test_choices_of_experts_are_compared_with_those_in_bf16():
    size = arms.SIZES["tiny"]
    model = dataclasses.replace(size.model, experts=models.Experts(count=8, chosen=2))
    size = dataclasses.replace(size, model=model)
    mesh, found = make_mesh(MeshConfig(), jax.devices()[:1]), {}
    tokens = np.random.default_rng(0).integers(0, 256, 5 * 64).astype(np.uint16)
    for name in ("bf16", "coat_rounded_forward"):
        config = training.train_config(arms.ARMS[name], size, size.settings, 0)
        with jax.set_mesh(mesh):
            params = training.prepare(config, mesh).new_state().params
            batch = placed_rows(tokens, np.arange(4, dtype=np.int32), 64, 1, mesh)
            found[name] = routes_of(params, config, mesh, [batch])
    assert found["bf16"]["changed_choices"] == [0]
    assert 0 < found["coat_rounded_forward"]["changed_choices"][0] < 0.2
    assert 1 < found["bf16"]["largest_load"][0] < 4


@pytest.mark.costly
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("arm", ["coat_after_bf16", "params_24_bits_stochastic", "fp8_muon"])
def test_arms_begin_with_the_same_parameters_and_train(arm: str, job_of):
    """Leaves of this size have FP32 moments, so what is left of the differences is small."""

    @functools.cache
    def trained(name: str) -> training.Trained:
        return training.train(job_of(STUDY, name, folder=name))

    def begins(name: str) -> list[np.ndarray]:
        run, job = trained(name), job_of(STUDY, name, folder=name)
        told = training.told_by(job)
        optimizer = training.optimizer_of(told.arm, run.config)
        state = training.first_state(
            training.prepare(run.config, run.mesh, optimizer=optimizer), told
        )
        return jax.tree.leaves(state.params)

    for ours, exact in zip(begins(arm), begins("bf16"), strict=True):
        np.testing.assert_array_equal(ours, exact.astype(ours.dtype))
    base = "muon" if arm == "fp8_muon" else "bf16"
    np.testing.assert_allclose(trained(arm).losses, trained(base).losses, rtol=2e-3)


def test_perturbed_parameters_differ_by_one_unit_in_the_last_place():
    params = {"a": jnp.linspace(-1.0, 2.0, 64), "b": jnp.ones([8])}
    moved = training.perturbed(params, seed=0)
    for name, leaf in params.items():
        old, new = (np.asarray(x).view(np.int32) for x in (leaf, moved[name]))
        assert set(np.abs(new - old)) == {1}
        assert {*np.sign(np.asarray(moved[name]) - np.asarray(leaf))} == {-1, 1}
