"""Results files name the code that they are of."""

import json

import pytest

from experiments import compilation, measured_code, records
from experiments.essence import code_hash


@pytest.fixture
def parents(tmp_path, monkeypatch):
    """What a results file says of its origin."""
    monkeypatch.setattr(measured_code, "_ran", {})
    measured_code.add({"coat_jax/optax/fused.py": ["fused_fp8_adamw"]})

    def written(**options):
        records.write(tmp_path / "results" / "a.json", {"ms": 1.5}, **options)
        record = json.loads((tmp_path / "results" / "a.json").read_text())
        assert record["figures"] == {"ms": 1.5}
        return record["parents"]

    return written


def test_a_file_names_what_its_measurement_ran(parents):
    found = parents()
    assert found["code"] == code_hash()
    assert "fused_fp8_adamw" in found["ran"]["coat_jax/optax/fused.py"].split()
    assert measured_code.changed(found["ran"]) == []


def test_a_file_has_the_seconds_that_compilation_took(parents, monkeypatch):
    seconds = {"cold_seconds": 2.0, "warm_seconds": 0.5}
    monkeypatch.setattr(compilation, "_seconds", seconds)
    assert parents()["compilation"] == seconds


def test_results_of_all_code_have_nothing_of_this_process_alone(parents):
    assert not {"ran", "compilation"} & parents(of_all_code=True).keys()


def test_code_that_only_writes_results_does_not_count(parents):
    assert "experiments/records.py" not in parents()["ran"]
    assert {
        path.relative_to(measured_code.ROOT).as_posix()
        for folder in measured_code.FOLDERS
        for path in (measured_code.ROOT / folder).rglob("*.py")
    } >= measured_code.APPARATUS
