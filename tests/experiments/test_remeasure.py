"""Laws of measuring again what needs GPUs."""

import itertools
import json
import os
import re
import signal
import sys
import threading
import time
from typing import NamedTuple

import pytest
import small_repository

from experiments import measured_code, measurements, remeasure
from experiments.essence import ROOT
from experiments.measurements import PLAN, Measurement, outdated
from experiments.remeasure import COLUMN, run, why_not
from experiments.workers import only

WORKER = """
import json, os, pathlib, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
seconds, name = float(sys.argv[1]), sys.argv[2]
begin = time.time()
time.sleep(seconds)
if name == "broken":
    raise SystemExit("a case failed")
if name.startswith("meets"):
    out.with_suffix(".begun").touch()
    while len(list(out.parent.glob("*.begun"))) < 2:
        assert time.time() < begin + 60, "the other one did not begin"
        time.sleep(0.02)
figures = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"].split(","), "from": begin, "to": time.time()}
(out / f"{name}.json").write_text(json.dumps({"figures": figures, "parents": {"code": "now"}}))
"""

# An experiment of several cases: a measurement that is stopped after some of them.
OF_CASES = """
import json, pathlib, sys, time
from experiments import measured_code
from experiments.workers import run_worker
if "--worker" in sys.argv:
    from coat_jax import ran
    ran.ran()
    blocked = pathlib.Path("blocked")
    time.sleep(60 if blocked.exists() and sys.argv[1] in blocked.read_text() else 0.15)
    with open("measured", "a") as file:
        print(sys.argv[1], file=file)
    print(json.dumps({"case": sys.argv[1]}))
    raise SystemExit
out, name = pathlib.Path(sys.argv[sys.argv.index("--out") + 1]), sys.argv[1]
cases = [run_worker("experiments.of_cases", case, "--worker").results[-1] for case in "abcdefgh"]
figures, parents = {"cases": cases}, {"code": "now", "ran": measured_code.noted()}
(out / f"{name}.json").write_text(json.dumps({"figures": figures, "parents": parents}))
"""


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """Runs pretended measurements of given seconds; returns lines and results."""
    small_repository.make(tmp_path)
    (tmp_path / "experiments" / "pretend.py").write_text(WORKER)
    (tmp_path / "experiments" / "of_cases.py").write_text(OF_CASES)
    monkeypatch.setattr(remeasure, "ROOT", tmp_path)
    monkeypatch.setattr(remeasure, "POLL", 0.02)
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def measured(*wanted, gpus=2, deadline=None, guess=None):
        due = [
            Measurement(name, f"pretend {seconds} {name}", needed, guess or round(seconds))
            for name, needed, seconds in wanted
        ]
        lines = list(run(due, gpus, tmp_path / "out", deadline))
        files = (tmp_path / "out").glob("*.json")
        return lines, {file.stem: json.loads(file.read_text())["figures"] for file in files}

    return measured


def test_no_gpu_serves_two_at_a_time(measure):
    wanted = [("a", 1, 1.0), ("b", 2, 0.1), ("c", 1, 0.1), ("d", 1, 0.1)]
    lines, results = measure(*wanted)
    assert all(ok for _, ok in lines)
    assert {name: len(result["gpus"]) for name, result in results.items()} == {
        name: gpus for name, gpus, _ in wanted
    }
    for one, other in itertools.combinations(results.values(), 2):
        together = one["from"] < other["to"] and other["from"] < one["to"]
        assert not (together and set(one["gpus"]) & set(other["gpus"]))


def test_those_that_need_one_gpu_run_side_by_side(measure):
    lines, _ = measure(("meets_two", 1, 0.0), ("meets_one", 1, 0.0))
    assert all(ok for _, ok in lines)


def test_only_one_that_needs_several_gpus_runs_at_a_time(measure):
    """Those of one GPU run beside it."""
    lines, results = measure(("meets_a", 2, 0.0), ("b", 2, 0.3), ("meets_c", 1, 0.0), gpus=4)
    assert all(ok for _, ok in lines)
    several = (results[name] for name in ("meets_a", "b"))
    first, second = sorted((one["from"], one["to"]) for one in several)
    assert first[1] <= second[0]


def test_a_failure_is_named_and_stops_nothing_else(measure, tmp_path):
    lines, results = measure(("broken", 1, 0.1), ("a", 1, 0.1))
    assert list(results) == ["a"]
    (failed,) = [line for line, ok in lines if not ok]
    assert "broken" in failed
    assert "a case failed" in failed
    assert (tmp_path / "out" / "unfinished" / "broken" / remeasure.LOG).exists()


