"""Results files report how long programs compiled, cold and from JAX's compilation cache."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from small_repository import make

from experiments import compilation, measured_cases, measured_code
from experiments.workers import run_worker

HITS = "/jax/compilation_cache/cache_hits"
MISSES = "/jax/compilation_cache/cache_misses"
NOTHING = {"cold_seconds": None, "warm_seconds": None}
X = jnp.ones((8, 8))

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))


@pytest.fixture(autouse=True)
def counted(monkeypatch):
    """Only what a test compiles counts."""
    monkeypatch.setattr(compilation, "_seconds", dict(NOTHING))
    monkeypatch.setattr(measured_code, "_ran", {})
    events.clear()


@jax.jit
def function(x):
    return jnp.tanh(x @ x)


def lower():
    return function.lower(X)


def cache_events():
    return [event for event in events if event in (HITS, MISSES)]


def test_the_second_time_a_program_is_read_from_the_cache_and_the_first_time_not():
    compiled = compilation.compile_twice(lower)
    assert cache_events() == [MISSES, HITS]
    assert compiled.compile_seconds > 0
    assert compiled.warm_compile_seconds > 0
    assert jnp.allclose(compiled.program(X), jnp.tanh(8.0))


def test_what_was_compiled_before_is_not_in_the_cache():
    function(X)
    events.clear()
    compilation.compile_twice(lower)
    assert cache_events() == [MISSES, HITS]


def test_another_call_begins_with_an_empty_cache():
    compilation.compile_twice(lower)
    events.clear()
    compilation.compile_twice(lower)
    assert cache_events() == [MISSES, HITS]


def test_settings_of_the_cache_are_restored():
    names = [name for name in jax.config.values if "cache" in name]
    before = {name: jax.config.values[name] for name in names}
    compilation.compile_twice(lower)
    assert {name: jax.config.values[name] for name in names} == before
    with pytest.raises(ZeroDivisionError):
        compilation.compile_twice(lambda: 1 / 0)
    assert {name: jax.config.values[name] for name in names} == before


@pytest.fixture
def cache(tmp_path):
    """A compilation cache that JAX already uses."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    for name, value in zip(names, (str(tmp_path), 0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_a_cache_that_is_used_already_is_left_alone(cache):
    lower().compile()
    entries = {path.name for path in cache.glob("*-cache")}
    assert len(entries) == 1
    compilation.compile_twice(lower)
    assert {path.name for path in cache.glob("*-cache")} == entries
    jax.clear_caches()
    lower().compile()
    assert cache_events() == [MISSES, MISSES, HITS, HITS]


class NeverCached:
    """What lowers to a program that JAX neither stores nor reads."""

    def compile(self):
        return "program"


def test_a_program_that_jax_does_not_cache_has_no_warm_seconds():
    compiled = compilation.compile_twice(NeverCached)
    assert compiled.program == "program"
    assert compiled.seconds("decode_") == {
        "decode_compile_seconds": compiled.compile_seconds,
        "decode_warm_compile_seconds": None,
    }


def test_what_is_compiled_and_what_is_read_are_counted_apart():
    assert compilation.seconds() == NOTHING
    jax.jit(lambda x: x + 1).lower(1.0).compile()
    cold = compilation.seconds()
    assert cold["cold_seconds"] > 0
    assert cold["warm_seconds"] is None
    compilation.compile_twice(lower)
    both = compilation.seconds()
    assert both["cold_seconds"] > cold["cold_seconds"]
    assert both["warm_seconds"] > 0


def test_seconds_of_processes_add_up():
    compilation.add({"cold_seconds": 2.0, "warm_seconds": None})
    compilation.add({"cold_seconds": 3.0, "warm_seconds": 0.5})
    compilation.add({})  # of a worker that was killed
    assert compilation.seconds() == {"cold_seconds": 5.0, "warm_seconds": 0.5}


PARENT = """
import json, sys
import experiments
before = sorted({"jax", "jaxlib"} & sys.modules.keys())
import jax
from experiments import compilation
jax.jit(lambda x: x + 1).lower(1.0).compile()
print(json.dumps([before, compilation.seconds()]))
"""
WORKER = """
import json, jax
jax.jit(lambda x: x + 1).lower(1.0).compile()
print(json.dumps({"ms": 1.5}))
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return make(tmp_path)


def test_counting_begins_when_jax_is_imported_and_does_not_import_it(repository):
    command = [sys.executable, "-c", PARENT]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    before, found = json.loads(done.stdout)
    assert before == []
    assert found["cold_seconds"] > 0


@pytest.mark.parametrize("remembered", [False, True], ids=["measured", "remembered"])
def test_what_a_worker_compiles_counts_as_compiled_by_the_experiment(
    repository, monkeypatch, remembered
):
    (repository / "experiments" / "pretend.py").write_text(WORKER)
    monkeypatch.setenv(measured_cases.FILE, str(repository / "cases.jsonl"))
    assert run_worker("experiments.pretend").code == 0
    found = compilation.seconds()
    if remembered:
        monkeypatch.setattr(compilation, "_seconds", dict(NOTHING))
        monkeypatch.setattr(subprocess, "run", None)
        run_worker("experiments.pretend")
    assert compilation.seconds() == found
    assert found["cold_seconds"] > 0
    assert found["warm_seconds"] is None


@pytest.mark.parametrize(
    ("found", "are"),
    [
        (NOTHING, True),
        ({"cold_seconds": 2, "warm_seconds": 0.5}, True),
        ({"cold_seconds": 2.0}, False),
        ({"cold_seconds": "2", "warm_seconds": None}, False),
        (5, False),
    ],
    ids=str,
)
def test_damaged_seconds_are_recognized(found, are):
    assert compilation.are_seconds(found) is are
