"""What all studies share: rows that are measured once, files that merge, runs side by side."""

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coat_jax.errors import UserError
from experiments import row_files
from experiments.loss_study.study import STUDY as LOSS
from experiments.stability.study import STUDY as STABILITY
from experiments.study import command, queue
from experiments.study.rows import keep, key_of, named
from experiments.study.study import Job, Stopped, setting
from experiments.study.study import Study as AnyStudy
from experiments.study.worker import each


@dataclasses.dataclass(frozen=True)
class Arm:
    value: float = 0.0


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = setting("of a run")
    sequence: int = setting("of a step", 8)


def rows_of(call, name, seeds, text):
    return [
        named({
            "arm": name, "size": call.size, "seed": seed, "text": text, "version": 1,
            "settings": dataclasses.asdict(call.settings), "definition": {"value": name},
            "model": "a model",
        })
        for seed in seeds
    ]  # fmt: skip


MODEL = LOSS.sizes["tiny"].model
STUDY = AnyStudy(
    name="a_study",
    arms={name: Arm() for name in ("quick", "broken", "killed", "slow", "slow_too", "left")},
    usual=("quick",),
    sizes={"tiny": SimpleNamespace(model=MODEL, settings=Settings(20))},
    measures={"loss"},
    module="a_worker",
    rows_of=rows_of,
    prepare=lambda call, rows, only_plan: "a text",
    show=lambda rows, folder: print(len(rows), "rows"),
)
WORKER = """
import os, signal, time
from experiments.study.study import Stopped
def measure(job):
    arm = job.rows[0]["arm"]
    if arm == "broken":
        raise ValueError("it broke")
    if arm == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while arm.startswith("slow"):
        job.stop_if_asked()
        time.sleep(0.1)
    return [row | {"loss": 1.0, "parents": {}, "seconds": 0} for row in job.rows]
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(command.__file__).parents[2]}")


def measured(call, *runs: tuple[str, int], loss: float = 1.0) -> list[dict[str, Any]]:
    rows = [row for arm, seed in runs for row in rows_of(call, arm, [seed], "a text")]
    return [row | {"loss": loss, "parents": {}, "seconds": 0} for row in rows]


# --- Rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("study", [LOSS, STABILITY], ids=lambda study: study.name)
def test_a_key_is_that_of_all_that_decides_a_run_and_not_of_the_code(study, call_of, monkeypatch):
    def keys(arm: str = "coat", seed: int = 0, text: str = "a text", *words: object) -> set[str]:
        rows = study.rows_of(call_of(study, "--size", "tiny", *words), arm, [seed], text)
        return {row["key"] for row in rows}

    ways = [keys(), keys("bf16"), keys(seed=1), keys(text="other"), keys("coat", 0, "a text",
            "--batch", 3)]  # fmt: skip
    assert len(set.union(*ways)) == sum(map(len, ways))
    by_arm = [keys(arm) for arm in study.arms]
    assert len(set.union(*by_arm)) == sum(map(len, by_arm))
    monkeypatch.setattr("experiments.study.rows.code_hash", lambda: "other code")
    assert keys() == ways[0]


def test_merging_adds_what_is_new_and_keeps_what_was_measured(tmp_path: Path, call_of):
    call = call_of(STUDY, "--size", "tiny")
    first = measured(call, ("quick", 0), ("broken", 0))
    second = measured(call, ("broken", 0), ("broken", 1), loss=9.0)
    path = tmp_path / "folder" / "rows.json"
    assert keep(path, first) == first
    assert keep(path, [*second, *second]) == [*first, second[1]]
    assert keep(path, first) == row_files.read([path, tmp_path / "missing.json"])


def test_rows_of_another_study_are_refused(tmp_path: Path, call_of):
    rows = measured(call_of(STUDY, "--size", "tiny"), ("quick", 0))
    keep(tmp_path / "a.json", [rows[0] | {"accuracy": 1}])
    with pytest.raises(UserError, match=r"rows of another study than a_study.* accuracy, loss"):
        STUDY.read([tmp_path / "a.json"])


@pytest.mark.parametrize("study", [LOSS, STABILITY], ids=lambda study: study.name)
def test_committed_rows_are_of_their_study_and_not_measured_again(study):
    rows = study.read([command.RESULTS / f"{study.name}.json"])
    assert len(rows) > 300
    known = {key_of(row) for row in rows}
    coat = [row for row in rows if row["arm"] == "coat"]
    row = next(row for row in coat if row["version"] == max(r["version"] for r in coat))
    options = SimpleNamespace(learning_rates=[row.get("learning_rate")])
    settings = type(study.sizes[row["size"]].settings)(**row["settings"])
    call = SimpleNamespace(size=row["size"], settings=settings, options=options)
    (again,) = study.rows_of(call, "coat", row.get("seeds") or [row["seed"]], row["text"])
    assert again["key"] in known


# --- Calls -----------------------------------------------------------------------------------


def run(study, tmp_path: Path, *words: object) -> bool:
    given = ["--out", tmp_path, "--work", tmp_path / "work", "--size", "tiny", *words]
    return command.carry_out(study, command.parser_of(study, "").parse_args(map(str, given)))


@pytest.mark.usefixtures("worker")
def test_runs_end_apart_and_what_failed_is_made_again(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "committed")
    arms = ["--arms", "broken", "killed", "--side-by-side", 2]
    assert not run(STUDY, tmp_path, *arms)
    printed = capsys.readouterr().out
    for words in ("broken/0: ValueError: it broke", "killed/0: ended by SIGKILL", "2 failed"):
        assert words in printed
    (tmp_path / "a_worker.py").write_text(WORKER.replace("killed", ""))
    assert not run(STUDY, tmp_path, *arms)
    printed = capsys.readouterr().out
    assert "2 runs have no row yet: broken/0, killed/0" in printed
    assert "1 failed" in printed
    assert [row["arm"] for row in STUDY.read([tmp_path / "a_study.json"])] == ["killed"]


@pytest.mark.usefixtures("worker")
def test_near_the_end_runs_stop_and_others_do_not_start(tmp_path: Path, monkeypatch, call_of):
    """The time ends when the last one that finds a place has begun."""
    call = call_of(STUDY, "--size", "tiny", "--arms", "slow", "slow_too", "left")
    works = command.missing(STUDY, call, "a text")
    begun = tmp_path / "runs" / works[1].key / "job.json"
    ended = iter([False] * 10)

    def monotonic() -> float:
        return 5.0 if begun.exists() and not next(ended, False) else 0.0

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(queue, "time", clock)
    monkeypatch.setattr(queue, "TO_STOP", 0.0)
    monkeypatch.setattr(queue, "TO_BE_KILLED", 60.0)
    taken: list[Any] = []
    runs = queue.Queue("a_worker", tmp_path, 0, 2, taken.append, say=lambda line: None)
    outcomes = runs.run(works, 4.0)
    assert outcomes == {"slow/0": "stopped", "slow_too/0": "stopped", "left/0": "not started"}
    assert not taken


def test_seeds_are_numbers_and_ranges_and_each_is_trained_once(call_of, tmp_path: Path):
    call = call_of(STUDY, "--size", "tiny", "--seeds", 5, "0:3", 1, "--steps", 7)
    assert call.seeds == [5, 0, 1, 2]
    assert call.settings == Settings(7)
    pairs = dataclasses.replace(STUDY, together=lambda call: 2)
    keep(call.known, measured(call, ("quick", 5)))
    works = command.missing(pairs, call, "a text")
    assert [(work.name, [row["seed"] for row in work.rows]) for work in works] == [
        ("quick/5-0", [0]), ("quick/1-2", [1, 2]),
    ]  # fmt: skip
    assert len(command.missing(pairs, call, "another text")[0].rows) == 2


@pytest.mark.parametrize("study", [LOSS, STABILITY], ids=lambda study: study.name)
def test_what_cannot_be_trained_is_refused(study, call_of, capsys):
    with pytest.raises(SystemExit):
        call_of(study, "--size", "tiny", "--arms", "unknown")
    assert "invalid choice: 'unknown'" in capsys.readouterr().err
    context = study.sizes["tiny"].model.context
    with pytest.raises(UserError, match=rf"--sequence {context + 1} is longer .* {context} tokens"):
        call_of(study, "--size", "tiny", "--sequence", context + 1)
    with pytest.raises(UserError, match=r"batch.*must be"):
        call_of(study, "--size", "tiny", "--batch", 0)


def test_help_and_lists_say_what_there_is(capsys, tmp_path: Path):
    for study in (LOSS, STABILITY):
        command.carry_out(study, command.parser_of(study, "").parse_args(["--list"]))
        listed = capsys.readouterr().out
        assert all(name in listed for name in (*study.arms, *study.sizes))
        shown = command.parser_of(study, "").format_help()
        assert "--learning-rate" in shown
        assert "(default: the size's)" in shown


# --- One run ---------------------------------------------------------------------------------


def test_parts_of_a_run_are_measured_once(tmp_path: Path, after):
    measured: list[str] = []
    parts = {name: lambda name=name: measured.append(name) or len(measured) for name in "abc"}
    job = Job([], tmp_path, tmp_path, after(2))
    with pytest.raises(Stopped):
        each(job, parts)
    assert json.loads((tmp_path / "measured.json").read_text()) == {"a": 1, "b": 2}
    assert each(job._replace(asked=()), parts) == {"a": 1, "b": 2, "c": 3}
    assert measured == ["a", "b", "c"]