def test_a_measurement_past_the_deadline_is_stopped_without_a_result(measure):
    begin = time.monotonic()
    lines, results = measure(
        ("slow", 2, 600.0), ("after", 2, 600.0), guess=1, deadline=time.monotonic() + 2.0
    )
    assert time.monotonic() - begin < 300
    assert results == {}
    ended = [line for line, ok in lines if not ok]
    assert [line.split(maxsplit=1)[0] for line in sorted(ended)] == ["after", "slow"]
    assert "not started" in sorted(ended)[0]
    assert "stopped" in sorted(ended)[1]


def test_what_another_call_measures_is_left_to_it(measure, tmp_path):
    folder = tmp_path / "out" / "unfinished" / "a"
    lock = remeasure._lock(folder)
    lines, results = measure(("a", 1, 0.1), ("b", 1, 0.1))
    os.close(lock)
    assert [line for line, ok in lines if not ok] == [
        f"{'a':{COLUMN}}is being measured by another process"
    ]
    assert list(results) == ["b"]
    _, results = measure(("a", 1, 0.1))
    assert list(results) == ["a", "b"]


@pytest.fixture
def call(measure, tmp_path, monkeypatch, capsys):
    """Calls the command with arguments; returns its exit code and what it printed."""
    monkeypatch.setattr(remeasure, "PLAN", (Measurement("slow", "pretend 60 slow", 1, 60),))

    def called(*arguments):
        given = ["remeasure", *arguments, "--gpus", "1", "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", given)
        before = signal.getsignal(signal.SIGTERM)
        try:
            code = remeasure.main()
        except SystemExit as end:
            code = end.code
        finally:
            signal.signal(signal.SIGTERM, before)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return called


def test_a_call_that_is_terminated_stops_what_it_started(call, tmp_path):
    log = tmp_path / "out" / "unfinished" / "slow" / remeasure.LOG

    def terminate():
        while not log.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate, daemon=True).start()
    code, printed = call()
    assert code == 130
    assert printed.splitlines()[-1].startswith("Stopped, and what ran with it.")
    lock = remeasure._lock(tmp_path / "out" / "unfinished" / "slow")
    assert lock is not None  # the experiment holds it as long as it runs
    os.close(lock)


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_a_call_without_time_is_refused(call, minutes):
    code, printed = call("--minutes", minutes)
    assert code == 2
    assert f"--minutes {minutes} must be above 0." in printed


def test_a_file_is_no_folder_for_results(call, tmp_path):
    (tmp_path / "out").write_text("")
    code, printed = call()
    assert code == 2
    assert "out is not a folder." in printed


def test_a_name_given_twice_is_measured_once(call, monkeypatch):
    asked = []
    monkeypatch.setattr(remeasure, "run", lambda due, *_: asked.append(due) or [])
    assert call("slow", "slow")[0] == 0
    assert [one.result for one in asked[0]] == ["slow"]


class Call(NamedTuple):
    """What became of a measurement of several cases.

    Attributes:
        succeeded: whether it measured all of them.
        finished: those that are kept if it was stopped.
        begun: those that it measured, at most one more than it finished.
    """

    succeeded: bool
    finished: int
    begun: str


@pytest.fixture
def long(measure, tmp_path):
    """Runs a measurement of eight cases of 0.15 s, at most for given seconds."""

    def measured(seconds=None):
        file = tmp_path / "measured"
        file.write_text("")
        due = [Measurement("long", "of_cases long", 1, 3, 1)]
        deadline = None if seconds is None else time.monotonic() + seconds
        *_, (line, succeeded) = run(due, 1, tmp_path / "out", deadline)
        kept = re.search(r"cases finished: (\d+)", line)
        return Call(succeeded, int(kept[1]) if kept else 0, "".join(file.read_text().split()))

    return measured


def test_calls_that_are_too_short_converge(long, tmp_path):
    call, seconds, finished = long(1.0), 1.0, 0  # less than the eight cases sleep
    assert not call.succeeded
    while not call.succeeded:
        begun = len(call.begun) - (call.finished - finished)
        assert begun in (0, 1)  # one may have been stopped while it ended
        assert call.begun == "abcdefgh"[finished : call.finished + begun]
        seconds, finished = seconds + 1.0, call.finished
        call = long(seconds)
    assert call.begun == "abcdefgh"[finished:]
    figures = json.loads((tmp_path / "out" / "long.json").read_text())["figures"]
    assert [case["case"] for case in figures["cases"]] == list("abcdefgh")


def test_a_change_between_two_calls_outdates_cases_that_ran_it(long, tmp_path):
    (tmp_path / "blocked").write_text("d")
    seconds = 1.5
    while not long(seconds).finished:
        seconds *= 2
    (tmp_path / "blocked").unlink()
    small_repository.change(tmp_path, "coat_jax/not_imported.py", "8", "16")
    small_repository.change(tmp_path, "coat_jax/constants.py", "WIDTH = 8", "WIDTH = 16")
    call = long()
    assert call.succeeded
    assert call.begun == "abcdefgh"


