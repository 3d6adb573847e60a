"""A change outdates a measurement exactly if the measurement ran what is changed."""

import json
import subprocess
import sys

import pytest
from small_repository import change, make

from experiments import measured_code

PROGRAM = """
import json, pathlib, runpy
from experiments import measured_code
from coat_jax import ran
ran.ran()
runpy.run_path(str(pathlib.Path("coat_jax/config.py").absolute()))
measured_code.add({"coat_jax/ran.py": ["ran_in_a_worker"]})
print(json.dumps(measured_code.noted()))
"""
CAN_TELL = sys.version_info >= (3, 12)  # which functions ran


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    return make(tmp_path)


@pytest.fixture
def notes(repository):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_nothing_changed(notes):
    run_by_path = {"coat_jax/config.py"} if CAN_TELL else set()
    assert set(notes) == {"coat_jax/ran.py", "coat_jax/constants.py", *run_by_path}
    assert measured_code.changed(notes) == []


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("ran", "return inner()", "return inner"),
        ("ran", "return Layer()", "return Layer"),
        ("ran", "return 1", "return 2"),
        ("ran", "self.width = WIDTH", "self.width = 2 * WIDTH"),
        ("ran", "return 3", "return 6"),  # decorated: Triton compiles a kernel from its source
        ("ran", "return 4", "return 6"),  # wrapped
        ("constants", "WIDTH = 8", "WIDTH = 16"),
    ],
)
def test_a_change_of_code_that_ran_outdates(repository, notes, file, before, after):
    change(repository, f"coat_jax/{file}.py", before, after)
    assert measured_code.changed(notes) == [f"coat_jax/{file}.py"]


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("not_imported", "WIDTH = 8", "WIDTH = 16"),
        ("__init__", '"1"', '"2"'),
        ("constants", "WIDTH = 8", "WIDTH = 8  # columns"),
    ],
)
def test_a_change_of_code_that_did_not_run_outdates_nothing(repository, notes, file, before, after):
    change(repository, f"coat_jax/{file}.py", before, after)
    assert measured_code.changed(notes) == []


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("ran", "return 2", "return 6"),
        ("ran", "return 5", "return 6"),  # wrapped
        ("ran", "return 7", "return 6"),  # wrapped
        ("ran", "def did_not_run", "def another():\n    return 0\n\ndef did_not_run"),
        ("constants", "return 1", "return 2"),
    ],
)
def test_a_function_that_did_not_run_outdates_only_where_python_cannot_tell(
    repository, notes, file, before, after
):
    change(repository, f"coat_jax/{file}.py", before, after)
    assert measured_code.changed(notes) == ([] if CAN_TELL else [f"coat_jax/{file}.py"])


def test_a_config_that_is_run_and_not_imported_outdates(repository, notes):
    change(repository, "coat_jax/config.py", "2", "3")
    assert measured_code.changed(notes) == (["coat_jax/config.py"] if CAN_TELL else [])


def test_a_file_that_is_gone_outdates(repository, notes):
    (repository / "coat_jax" / "constants.py").unlink()
    assert measured_code.changed(notes) == ["coat_jax/constants.py"]


def test_functions_are_noted_by_name(notes):
    ran = set(measured_code.functions(notes)["coat_jax/ran.py"])
    if CAN_TELL:
        assert ran == {"cached", "ran", "ran_in_a_worker", "register"}
    else:
        assert ran == {measured_code.ALL, "ran_in_a_worker"}


def test_a_file_of_which_nobody_reports_counts_as_a_whole(repository, monkeypatch):
    monkeypatch.setattr(measured_code, "_ran", {})
    measured_code._within.cache_clear()
    measured_code.add_all_of(str(repository / "coat_jax" / "ran.py"))
    measured_code._within.cache_clear()
    notes = measured_code.noted(measured_code._ran)
    change(repository, "coat_jax/ran.py", "return 2", "return 6")
    assert measured_code.changed(notes) == ["coat_jax/ran.py"]


def test_where_hashes_are_of_an_older_kind_the_commit_decides(repository, notes):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=a"]):
        subprocess.run([*git, *command], cwd=repository, check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], cwd=repository, text=True).strip()
    older = {file: " ".join(["0" * 12, *note.split()[1:]]) for file, note in notes.items()}
    assert measured_code.changed(older) == list(older)
    assert measured_code.changed(older, "0" * 40) == list(older)
    assert measured_code.changed(older, commit) == []
    change(repository, "coat_jax/constants.py", "WIDTH = 8", "WIDTH = 16")
    assert measured_code.changed(older, commit) == ["coat_jax/constants.py"]
