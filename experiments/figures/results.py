"""What the results files say, for `sentences` and `tables`."""

import functools
import json
from typing import Any

from experiments.figures.pages import ROOT
from experiments.loss_study import results as loss_study_results
from experiments.loss_study import statistics as loss_study_statistics
from experiments.loss_study.statistics import Comparison
from experiments.training_throughput import OPTIONS

FOLDER = ROOT / "experiments" / "results"
GB = 1e9


@functools.cache
def record(name: str) -> dict[str, Any]:
    """A results file: its figures and their parents."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def parents(name: str) -> dict[str, Any]:
    """What made a results file. A file that accumulates runs has the parents of its newest run."""
    contents = record(name)
    if "runs" not in contents:
        return contents["parents"]
    newest = max((run["parents"] for run in contents["runs"]), key=lambda made: made["date"])
    hardware = {"device": newest["device"], "devices": 1}
    return {**newest, "script": f"experiments/{name}.py", "hardware": hardware}


def of(name: str) -> Any:
    """The figures of a results file."""
    return record(name)["figures"]


def case(name: str, **wanted: Any) -> dict[str, Any]:
    """The one case of a results file that has these values."""
    (found,) = (
        case
        for case in of(name)["cases"]
        if all(case.get(key) == value for key, value in wanted.items())
    )
    return found


def training(precision: str, batch: int, *options: str, gpus: int = 1) -> dict[str, Any]:
    """A case of training_throughput, with these of its options."""
    file = "training_throughput" if gpus == 1 else f"training_throughput_{gpus}_gpus"
    if gpus > 1:  # results of before there were options
        return case(file, precision=precision, batch=batch)
    chosen = {option: option in options for option in OPTIONS}
    return case(file, precision=precision, batch=batch, **chosen)


def beside_one(gpus: int) -> tuple[float, float]:
    """Tokens a second of COAT on several GPUs, and the share of one GPU's speed that each has."""
    found = case(f"training_throughput_{gpus}_gpus_beside_one", precision="COAT", batch=16)
    return found["tokens_per_second"], found["efficiency"]


def muon(name: str, gpus: int = 1) -> dict[str, Any]:
    """A case of muon_step."""
    return case("muon_step" if gpus == 1 else f"muon_step_{gpus}_gpus", case=name)


def example(name: str, *, ours: bool) -> dict[str, Any]:
    """A case of examples_memory, without coat_jax or with it."""
    return case("examples_memory", example=name, coat_jax=ours)


def layer(name: str) -> dict[str, Any]:
    """A case of layer_speed."""
    return case("layer_speed", layer=name)


def step(optimizer: str, params: str, grads: str, model: str = "one_leaf") -> dict[str, Any]:
    """A case of optimizer_step."""
    return case("optimizer_step", optimizer=optimizer, params=params, grads=grads, model=model)


def error_over_ours(b2: float, part: str, coder: str) -> float:
    """A case of optimizer_error: its error over that of coat_jax's own format."""
    table = of("optimizer_error")[f"b2 = {b2}"][part]
    return table[coder]["error"] / table["E4M3+E / E4M3+E"]["error"]


def accumulated(b2: float, part: str, storage: str) -> float:
    """The error at the end of accumulated_error."""
    return of("accumulated_error")["at the end"][f"b2 = {b2}"][storage][part]


def unit(name: str, kind: str = "units") -> float:
    """What a whole layer saves, in U."""
    return of("activation_memory")[kind][name]["the layer"]


@functools.cache
def loss_runs(size: str, learning_rate: float, muon: bool = False) -> list[loss_study_results.Row]:
    """The runs of loss_study for one size of model, one learning rate, and AdamW or Muon."""
    rows = loss_study_results.read([FOLDER / "loss_study.json"])
    groups = loss_study_results.conditions_of(rows).values()
    (found,) = (
        group
        for group in groups
        if group[0]["size"] == size
        and group[0]["settings"]["learning_rate"] == learning_rate
        and not group[0]["definition"]["optimizer"]
        and loss_study_results.trains_by_muon(group[0]) == muon
    )
    return found


@functools.cache
def loss_effects(
    size: str, learning_rate: float, *, muon: bool = False, held_out: bool = False
) -> Comparison:
    """What each arm costs in loss, relative to the baselines."""
    rows = loss_runs(size, learning_rate, muon)
    baselines = loss_study_results.baselines_of(rows)
    if held_out:
        own = loss_study_statistics.held_out("own")
        return loss_study_statistics.compare(rows, baselines, own)
    return loss_study_statistics.compare(rows, baselines)