def test_finished_cases_are_kept_as_long_as_a_measurement_needs_them(long, tmp_path, monkeypatch):
    monkeypatch.setattr(
        remeasure, "PLAN", tuple(Measurement(name, "of_cases", 1, 3, 1) for name in ("long", "two"))
    )
    long()
    cases = measurements.cases_file(remeasure.PLAN[0], tmp_path / "out")
    remeasure._forget(tmp_path / "out")
    assert cases.exists()
    results = tmp_path / "out" / "long.json"
    (tmp_path / "out" / "two.json").write_text(results.read_text())
    remeasure._forget(tmp_path / "out")
    assert not (tmp_path / "out" / "unfinished").exists()


@pytest.mark.parametrize(
    ("left", "first"),
    [(1000, "all"), (500, "most"), (150, "of_cases"), (80, "short"), (5, None)],
)
def test_a_measurement_that_cannot_end_in_time_is_begun_only_if_a_case_of_it_can(left, first):
    waiting = [
        Measurement("all", "pretend", 1, 900),
        Measurement("of_cases", "pretend", 1, 600, 100),
        Measurement("most", "pretend", 1, 400),
        Measurement("short", "pretend", 1, 60),
    ]
    if left == 150:
        waiting.pop()
    takes = {one: one.seconds for one in waiting}
    chosen = remeasure._first_that_fits(waiting, takes, set(), left)
    assert (chosen and chosen.result) == first


@pytest.mark.parametrize(("left", "first"), [(80, "short"), (5, "begun"), (-1, None)])
def test_a_measurement_with_finished_cases_is_begun_if_no_other_can_be(left, first):
    begun, short = Measurement("begun", "pretend", 1, 600, 100), Measurement("short", "", 1, 60)
    takes = {begun: 100, short: 60}
    chosen = remeasure._first_that_fits([begun, short], takes, {begun}, left)
    assert (chosen and chosen.result) == first


def test_a_measurement_of_which_all_cases_are_finished_takes_no_time(measure, tmp_path):
    cases = Measurement("long", "of_cases long", 1, 3, 60)
    list(run([cases], 1, tmp_path / "out"))
    (tmp_path / "out" / "long.json").unlink()
    *_, (line, succeeded) = run([cases], 1, tmp_path / "out", time.monotonic() + 50)
    assert succeeded, line


def test_a_measurement_that_cannot_end_in_time_is_not_started(measure):
    lines, results = measure(("slow", 1, 60.0), ("fast", 1, 0.1), deadline=time.monotonic() + 20)
    assert list(results) == ["fast"]
    assert [line for line, ok in lines if not ok] == [
        f"{'slow':{COLUMN}}not started: too little time is left"
    ]


def written(folder, **parents):
    (folder / "a.json").write_text(json.dumps({"figures": {}, "parents": parents}))
    return Measurement("a", "pretend", 1, 1)


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """What a measurement in a small repository ran."""
    small_repository.make(tmp_path)
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    return measured_code.noted({"coat_jax/ran.py": ["ran"], "coat_jax/constants.py": []})


def test_results_are_outdated_by_a_change_of_what_they_ran(tmp_path, notes):
    one = Measurement("a", "pretend", 1, 1)
    assert outdated(one, tmp_path) == "missing"
    assert why_not(one, 1, tmp_path) is None
    written(tmp_path, code="of another day", ran=notes)
    assert outdated(one, tmp_path) is None
    assert why_not(one, 1, tmp_path) == "is up to date"
    small_repository.change(tmp_path, "coat_jax/ran.py", "return 2", "return 3")
    assert outdated(one, tmp_path) is None
    small_repository.change(tmp_path, "coat_jax/ran.py", "return Layer()", "return Layer")
    assert outdated(one, tmp_path) == "of other code: coat_jax/ran.py"
    assert why_not(one, 1, tmp_path) is None


def test_results_that_do_not_say_what_they_ran_are_of_all_code(tmp_path, monkeypatch):
    monkeypatch.setattr(measurements, "code_hash", lambda: "now")
    assert outdated(written(tmp_path, code="now"), tmp_path) is None
    assert outdated(written(tmp_path, code="before"), tmp_path) == "of other code"


def test_the_reason_names_missing_gpus_and_packages(tmp_path):
    assert "needs 4 GPUs" in why_not(Measurement("a", "pretend", 4, 1), 2, tmp_path)
    lacking = Measurement("a", "pretend", 1, 1, None, ("json", "no_such_package"))
    assert why_not(lacking, 1, tmp_path) == "needs no_such_package, not installed"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"parents": {}}',
        '{"parents": {"code": 1}}',
        '{"parents": {"ran": ["coat_jax/ran.py"]}}',
        '{"parents": {"ran": {"coat_jax/ran.py": 1}}}',
        '{"parents": {"ran": {"coat_jax/ran.py": ""}}}',
    ],
)
def test_a_file_that_names_no_code_is_outdated(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    assert outdated(Measurement("a", "pretend", 1, 1), tmp_path)


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
