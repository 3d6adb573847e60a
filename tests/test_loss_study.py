"""The bench that measures what FP8 costs in loss: its statistics, its text, its bookkeeping."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from coat_jax.errors import UserError
from experiments import (
    loss_study,
    loss_study_measure,
    loss_study_queue,
    loss_study_results,
    loss_study_run,
    loss_study_statistics,
    loss_study_table,
    loss_study_text,
)
from experiments.loss_study_arms import Arm, Size

STEPS, NOISE = 200, 5e-4


# --- Statistics -------------------------------------------------------------------------------


def synthetic(effects: dict[str, float], *, seeds: int, random: np.random.Generator) -> list[dict]:
    """Runs whose log loss is that of their seed, the arm's effect, and the luck of the run."""
    rows = []
    for seed in range(seeds):
        of_batches = 1.0 + 0.05 * random.standard_normal(STEPS) + 0.1 * random.standard_normal()
        for arm, effect in effects.items():
            luck = NOISE * random.standard_normal()
            losses = np.exp(of_batches + effect + luck + 1e-3 * random.standard_normal(STEPS))
            held_out = [float(np.exp(1.2 + effect + luck))] * 4
            rows.append({
                "arm": arm, "seed": seed, "losses": losses.tolist(),
                "held_out": dict.fromkeys(("own", "bf16", "coat"), held_out),
            })  # fmt: skip
    return rows


EFFECTS = {"base": 0.0, "ulp": 0.0, "coat": 3e-3, "harmless": 0.0}


def test_intervals_hold_the_true_effect_as_often_as_they_say():
    random = np.random.default_rng(0)
    held, trials = 0, 300
    for _ in range(trials):
        rows = synthetic(EFFECTS, seeds=3, random=random)
        found = loss_study_statistics.compare(rows, ["base", "ulp"]).effects
        held += sum(abs(found[arm].mean - EFFECTS[arm]) <= found[arm].half for arm in found)
    # 600 intervals of 95 %, two in a trial not independent: at most 5 standard deviations off.
    assert 0.90 <= held / (2 * trials) <= 0.99


def test_an_effect_six_times_the_noise_is_found_and_none_where_there_is_none():
    rows = synthetic(EFFECTS, seeds=3, random=np.random.default_rng(1))
    result = loss_study_statistics.compare(rows, ["base", "ulp"])
    assert result.effects["coat"].holm < 0.01
    assert result.effects["harmless"].holm > 0.05
    assert result.effects["coat"].seeds == 3
    assert result.baselines == 2
    assert result.noise.floor_freedom == 3
    assert abs(result.effects["coat"].mean) > result.noise.band(3, 2)


def test_noise_is_that_of_the_runs_not_of_the_seeds():
    rows = synthetic(EFFECTS, seeds=200, random=np.random.default_rng(2))
    noise = loss_study_statistics.compare(rows, ["base", "ulp"], loss_study_statistics.final).noise
    # A standard deviation of n numbers is right within 1 / sqrt(2 n): here 3 % and 5 %.
    of_run = np.hypot(NOISE, 1e-3 / np.sqrt(0.1 * STEPS))
    assert noise.run == pytest.approx(of_run, rel=0.15)
    assert noise.floor == pytest.approx(of_run, rel=0.25)


def test_runs_that_are_missing_and_seeds_without_baseline_are_no_obstacle():
    rows = synthetic(EFFECTS, seeds=4, random=np.random.default_rng(3))
    whole = loss_study_statistics.compare(rows, ["base", "ulp"]).effects["coat"]
    rows = [row for row in rows if (row["arm"], row["seed"]) not in {("coat", 1), ("ulp", 2)}]
    rows = [row for row in rows if row["seed"] != 3 or row["arm"] not in {"base", "ulp"}]
    part = loss_study_statistics.compare(rows, ["base", "ulp"]).effects["coat"]
    assert part.seeds == 2
    assert part.mean == pytest.approx(whole.mean, abs=4 * NOISE)


