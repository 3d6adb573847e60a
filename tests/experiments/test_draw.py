"""Experiments draw the results that are there."""

import importlib
import shutil
import sys

import pytest

from experiments.command import RESULTS

DRAWN = {
    "communication": "communication",
    "format_sqnr": "format_sqnr",
    "layers.saved": "activation_memory",
    "tile_attention_speed": "tile_attention_speed",
    "training_throughput": "training_throughput",
}


@pytest.mark.parametrize("module", DRAWN)
def test_an_experiment_draws_its_committed_results(module, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.device_count", lambda: 1)  # the name of some files has it
    monkeypatch.setenv("MPLBACKEND", "agg")
    name = DRAWN[module]
    shutil.copy(RESULTS / f"{name}.json", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--draw", "--out", str(tmp_path)])
    importlib.import_module(f"experiments.{module}").main()
    assert (tmp_path / f"{name}.png").stat().st_size > 0
