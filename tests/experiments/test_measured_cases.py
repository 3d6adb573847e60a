"""A case is measured once for the same code on the same machine."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from small_repository import change, make

from experiments import machine, measured_cases, measured_code
from experiments.workers import run_worker

WORKER = """
import json, os, pathlib, sys
from coat_jax import ran
ran.ran()
calls = pathlib.Path("calls")
calls.write_text(calls.read_text() + "x" if calls.exists() else "x")
if "broken" in sys.argv:
    raise SystemExit("RuntimeError: broken")
print(json.dumps({"given": sys.argv[1:], "variable": os.environ.get("VARIABLE")}))
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    monkeypatch.setattr(measured_code, "_ran", {})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(measured_cases.FILE, str(tmp_path / "unfinished" / "cases.jsonl"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.chdir(tmp_path)
    make(tmp_path)
    (tmp_path / "experiments" / "pretend.py").write_text(WORKER)
    return tmp_path


@pytest.fixture
def measured(repository) -> Callable[..., int]:
    """Runs a worker; returns how many times workers have run by now."""

    def of(*arguments: str, remember: bool = True, **variables: str | None) -> int:
        ended = run_worker("experiments.pretend", *arguments, remember=remember, **variables)
        if not ended.code:
            (result,) = ended.results
            assert result == {"given": [*arguments], "variable": variables.get("VARIABLE")}
        return len((repository / "calls").read_text())

    return of


def test_a_finished_case_is_not_measured_again(measured):
    assert [measured("a"), measured("a"), measured("b"), measured("a")] == [1, 1, 2, 2]


def test_a_case_that_is_compared_with_others_is_measured_again(measured):
    assert [measured("a"), measured("a", remember=False)] == [1, 2]
    assert [measured("b", remember=False), measured("b")] == [3, 4]


def test_the_variables_that_an_experiment_sets_are_part_of_a_case(measured):
    assert [measured("a", VARIABLE="1"), measured("a", VARIABLE="2"), measured("a")] == [1, 2, 3]
    assert measured("a", VARIABLE="2") == 3


def test_which_gpus_it_has_does_not_matter_but_how_many(measured, monkeypatch):
    assert measured("a", CUDA_VISIBLE_DEVICES="0") == 1
    assert measured("a", CUDA_VISIBLE_DEVICES="3") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert measured("a") == 1
    assert measured("a", CUDA_VISIBLE_DEVICES="0,1") == 2


def test_a_case_of_other_code_is_measured_again(measured, repository):
    measured("a")
    change(repository, "coat_jax/not_imported.py", "8", "16")
    assert measured("a") == 1
    change(repository, "coat_jax/constants.py", "WIDTH = 8", "WIDTH = 16")
    assert measured("a") == 2


def test_the_worker_itself_is_code(measured, repository):
    measured("a")
    change(repository, "experiments/pretend.py", '"x" if', '"x"  if')  # layout
    assert measured("a") == 1
    change(repository, "experiments/pretend.py", "ran.ran()", "ran.ran(); ran.ran()")
    assert measured("a") == 2


@pytest.mark.parametrize("other", [{"devices": ["other"]}, {"versions": {"jax": "0"}}])
def test_a_case_of_another_machine_is_measured_again(measured, monkeypatch, other):
    measured("a")
    here = machine.described()
    monkeypatch.setattr(machine, "described", lambda: here | other)
    assert measured("a") == 2


def test_a_worker_that_failed_is_run_again(measured):
    assert [measured("broken"), measured("broken")] == [1, 2]


def test_a_line_that_was_cut_off_does_not_count(measured):
    file = Path(os.environ[measured_cases.FILE])
    measured("a")
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    assert [measured("a"), measured("a")] == [2, 2]


def test_without_a_file_nothing_is_remembered(measured, monkeypatch):
    monkeypatch.delenv(measured_cases.FILE)
    assert [measured("a"), measured("a")] == [1, 2]


@pytest.mark.parametrize("before", [False, True], ids=["measured", "remembered"])
def test_code_that_a_worker_ran_counts_as_run_by_the_experiment(measured, monkeypatch, before):
    if before:
        measured("a")
        monkeypatch.setattr(measured_code, "_ran", {})
    measured("a")
    ran = measured_code._ran
    assert "coat_jax/ran.py" in ran
    assert "coat_jax/constants.py" in ran
    assert "coat_jax/not_imported.py" not in ran
    assert "experiments/pretend.py" in ran
    assert "experiments/measured_code.py" not in ran


@pytest.mark.parametrize(
    "damaged", [b"5", b"[]", b"{}", b'{"worker": {', b"\xff\xfe", b'"ran"'], ids=repr
)
def test_a_damaged_line_is_no_case(measured, damaged):
    measured("a")
    file = Path(os.environ[measured_cases.FILE])
    case = file.read_bytes()
    file.write_bytes(damaged + b"\n" + case + damaged)
    assert len(measured_cases.valid(file)) == 1
    assert measured("a") == 1


@pytest.mark.parametrize(
    "part",
    [
        *({"ran": ran} for ran in (5, [], {"a": 5}, {"a": ""})),
        *({"compilation": seconds} for seconds in (5, {}, {"cold_seconds": "1"})),
    ],
    ids=str,
)
def test_a_case_that_does_not_say_what_it_ran_and_compiled_is_none(tmp_path, part):
    whole = {
        "worker": {},
        "results": [],
        "ran": {},
        "compilation": {"cold_seconds": 1.0, "warm_seconds": None},
        "machine": machine.described(),
        "seconds": 1,
    }
    file = tmp_path / "cases"
    file.write_text(json.dumps(whole))
    assert measured_cases.valid(file) == [whole]
    file.write_text(json.dumps(whole | part))
    assert measured_cases.valid(file) == []
