"""Cases that a measurement finished before it was stopped, so that they are not measured again.

    {"worker": {...}, "results": [...], "ran": {...}, "compilation": {...}, "machine": {...},
     "seconds": ...}

is a line of the file that the environment variable `FILE` names, for each worker that succeeded. It
counts if the command is the same, if everything that it ran is the same today, and if GPUs and
packages are of the same kind, so that no results file mixes different ones. Without `FILE`, which
`remeasure` sets, nothing is remembered.
"""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments import compilation, machine, measured_code

FILE = "MEASURED_CASES"  # the environment variable

Case = dict[str, Any]


class Worker(NamedTuple):
    """The settings that decide what a worker measures.

    Attributes:
        command: its module and arguments.
        variables: of its environment that the experiment sets.
        gpus: how many of them it may use; None for all.
    """

    command: list[str]
    variables: dict[str, str | None]
    gpus: int | None

    @classmethod
    def of(cls, command: list[str], variables: Mapping[str, str | None]) -> "Worker":
        """Which GPUs are used does not matter, only how many."""
        name = "CUDA_VISIBLE_DEVICES"
        chosen = variables.get(name, os.environ.get(name))
        others = {key: value for key, value in variables.items() if key != name}
        return cls(command, others, None if chosen is None else len(chosen.split(",")))


def find(worker: Worker) -> list[Case] | None:
    """What such a worker printed before, if it would measure the same today."""
    wanted = json.loads(json.dumps(worker._asdict()))
    for case in _cases(_file()):
        if case["worker"] == wanted and _is_valid(case, machine.described()):
            measured_code.add(measured_code.functions(case["ran"]))
            compilation.add(case["compilation"])
            return list(case["results"])
    return None


def keep(
    worker: Worker,
    results: list[Case],
    ran: Mapping[str, list[str]],
    compiled: compilation.Seconds,
    seconds: float,
) -> None:
    """Remembers what a worker printed that succeeded."""
    file = _file()
    if file is None:
        return
    case = {
        "worker": worker._asdict(),
        "results": results,
        "ran": measured_code.noted(ran),
        "compilation": compiled,
        "machine": machine.described(),
        "seconds": round(seconds, 1),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab", buffering=0) as lines:  # in one piece: others may write to it, too
        lines.write(f"\n{json.dumps(case)}\n".encode())  # the line before may be cut off


def valid(file: Path) -> list[Case]:
    """The cases of a file that would be measured the same today on this machine."""
    here = machine.described()
    return [case for case in _cases(file) if _is_valid(case, here)]


def _is_valid(case: Case, here: dict[str, Any]) -> bool:
    return case["machine"] == here and not measured_code.changed(case["ran"])


def _cases(file: Path | None) -> Iterator[Case]:
    """The cases of a file, of which lines may be damaged, or cut off while they were written."""
    if file is not None and file.is_file():
        for line in file.read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                case = json.loads(line)
                if _is_case(case):
                    yield case


def _is_case(found: Any) -> bool:
    match found:
        case {
            "worker": _,
            "machine": _,
            "results": list(),
            "seconds": int() | float(),
            "ran": ran,
            "compilation": compiled,
        }:
            return measured_code.are_notes(ran) and compilation.are_seconds(compiled)
    return False


def _file() -> Path | None:
    name = os.environ.get(FILE)
    return Path(name) if name else None
