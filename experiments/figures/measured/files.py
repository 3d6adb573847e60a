"""Results files: their figures, their cases, and what made them."""

import functools
import json
from typing import Any

from experiments.figures.compare import ROOT

FOLDER = ROOT / "experiments" / "results"
GB = 1e9


@functools.cache
def record(name: str) -> dict[str, Any]:
    """A results file: its figures and their parents."""
    return json.loads((FOLDER / f"{name}.json").read_text())


def parents(name: str) -> dict[str, Any]:
    """What made a results file.

    A file that accumulates runs has the parents of its newest run, and the devices of all.
    """
    contents = record(name)
    if "runs" not in contents:
        return contents["parents"]
    newest = max((run["parents"] for run in contents["runs"]), key=lambda made: made["date"])
    devices = dict.fromkeys(run["parents"]["device"] for run in contents["runs"])
    hardware = {"device": ", ".join(devices), "devices": 1}
    return {**newest, "script": f"experiments/{name}.py", "hardware": hardware}


def device(name: str) -> str:
    """What a results file was measured on: the name of a GPU, or several, or "cpu"."""
    return parents(name)["hardware"]["device"]


def of(name: str) -> Any:
    """The figures of a results file."""
    return record(name)["figures"]


def case(file: str, /, **wanted: Any) -> dict[str, Any]:
    """The one case of a results file that has these values."""
    (found,) = (
        case
        for case in of(file)["cases"]
        if all(case.get(key) == value for key, value in wanted.items())
    )
    return found


def ratio(of_what: str, first: dict[str, Any], second: dict[str, Any]) -> float:
    """One case's figure over another's."""
    return first[of_what] / second[of_what]


def bold(text: str, when: bool = True) -> str:
    """A cell of a table, bold where it is ours."""
    return f"**{text}**" if when and text else text
