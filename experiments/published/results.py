"""Results files, and how their figures are written."""

import functools
import json
from typing import Any

from experiments.published.pages import ROOT

FOLDER = ROOT / "experiments" / "results"
GB = 1e9


@functools.cache
def record(name: str) -> dict[str, Any]:
    """A results file: its figures, or the runs that it has accumulated, and their parents."""
    return json.loads((FOLDER / f"{name}.json").read_text())


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


def bold(text: str, when: bool = True) -> str:
    """A cell of a table, bold where it is ours."""
    return f"**{text}**" if when and text else text
