"""The loss study: what names a result, what is measured, and one run of it."""

import dataclasses
import functools
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_study import After, job

import coat_jax as coat
from coat_jax.errors import UserError
from experiments.loss_study import arms, measure, plot, queue, results, table
from experiments.loss_study import run as one_run
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Arm, Size, precisions_of
from experiments.loss_study.rows import placed_rows, row_order


def named(name: str = "coat", **changes: object) -> dict:
    size = arms.SIZES["tiny"]
    arguments = {"name": name, "arm": arms.ARMS[name], "size_name": "tiny", "size": size}
    arguments |= {"seed": 0, "settings": size.settings, "text": "a text"} | changes
    return results.row_of(**arguments)


def test_key_is_that_of_all_that_decides_a_result():
    size = arms.SIZES["tiny"]
    wider = dataclasses.replace(size, model=dataclasses.replace(size.model, ffn=512))
    longer = dataclasses.replace(size.settings, steps=21)
    others = [
        named("bf16"),
        named(seed=1),
        named(text="another"),
        named(settings=longer),
        named(size=wider),
    ]
    assert len({row["key"] for row in [named(), *others]}) == 6
    assert named("coat", arm=arms.ARMS["moments"])["key"] == named("moments")["key"]


def test_every_arm_is_another_run():
    keys = {named(name)["key"] for name in arms.ARMS}
    assert len(keys) == len(arms.ARMS)


def measured(name: str, seed: int, loss: float = 2.0) -> dict:
    return named(name, seed=seed) | {
        "losses": [loss] * 20,
        "held_out": {forward: [loss] for forward in ("own", "bf16", "coat")},
        "parents": {"date": "2026-01-01"},
    }


def test_merging_adds_what_is_new_and_keeps_what_was_measured(tmp_path: Path):
    committed, first, second = (tmp_path / name for name in ("all.json", "a.json", "b.json"))
    results.write(first, [measured("bf16", 0), measured("coat", 0)])
    results.write(second, [measured("coat", 0, loss=9.0), measured("coat", 1)])
    rows = results.merge(committed, [first, second])
    assert [(row["arm"], row["seed"]) for row in rows] == [("bf16", 0), ("coat", 0), ("coat", 1)]
    assert {row["losses"][0] for row in rows} == {2.0}
    assert results.merge(committed, [second, first]) == rows
    assert results.read([committed, tmp_path / "missing.json"]) == rows


def call(tmp_path: Path, **changes: object) -> measure.Call:
    size = arms.SIZES["tiny"]
    arguments: dict = {
        "arms": {name: arms.ARMS[name] for name in ("bf16", "coat")},
        "size_name": "tiny",
        "size": size,
        "seeds": [0, 1],
        "settings": size.settings,
        "work": tmp_path / "work",
        "known": tmp_path / "known.json",
        "out": tmp_path / "out.json",
        "side_by_side": 2,
        "seconds": 60.0,
        "text": 10**9,
        "text_from": None,
    }
    return measure.Call(**(arguments | changes))


def test_runs_with_a_result_are_not_measured_again(tmp_path: Path):
    one = call(tmp_path)
    every = measure.missing(one, "a text")
    assert [work.name for work in every] == ["bf16/0", "coat/0", "bf16/1", "coat/1"]
    results.write(one.known, [measured("bf16", 0)])
    measure.keep(one.out, measured("coat", 1))
    left = measure.missing(one, "a text")
    assert [work.name for work in left] == ["coat/0", "bf16/1"]
    assert len(measure.missing(one, "another text")) == 4


def test_a_plan_without_text_supposes_that_of_runs_with_the_same_settings(tmp_path: Path, capsys):
    longer = dataclasses.replace(arms.SIZES["tiny"].settings, steps=21)
    of_other_settings = [measured(name, seed) for name in ("bf16", "coat") for seed in (0, 1)]
    row = measured("coat", 1) | named("coat", seed=1, settings=longer, text="more text")
    one = call(tmp_path, settings=longer)
    results.write(one.known, [*of_other_settings, row])
    measure.plan(one)
    assert "3 of 4 runs have no row yet: bf16/0, coat/0, bf16/1." in capsys.readouterr().out
    measure.plan(call(tmp_path))
    assert "nothing to do" in capsys.readouterr().out


def test_runs_are_made_again_if_the_version_rises_but_not_for_other_code(tmp_path, monkeypatch):
    one = call(tmp_path, seeds=[0])
    (first, *_) = results.VERSIONS
    rows = [measured("bf16", 0) | {"code": "other"}, measured("coat", 0) | {"code": first}]
    for row in rows:
        del row["version"]
    results.write(one.known, rows)
    assert [work.name for work in measure.missing(one, "a text")] == ["coat/0"]
    monkeypatch.setattr(results, "VERSION", results.VERSION + 1)
    assert [work.name for work in measure.missing(one, "a text")] == ["bf16/0", "coat/0"]


