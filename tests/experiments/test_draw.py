"""Experiments draw the results that are there."""

import importlib
import shutil
import sys

import pytest

from experiments.accumulated_error import STORAGES, storages
from experiments.command import RESULTS

DRAWN = [
    "communication",
    "format_sqnr",
    "granularity",
    "group_scaling",
    "in_place_step",
    "layer_speed",
    "muon_step",
    "optimizer_step",
    "training_throughput",
]


@pytest.mark.parametrize("name", DRAWN)
def test_an_experiment_draws_its_committed_results(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jax.device_count", lambda: 1)  # the name of some files has it
    monkeypatch.setenv("MPLBACKEND", "agg")
    shutil.copy(RESULTS / f"{name}.json", tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "--draw", "--out", str(tmp_path)])
    importlib.import_module(f"experiments.{name}").main()
    assert (tmp_path / f"{name}.png").stat().st_size > 0


def test_every_storage_of_the_accumulated_error_has_an_optimizer():
    assert len(storages(b2=0.95)) == len(STORAGES)
