"""The suite of a GPU, as far as a machine without one can tell."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import quick

from experiments import gpu_suite

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    env |= {"XLA_FLAGS": quick.FLAGS, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_is_refused():
    done = run("experiments.gpu_suite")
    assert done.returncode == 2
    assert "needs a GPU" in done.stderr


def test_tests_that_need_a_gpu_fail_without_one():
    """They are skipped where all tests run, and must not be where they are asked for."""
    done = run("pytest", "-m", "gpu", "tests/ops/test_linear_gpu.py", "-p", "no:cacheprovider")
    assert done.returncode == 1
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_modules_of_other_suites_are_not_collected(tmp_path):
    """A module that lacks a library is reported as skipped, though none of its tests would run."""
    names = ("test_a_gpu.py", "test_an_oracles.py", "test_an_interpret.py")
    for name in names:
        library = "" if "gpu" in name else 'pytest.importorskip("no_such_library")'
        (tmp_path / name).write_text(
            f"import pytest\n{library}\n@pytest.mark.gpu\ndef test_it():\n    pass\n"
        )
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    options += ["-c", str(ROOT / "pyproject.toml")]
    done = run("pytest", *options, "-m", "gpu", str(tmp_path))
    assert done.stdout.splitlines()[-1].startswith("1 passed in"), done.stdout
    done = run("pytest", *options, "--no-skips", str(tmp_path))
    assert "2 errors" in done.stdout.splitlines()[-1]


def test_a_training_step_is_compared_with_that_of_xla(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--worker", "training", "--small"])
    assert gpu_suite.main() == 0
    # Without a GPU both are the same program.
    apart = json.loads(capsys.readouterr().out.splitlines()[-1])["apart"]
    assert apart == dict.fromkeys(gpu_suite.BOUNDS, 0.0)


@pytest.mark.parametrize(
    ("name", "figures", "failures"),
    [
        ("tests", {"exit_code": 0, "summary": "3 passed"}, []),
        ("tests", {"exit_code": 1, "summary": "1 failed"}, ["tests: 1 failed"]),
        ("stacks", {"failed": "Error"}, ["stacks: Error"]),
        ("stacks", {"warm": {"failed": "Error"}}, ["stacks, run again: Error"]),
        ("stacks", {"warm": {"COAT": 2.0}}, []),
        ("training", {"apart": {"loss": 1e-4}}, []),
        (
            "training",
            {"apart": {"loss": math.nan}},
            ["training: loss differs by nan, bound 5.0e-04"],
        ),
        ("llama2_7b", {"compile_seconds": 39.0, "warm": 9.0}, []),
        ("llama2_7b", {"warm": 17.0}, ["llama2_7b: compiled warm in 17.0 s, limit 13 s"]),
    ],
)
def test_failures_are_named(name, figures, failures):
    assert gpu_suite.failed({name: figures}) == failures