def test_one_run_against_one_baseline_has_no_interval():
    rows = synthetic({"base": 0.0, "coat": 1e-3}, seeds=1, random=np.random.default_rng(4))
    result = loss_study_statistics.compare(rows, ["base"])
    effect = result.effects["coat"]
    assert np.isnan([effect.half, effect.own, effect.p, effect.holm]).all()
    assert np.isnan(result.noise.band(1, 1))


def test_block_error_is_that_of_independent_numbers_and_sees_slow_drift():
    random = np.random.default_rng(5)
    white = random.standard_normal((400, 800))
    errors = [loss_study_statistics.block_error(row) for row in white]
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(1 / np.sqrt(800), rel=0.1)
    slow = np.repeat(random.standard_normal(80), 10)  # ten equal neighbours
    assert loss_study_statistics.block_error(slow) > 2 / np.sqrt(800)


def test_holm_corrects_the_smallest_most_and_keeps_the_order():
    # The example of Holm's procedure: 0.01 * 4, 0.02 * 3, max(0.03 * 2, before), max(0.04, before).
    corrected = loss_study_statistics.holm([0.03, 0.01, 0.04, 0.02])
    assert corrected == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert loss_study_statistics.holm([0.6, float("nan"), 0.9])[0] == 1.0


def test_gap_of_an_arm_is_its_effect_and_of_a_baseline_about_nothing():
    rows = synthetic(EFFECTS, seeds=3, random=np.random.default_rng(6))
    coat = loss_study_statistics.gap(rows, "coat", ["base", "ulp"])
    assert coat.shape == (STEPS,)
    assert coat.mean() == pytest.approx(3e-3, abs=4 * NOISE)
    assert abs(loss_study_statistics.gap(rows, "ulp", ["base", "ulp"]).mean()) < 4 * NOISE


# --- Text -------------------------------------------------------------------------------------


def prose(seed: int, words: int = 600) -> bytes:
    random = np.random.default_rng(seed)
    letters = random.integers(97, 123, size=(words, 6)).astype(np.uint8)
    return b" ".join(bytes(word) for word in letters)


def test_copies_versions_and_parts_are_near_duplicates():
    original = prose(0)
    edited = original.replace(b"a", b"A", 20)
    reflowed = original.replace(b" ", b"\n    ")
    part = original[1000:3000]
    mostly = original[:2500] + prose(1)[:1000]
    texts = [original, original, edited, reflowed, part, mostly, prose(2), original + prose(3)]
    new = loss_study_text.distinct(texts)
    # The last one is half new, and just that much is allowed to be old.
    assert new[:7] == [True, False, False, False, False, False, True]


def test_what_was_dropped_does_not_count_as_seen():
    original, other = prose(0), prose(1)
    mixed = original + b" " + other[: int(0.58 * len(other))]
    assert loss_study_text.distinct([original, mixed, other]) == [True, False, True]


def test_documents_are_hashed_alone_also_in_one_batch():
    texts = [prose(i, words=40 + i) for i in range(50)] + [b"short", b""]
    together = loss_study_text._of_batch(texts)
    for text, fingerprint in zip(texts, together, strict=True):
        np.testing.assert_array_equal(fingerprint, loss_study_text._of_batch([text, prose(99)])[0])
    assert len(together[-1]) == len(together[-2]) == 0


