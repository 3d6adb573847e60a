"""Laws of measuring again what needs GPUs."""

import itertools
import json
import sys
import time

import pytest

from experiments import remeasure
from experiments.essence import ROOT
from experiments.remeasure import PLAN, Measurement, code_of, run, why_not
from experiments.workers import only

WORKER = """
import json, os, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
seconds, name = float(sys.argv[1]), sys.argv[2]
begin = time.time()
time.sleep(seconds)
if name == "broken":
    raise SystemExit("a case failed")
figures = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"].split(","), "from": begin, "to": time.time()}
(out / f"{name}.json").write_text(json.dumps({"figures": figures, "parents": {"code": "now"}}))
"""


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs pretended measurements of given seconds; returns lines and results."""
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").touch()
    (tmp_path / "experiments" / "pretend.py").write_text(WORKER)
    monkeypatch.setattr(remeasure, "ROOT", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def measured(*wanted, gpus=2, deadline=None):
        due = [
            Measurement(name, f"pretend {seconds} {name}", needed, round(seconds))
            for name, needed, seconds in wanted
        ]
        lines = list(run(due, gpus, tmp_path / "out", deadline))
        files = (tmp_path / "out").glob("*.json")
        return lines, {file.stem: json.loads(file.read_text())["figures"] for file in files}

    return measured


def test_no_gpu_serves_two_at_a_time(measure):
    wanted = [("a", 1, 2.0), ("b", 2, 0.3), ("c", 1, 0.3), ("d", 1, 0.3)]
    lines, results = measure(*wanted)
    assert all(ok for _, ok in lines)
    assert {name: len(result["gpus"]) for name, result in results.items()} == {
        name: gpus for name, gpus, _ in wanted
    }
    for one, other in itertools.combinations(results.values(), 2):
        together = one["from"] < other["to"] and other["from"] < one["to"]
        assert not (together and set(one["gpus"]) & set(other["gpus"]))


def test_those_that_need_one_gpu_run_side_by_side(measure):
    _, results = measure(("a", 1, 1.0), ("b", 1, 1.0))
    assert max(r["from"] for r in results.values()) < min(r["to"] for r in results.values())


def test_a_failure_is_named_and_stops_nothing_else(measure, tmp_path):
    lines, results = measure(("broken", 1, 0.1), ("a", 1, 0.1))
    assert list(results) == ["a"]
    (failed,) = [line for line, ok in lines if not ok]
    assert "broken" in failed
    assert "a case failed" in failed
    assert (tmp_path / "out" / "unfinished" / "broken" / remeasure.LOG).exists()


def test_a_measurement_past_the_deadline_is_stopped_without_a_result(measure):
    begin = time.monotonic()
    lines, results = measure(("slow", 2, 60.0), ("after", 2, 0.1), deadline=time.monotonic() + 0.5)
    assert time.monotonic() - begin < 30
    assert results == {}
    ended = [line for line, ok in lines if not ok]
    assert len(ended) == 2
    assert "stopped" in ended[0]
    assert "not started" in ended[1]


def test_results_of_the_same_code_are_not_measured_again(tmp_path):
    one = Measurement("a", "pretend", 1, 1)
    assert why_not(one, 1, tmp_path, "now") is None
    (tmp_path / "a.json").write_text(json.dumps({"parents": {"code": "now"}}))
    assert why_not(one, 1, tmp_path, "now") == "is up to date"
    assert why_not(one, 1, tmp_path, "later") is None


def test_the_reason_names_missing_gpus_and_packages(tmp_path):
    assert "needs 4 GPUs" in why_not(Measurement("a", "pretend", 4, 1), 2, tmp_path, "now")
    lacking = Measurement("a", "pretend", 1, 1, ("json", "no_such_package"))
    assert why_not(lacking, 1, tmp_path, "now") == "needs no_such_package, not installed"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"parents": {}}', '{"parents": {"code": 1}}'])
def test_a_file_that_names_no_code_is_of_none(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert code_of(tmp_path / "a.json") is None


def test_gpus_are_counted_among_those_that_are_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert only([1, 2]) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert only([1, 2]) == {"CUDA_VISIBLE_DEVICES": "6,7"}


def test_every_command_of_the_plan_is_an_experiment(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["remeasure", "--list"])
    assert remeasure.main() == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PLAN)
    for measurement in PLAN:
        module = measurement.command.split()[0]
        assert (ROOT / "experiments" / f"{module}.py").exists(), measurement