def test_an_arm_of_an_earlier_version_has_a_name_of_its_own():
    old = [measured("coat", seed) | {"version": 4, "key": f"old {seed}"} for seed in (0, 1)]
    of_other_code = measured("coat", 1) | {"code": "other"}
    rows = [measured("bf16", 0), measured("coat", 0), of_other_code, *old]
    (group,) = results.conditions_of(rows).values()
    names = ["bf16", "coat", "coat", "coat@4", "coat@4"]
    assert sorted(row["arm"] for row in group) == names
    assert results.baselines_of(group) == {"bf16"}


def test_an_arm_that_was_renamed_has_the_name_of_today(tmp_path: Path):
    """Its definition says which arm it is, also without fields that arms did not have then."""
    file = tmp_path / results.FILE
    before = measured("coat_rounded_forward", 0) | {"arm": "coat"}
    definition = {k: v for k, v in before["definition"].items() if not k.startswith("start")}
    unknown = measured("moments", 0) | {"arm": "lost", "definition": {"precision": "of old"}}
    results.write(file, [before | {"definition": definition}, unknown])
    assert sorted(row["arm"] for row in results.read([file])) == ["coat_rounded_forward", "lost"]


def test_rows_that_have_hashes_of_code_in_their_definition_are_those_of_today(tmp_path: Path):
    row = measured("coat", 0)
    row["definition"] |= {results.AFTER_TRAINING: results.FIRST_RECIPES[0]}
    row["definition"] |= {"tuned": {"steps": 3, "code": "0123"}, "forward": "4567"}
    results.write(tmp_path / results.FILE, [row])
    (found,) = results.read([tmp_path / results.FILE])
    assert found["definition"][results.AFTER_TRAINING] == results.RECIPES
    assert found["definition"]["tuned"] == {"steps": 3}
    assert "forward" not in found["definition"]


@pytest.mark.parametrize(
    ("name", "today"),
    [
        ("coat", "coat_nearest"),
        ("coat_after_bf16", "coat_after_bf16_nearest"),
        ("coat_rounded_forward", "coat_rounded_forward"),
        ("products", "products"),
    ],
)
def test_a_row_that_names_no_rounding_saved_to_nearest(tmp_path: Path, name: str, today: str):
    row = measured(name, 0)
    for field in ("precision", "start"):
        if row["definition"][field] is not None:
            del row["definition"][field]["stochastic"]
            del row["definition"][field]["stochastic_backward"]
    results.write(tmp_path / results.FILE, [row])
    assert [row["arm"] for row in results.read([tmp_path / results.FILE])] == [today]


def test_a_start_is_a_precision_of_the_first_steps():
    started = precisions_of(arms.ARMS["coat_after_bf16"], 400)
    assert started == {0: coat.BF16, 100: coat.COAT}
    assert precisions_of(arms.ARMS["coat"], 400) == {0: coat.COAT}


def test_arms_are_compared_under_equal_settings_only():
    rows = [measured("bf16", 0), measured("moments", 0), measured("moments_b2_999", 0)]
    groups = results.conditions_of(rows)
    assert sorted(len(group) for group in groups.values()) == [1, 2]


def test_muon_is_compared_with_its_own_baselines():
    rows = [measured(name, 0) for name in ("bf16", "moments", "muon", "muon_ulp", "fp8_muon")]
    groups = results.conditions_of(rows)
    (of_muon,) = (group for name, group in groups.items() if name.endswith("Muon"))
    assert {row["arm"] for row in of_muon} == {"muon", "muon_ulp", "fp8_muon"}
    assert results.baselines_of(of_muon) == {"muon", "muon_ulp"}


def test_without_results_it_says_so(capsys: pytest.CaptureFixture, tmp_path: Path):
    table.show([], tmp_path)
    assert "no results yet" in capsys.readouterr().out