def test_held_out_text_is_like_no_training_text_and_order_does_not_matter():
    texts = [prose(i // 2) for i in range(80)]  # each twice
    documents = loss_study_text.split(texts, limit=10**9)
    assert len(documents.train) + len(documents.held_out) == 40
    assert documents.held_out
    assert not set(documents.held_out) & set(documents.train)
    assert loss_study_text.split(texts[::-1], limit=10**9) == documents


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prepared text, in bytes."""
    folder = tmp_path_factory.mktemp("text")
    files = folder / "files"
    files.mkdir()
    for i in range(40):
        (files / f"{i}.md").write_bytes(prose(i // 2))
    (files / "table.txt").write_bytes(b"1234567890 " * 400)
    (files / "binary.py").write_bytes(b"\xff\xfe" * 1000)
    notes = loss_study_text.prepare(
        folder / "made", loss_study_text.BYTES, places=[files], limit=10**9
    )
    assert notes["train"]["documents"] + notes["held_out"]["documents"] == 20
    return folder / "made"


def test_text_is_made_once(corpus: Path):
    before = {path: path.stat().st_mtime_ns for path in corpus.iterdir()}
    notes = loss_study_text.prepare(corpus, loss_study_text.BYTES, places=[], limit=10**9)
    assert {path: path.stat().st_mtime_ns for path in corpus.iterdir()} == before
    tokens = loss_study_text.load(corpus, "train", loss_study_text.BYTES)
    assert len(tokens) == notes["train"]["bytes"] + notes["train"]["documents"]
    assert np.count_nonzero(tokens == 0) == notes["train"]["documents"]
    with pytest.raises(UserError, match="limited to"):
        loss_study_text.prepare(corpus, loss_study_text.BYTES, places=[], limit=5)


def test_tokenizer_gives_back_the_text(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    files = tmp_path / "files"
    files.mkdir()
    for i in range(10):
        (files / f"{i}.md").write_bytes(prose(i))
    loss_study_text.prepare(tmp_path / "made", 300, places=[files], limit=10**9)
    tokens = loss_study_text.load(tmp_path / "made", "train", 300)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "made/tokenizer_300.json"))
    documents = [
        json.loads(line) for line in (tmp_path / "made/train.jsonl").read_text().splitlines()
    ]
    ends = np.flatnonzero(tokens == 0)
    assert len(ends) == len(documents)
    assert tokenizer.decode(tokens[: ends[0]].tolist()) == documents[0]


def test_a_run_reads_no_row_twice_and_refuses_more_than_one_epoch():
    settings = dataclasses.replace(loss_study.SIZES["tiny"].settings, steps=10, batch=4)
    tokens = np.zeros(40 * settings.sequence + 1, np.uint16)
    order = loss_study_run.row_order(tokens, settings, seed=0)
    assert sorted(order) == list(range(40))
    assert not np.array_equal(order, loss_study_run.row_order(tokens, settings, seed=1))
    with pytest.raises(UserError, match=r"40 rows of 64 tokens and the text has 39"):
        loss_study_run.row_order(tokens[:-1], settings, seed=0)


# --- Results ----------------------------------------------------------------------------------


def named(name: str = "coat", **changes: object) -> dict:
    size = loss_study.SIZES["tiny"]
    arguments = {"name": name, "arm": loss_study.ARMS[name], "size_name": "tiny", "size": size}
    arguments |= {"seed": 0, "settings": size.settings, "text": "a text"} | changes
    return loss_study_results.row_of(**arguments)


def test_key_is_that_of_all_that_decides_a_result():
    size = loss_study.SIZES["tiny"]
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
    assert named("coat", arm=loss_study.ARMS["moments"])["key"] == named("moments")["key"]


def test_every_arm_is_another_run():
    keys = {named(name)["key"] for name in loss_study.ARMS}
    assert len(keys) == len(loss_study.ARMS)


def test_only_code_that_runs_counts():
    plain = "from a import b\ndef f(x):\n    return x + 1\n"
    noted = '"""Text."""\nfrom a.c import b\ndef f(x):\n    """Text."""\n    # Text.\n'
    noted += "    return (x + 1)\n"
    assert loss_study_results.essence(plain) == loss_study_results.essence(noted)
    assert loss_study_results.essence(plain) != loss_study_results.essence(plain.replace("1", "2"))


def measured(name: str, seed: int, loss: float = 2.0) -> dict:
    return named(name, seed=seed) | {
        "losses": [loss] * 20,
        "held_out": {forward: [loss] for forward in ("own", "bf16", "coat")},
        "parents": {"date": "2026-01-01"},
    }


def test_merging_adds_what_is_new_and_keeps_what_was_measured(tmp_path: Path):
    committed, first, second = (tmp_path / name for name in ("all.json", "a.json", "b.json"))
    loss_study_results.write(first, [measured("bf16", 0), measured("coat", 0)])
    loss_study_results.write(second, [measured("coat", 0, loss=9.0), measured("coat", 1)])
    rows = loss_study_results.merge(committed, [first, second])
    assert [(row["arm"], row["seed"]) for row in rows] == [("bf16", 0), ("coat", 0), ("coat", 1)]
    assert {row["losses"][0] for row in rows} == {2.0}
    assert loss_study_results.merge(committed, [second, first]) == rows
    assert loss_study_results.read([committed, tmp_path / "missing.json"]) == rows


def call(tmp_path: Path, **changes: object) -> loss_study_measure.Call:
    size = loss_study.SIZES["tiny"]
    arguments: dict = {
        "arms": {name: loss_study.ARMS[name] for name in ("bf16", "coat")},
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
    return loss_study_measure.Call(**(arguments | changes))


def test_what_was_measured_is_not_measured_again(tmp_path: Path):
    one = call(tmp_path)
    every = loss_study_measure.missing(one, "a text")
    assert [work.name for work in every] == ["bf16/0", "coat/0", "bf16/1", "coat/1"]
    loss_study_results.write(one.known, [measured("bf16", 0)])
    loss_study_measure.keep(one.out, measured("coat", 1))
    left = loss_study_measure.missing(one, "a text")
    assert [work.name for work in left] == ["coat/0", "bf16/1"]
    assert len(loss_study_measure.missing(one, "another text")) == 4


def test_an_arm_of_older_code_has_a_name_of_its_own():
    old = measured("coat", 0) | {"code": "0123456789ab"}
    rows = [measured("bf16", 0), measured("coat", 0), old | {"key": "old"}]
    (group,) = loss_study_results.conditions_of(rows).values()
    assert sorted(row["arm"] for row in group) == ["bf16", "coat", "coat@012345"]
    assert loss_study_results.baselines_of(group) == {"bf16"}


def test_arms_are_compared_under_equal_settings_only():
    rows = [measured("bf16", 0), measured("moments", 0), measured("moments_b2_999", 0)]
    groups = loss_study_results.conditions_of(rows)
    assert sorted(len(group) for group in groups.values()) == [1, 2]


def test_without_results_it_says_so(capsys: pytest.CaptureFixture, tmp_path: Path):
    loss_study_table.show([], tmp_path)
    assert "no results yet" in capsys.readouterr().out


def test_table_and_picture_show_every_arm(capsys: pytest.CaptureFixture, tmp_path: Path):
    pytest.importorskip("matplotlib")
    rows = [
        measured(name, seed, loss=2.0 + effect + 0.001 * seed)
        for name, effect in (("bf16", 0.0), ("bf16_ulp", 1e-4), ("coat", 0.01), ("moments", 2e-3))
        for seed in (0, 1)
    ]
    loss_study_table.show(rows, tmp_path)
    printed = capsys.readouterr().out
    for words in ("coat", "moments", "bf16_ulp", "Noise floor: baselines", "evaluated in BF16"):
        assert words in printed
    assert len(list(tmp_path.glob("loss_study_tiny_*.png"))) == 1


# --- Running ----------------------------------------------------------------------------------

WORKER = """
import json, signal, sys, time
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
folder = Path(job["folder"])
if job["arm"] == "broken":
    raise ValueError("it broke")
if job["arm"].startswith("slow"):
    time.sleep(60)
(folder / "row.json").write_text(json.dumps({"losses": [1.0], "job": job["arm"]}))
"""


def test_rows_are_kept_as_runs_end_and_time_is_kept(tmp_path: Path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(loss_study_queue, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(loss_study_queue, "TO_STOP", 0.0)
    works = [
        loss_study_queue.Work(name, name, {"arm": name, "size": "tiny"}, {"arm": name})
        for name in ("slow", "quick", "broken", "slow too", "left")
    ]
    rows: list[dict] = []
    outcome = loss_study_queue.run(
        works,
        tmp_path,
        gpus=0,
        side_by_side=2,
        seconds=4.0,
        take=rows.append,
        say=lambda line: None,
    )
    assert rows == [{"arm": "quick", "losses": [1.0], "job": "quick"}]
    assert outcome.finished == ["quick"]
    assert outcome.stopped == ["slow", "slow too"]
    assert outcome.failed == {"broken": "ValueError: it broke"}
    assert outcome.left == ["left"]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Size:
    """A size that compiles in a second."""
    size = loss_study.SIZES["tiny"]
    model = dataclasses.replace(size.model, width=32, layers=1, heads=1, kv_heads=1, ffn=64)
    settings = dataclasses.replace(size.settings, steps=4, batch=4, sequence=32, held_out=4)
    size = dataclasses.replace(size, model=model, settings=settings)
    monkeypatch.setitem(loss_study.SIZES, "small", size)
    monkeypatch.setattr(loss_study_run, "FORWARDS", {"bf16": loss_study.coat.BF16})
    return size


def job(size: Size, arm: str, corpus: Path, folder: Path) -> loss_study_run.Job:
    folder.mkdir(exist_ok=True)
    settings = dataclasses.asdict(size.settings)
    return loss_study_run.Job(arm, "small", 0, settings, str(corpus), str(folder))


class AfterTwo(list):
    """Becomes true after two steps, as a list does to which a signal's handler adds."""

    def __bool__(self) -> bool:
        self.append(0)
        return len(self) > 2


def test_a_run_that_was_stopped_continues_as_if_it_had_not_been(
    small: Size, corpus: Path, tmp_path: Path
):
    whole = loss_study_run.run(job(small, "bf16", corpus, tmp_path / "whole"), [])
    cut = job(small, "bf16", corpus, tmp_path / "cut")
    assert loss_study_run.run(cut, AfterTwo()) is None
    continued = loss_study_run.run(cut, [])
    assert whole is not None
    assert continued is not None
    assert continued["losses"] == whole["losses"]
    assert continued["held_out"] == whole["held_out"]
    assert len(whole["losses"]) == 4
    assert whole["held_out"]["own"] == whole["held_out"]["bf16"]


def test_perturbed_parameters_differ_by_one_unit_in_the_last_place():
    import jax.numpy as jnp

    params = {"a": jnp.linspace(-1.0, 2.0, 64), "b": jnp.ones([8])}
    moved = loss_study_run.perturbed(params, seed=0)
    for name, leaf in params.items():
        old, new = (np.asarray(x).view(np.int32) for x in (leaf, moved[name]))
        assert set(np.abs(new - old)) == {1}
        assert {*np.sign(np.asarray(moved[name]) - np.asarray(leaf))} == {-1, 1}


def test_separate_formats_in_fp32_are_adam():
    import jax.numpy as jnp
    import optax

    from experiments.loss_study_moments import Separately, scale_by_adam

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

    from experiments.loss_study_moments import Expanded, Separately, scale_by_adam

    form = Expanded(dataclasses.replace(loss_study.Storage(), min_size=0))
    params = {"w": jnp.linspace(-1.0, 1.0, 256).reshape(2, 128)}
    grads = {"w": jnp.sin(params["w"] * 50)}
    exact = scale_by_adam(0.9, 0.95, 1e-8, Separately())
    _, plain = exact.update(grads, exact.init(params))
    tx = scale_by_adam(0.9, 0.95, 1e-8, Separately(first=form))
    _, state = tx.update(grads, tx.init(params))
    assert not np.array_equal(state.mu["w"], plain.mu["w"])
    np.testing.assert_array_equal(state.nu["w"], plain.nu["w"])


def test_arms_of_one_name_differ_from_the_default():
    for name, arm in loss_study.ARMS.items():
        assert name == "bf16" or dataclasses.replace(arm, baseline=True) != Arm(baseline=True)
