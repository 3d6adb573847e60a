"""What becomes of a worker that ends without results, or does not end."""

import pytest

from experiments.workers import Ended, outcome, run_worker

FULL = (
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 40.1GiB"
)
ADVICE = "For simplicity, JAX has removed its internal frames from the traceback."


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (Ended([{"ms": 1}, {"ms": 2}], 0, FULL), {"ms": 2}),
        (
            Ended([], 1, f"Traceback:\n{FULL}\n{ADVICE}"),
            {"failed": "out of memory", "error": FULL},
        ),
        (Ended([], 1, "Traceback:\nValueError: no"), {"failed": "ValueError: no"}),
        (Ended([], -9, ""), {"failed": "no message"}),
    ],
)
def test_the_outcome_is_the_last_result_or_the_error(ended, expected):
    assert outcome(ended) == expected


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Runs this source as a worker."""

    def run(source, *arguments, **options):
        (tmp_path / "a_worker.py").write_text(source)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return run_worker("a_worker", *arguments, **options)

    return run


def test_a_worker_prints_its_results_and_has_its_own_environment(worker, monkeypatch):
    monkeypatch.setenv("UNSET", "1")
    source = """
import json, os, sys
print("a message")
names = sorted({"SET", "UNSET"} & os.environ.keys())
print(json.dumps({"arguments": sys.argv[1:], "names": names}))
raise ValueError("no more")
"""
    ended = worker(source, "a", "b", SET="1", UNSET=None)
    assert ended.results == [{"arguments": ["a", "b"], "names": ["SET"]}]
    assert ended.code == 1
    assert outcome(ended._replace(results=[])) == {"failed": "ValueError: no more"}


def test_a_worker_that_takes_too_long_is_stopped(worker):
    source = """
import time
print('{"ms": 1}', flush=True)
print('{"ms":', end="", flush=True)
time.sleep(60)
"""
    ended = worker(source, limit=2)
    assert ended.results == [{"ms": 1}]
    assert ended.code
    assert outcome(ended._replace(results=[])) == {"failed": "TimeoutError: stopped after 2 s"}