def test_table_and_picture_show_every_arm(capsys: pytest.CaptureFixture, tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [
        measured(name, seed, loss=2.0 + effect + 0.001 * seed)
        for name, effect in (("bf16", 0.0), ("bf16_ulp", 1e-4), ("coat", 0.01), ("moments", 2e-3))
        for seed in (0, 1)
    ]
    table.show(rows, tmp_path)
    printed = capsys.readouterr().out
    for words in ("coat", "moments", "bf16_ulp", "Noise floor: baselines", "evaluated in BF16"):
        assert words in printed
    assert len(list(tmp_path.glob("loss_study_tiny_*.png"))) == 1


def test_several_runs_of_a_seed_count_as_one_in_both_tables(capsys, tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [measured("bf16", seed) for seed in (0, 1)]
    # In COAT, seed 0 ends twice 4 % above BF16, and seed 1 once 1 %.
    for seed, above in ((0, 0.04), (0, 0.04), (1, 0.01)):
        rows.append(measured("coat", seed, loss=2.0 * np.exp(above)))
    table.show(rows, tmp_path)
    training, held_out = capsys.readouterr().out.split("Held out, against")
    assert "+2.500 %" in training
    assert held_out.count("+2.500 %") == 3  # in BF16, in COAT_PAPER, in its own precision


def test_each_conditions_have_a_picture_of_their_own(tmp_path: Path):
    pytest.importorskip("matplotlib")
    names = "bf16", "bf16_ulp", "moments", "muon", "muon_ulp", "fp8_muon"
    rows = [measured(name, seed, loss=2.0 + 0.001 * seed) for name in names for seed in (0, 1)]
    paths = plot.draw(rows, tmp_path)
    assert len(paths) == len(set(paths)) == len(results.conditions_of(rows)) == 2


# --- Running ----------------------------------------------------------------------------------


def test_a_run_reads_no_row_twice_and_refuses_more_than_one_epoch():
    settings = dataclasses.replace(arms.SIZES["tiny"].settings, steps=10, batch=4)
    tokens = np.zeros(40 * settings.sequence + 1, np.uint16)
    order = row_order(tokens, settings, seed=0)
    assert sorted(order) == list(range(40))
    assert not np.array_equal(order, row_order(tokens, settings, seed=1))
    with pytest.raises(UserError, match=r"40 rows of 64 tokens and the text has 39"):
        row_order(tokens[:-1], settings, seed=0)


WORKER = """
import json, signal, sys, time
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
folder = Path(job["folder"])
if job["arm"] == "broken":
    raise ValueError("it broke")
if job["arm"].startswith("slow"):
    time.sleep(1200)
(folder / "row.json").write_text(json.dumps({"losses": [1.0], "job": job["arm"]}))
"""


def test_rows_are_kept_as_runs_end_and_time_is_kept(tmp_path: Path, monkeypatch):
    """The time ends when the last one that finds a place has begun."""
    last = tmp_path / "runs" / "slow too" / "job.json"
    clock = SimpleNamespace(monotonic=lambda: 5.0 if last.exists() else 0.0, sleep=time.sleep)
    monkeypatch.setattr(queue, "time", clock)
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(queue, "TO_STOP", 0.0)
    works = [
        queue.Work(name, name, {"arm": name, "size": "tiny"}, {"arm": name})
        for name in ("slow", "quick", "broken", "slow too", "left")
    ]
    rows: list[dict] = []
    outcome = queue.run(
        works,
        tmp_path,
        gpus=0,
        side_by_side=2,
        seconds=4.0,
        take=rows.append,
        module="worker",
        say=lambda line: None,
    )
    assert rows == [{"arm": "quick", "losses": [1.0], "job": "quick"}]
    assert outcome.finished == ["quick"]
    assert outcome.stopped == ["slow", "slow too"]
    assert outcome.failed == {"broken": "ValueError: it broke"}
    assert outcome.left == ["left"]


@pytest.fixture(scope="module")
def trained(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Size, str], results.Row]:
    """The row of a whole run of an arm, which is trained once."""

    @functools.cache
    def row(size: Size, arm: str) -> results.Row:
        found = one_run.run(job(size, arm, corpus, tmp_path_factory.mktemp(arm)), [])
        assert found is not None
        return found

    return row


def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(
    small: Size,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Callable[[Size, str], results.Row],
):
    whole = trained(small, "bf16")
    batches: list[np.ndarray] = []  # the rows of each step that is trained

    def noted(tokens, rows, *arguments):
        batches.append(rows)
        return placed_rows(tokens, rows, *arguments)

    monkeypatch.setattr(one_run, "placed_rows", noted)
    cut = job(small, "bf16", corpus, tmp_path / "cut")
    assert one_run.run(cut, After(2)) is None
    assert len(batches) == 2
    continued = one_run.run(cut, [])
    assert continued is not None
    tokens = texts.load(corpus, "train", texts.BYTES)
    order = row_order(tokens, small.settings, cut.seed)
    np.testing.assert_array_equal(np.concatenate(batches), order)
    assert continued["losses"] == whole["losses"]
    assert continued["held_out"] == whole["held_out"]
    assert len(whole["losses"]) == 4
    assert whole["held_out"]["own"] == whole["held_out"]["bf16"]


def test_held_out_losses_are_named_by_their_precision(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(one_run, "losses_in", lambda precision, *arguments: [precision])
    size = arms.SIZES["tiny"]
    config = one_run.train_config(arms.ARMS["coat_lean"], size, size.settings, 0)
    found = one_run.held_out(None, config, None, [])
    assert found == {"own": [coat.COAT_LEAN], "bf16": [coat.BF16], "coat": [coat.COAT_PAPER]}


def test_both_kinds_of_muon_train_alike(small: Size, trained: Callable[[Size, str], results.Row]):
    """Leaves of this size stay in FP32; products in BF16 change an update by a few percent."""
    losses = {arm: np.array(trained(small, arm)["losses"]) for arm in ("bf16", "muon", "fp8_muon")}
    np.testing.assert_allclose(losses["fp8_muon"], losses["muon"], rtol=2e-3)
    assert np.max(np.abs(losses["muon"] - losses["bf16"])) > 0.01


@pytest.mark.costly
@pytest.mark.parametrize("arm", ["params_bf16_stochastic", "params_24_bits"])
def test_parameters_in_bf16_begin_as_those_of_the_other_arms_rounded(
    small: Size,
    corpus: Path,
    tmp_path: Path,
    trained: Callable[[Size, str], results.Row],
    arm: str,
):
    import jax
    import jax.numpy as jnp

    def begins(name: str) -> list[np.ndarray]:
        its = job(small, name, corpus, tmp_path)
        config = one_run.train_config(arms.ARMS[name], small, small.settings, its.seed)
        mesh = one_run.make_mesh(one_run.MeshConfig(), jax.devices()[:1])
        optimizer = one_run.optimizer_of(arms.ARMS[name], config)
        state = one_run.first_state(one_run.prepare(config, mesh, optimizer=optimizer), its)
        return jax.tree.leaves(state.params)

    for ours, exact in zip(begins(arm), begins("bf16"), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, exact.astype(jnp.bfloat16))
    losses = [trained(small, name)["losses"] for name in (arm, "bf16")]
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_perturbed_parameters_differ_by_one_unit_in_the_last_place():
    import jax.numpy as jnp

    params = {"a": jnp.linspace(-1.0, 2.0, 64), "b": jnp.ones([8])}
    moved = one_run.perturbed(params, seed=0)
    for name, leaf in params.items():
        old, new = (np.asarray(x).view(np.int32) for x in (leaf, moved[name]))
        assert set(np.abs(new - old)) == {1}
        assert {*np.sign(np.asarray(moved[name]) - np.asarray(leaf))} == {-1, 1}


def test_shaken_parameters_differ_by_one_percent_and_from_each_other():
    import jax.numpy as jnp

    params = {"a": jnp.linspace(1.0, 2.0, 4096), "b": jnp.ones([4096], jnp.bfloat16)}
    one, two = (one_run.shaken(params, 0, which) for which in (1, 2))
    for name, leaf in params.items():
        shares = [np.asarray(x[name] / leaf, np.float32) - 1 for x in (one, two)]
        assert np.std(shares, axis=1) == pytest.approx([one_run.SHAKE] * 2, rel=0.1)
        assert abs(np.corrcoef(shares)[0, 1]) < 0.1
        assert one[name].dtype == leaf.dtype
    again = one_run.shaken(params, 0, 1)
    np.testing.assert_array_equal(one["a"], again["a"])


def test_separate_formats_in_fp32_are_adam():
    import jax.numpy as jnp
    import optax

    from experiments.loss_study.moments import Separately, scale_by_adam

    params = {"w": jnp.linspace(-1.0, 1.0, 256).reshape(2, 128)}
    ours, theirs = scale_by_adam(0.9, 0.95, 1e-8, Separately()), optax.scale_by_adam(0.9, 0.95)
    mine, state = ours.init(params), theirs.init(params)
    for scale in (1.0, -0.3, 2.0):
        grads = {"w": scale * jnp.cos(params["w"] * 7)}
        found, mine = ours.update(grads, mine)
        expected, state = theirs.update(grads, state)
        # A few operations in another order, each right within 2^-24.
        np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-5)


def test_each_moment_is_stored_in_the_format_of_its_own():
    import jax.numpy as jnp

    from experiments.loss_study.moments import Expanded, Separately, scale_by_adam

    form = Expanded(dataclasses.replace(arms.EXPANDED, min_size=0))
    params = {"w": jnp.linspace(-1.0, 1.0, 256).reshape(2, 128)}
    grads = {"w": jnp.sin(params["w"] * 50)}
    exact = scale_by_adam(0.9, 0.95, 1e-8, Separately())
    _, plain = exact.update(grads, exact.init(params))
    tx = scale_by_adam(0.9, 0.95, 1e-8, Separately(first=form))
    _, state = tx.update(grads, tx.init(params))
    assert not np.array_equal(state.mu["w"], plain.mu["w"])
    np.testing.assert_array_equal(state.nu["w"], plain.nu["w"])


def test_arms_of_one_name_differ_from_the_default():
    for name, arm in arms.ARMS.items():
        assert name == "bf16" or dataclasses.replace(arm, baseline=True) != Arm(baseline=True)
