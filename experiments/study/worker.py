"""One run of a study, in a process of its own.

    python -m experiments.study.worker MODULE FOLDER

    FOLDER/job.json          the rows to measure, and the folder of the call
    FOLDER/progress.txt      how far it is, every few seconds
    FOLDER/measured.json     parts that are measured, if the run has several (`each`)
    FOLDER/rows.json         the rows, when the run is complete

After SIGTERM a run saves what it needs to continue in its folder, and ends with `STOPPED`.
"""

import importlib
import json
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coat_jax import writing
from experiments.command import bare_parser_of
from experiments.study.study import Job, Stopped

STOPPED = 143  # the exit status, as of a process that SIGTERM has ended


def main() -> None:
    """Measures the rows of a job."""
    parser = bare_parser_of(__doc__)
    parser.add_argument("module", help="has `measure(job)`")
    parser.add_argument("folder", type=Path, help="of the run")
    options = parser.parse_args()
    folder = options.folder
    told = json.loads((folder / "job.json").read_text())
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    job = Job(told["rows"], folder, Path(told["work"]), asked)
    try:
        rows = importlib.import_module(options.module).measure(job)
    except Stopped:
        sys.exit(STOPPED)
    writing.replace(folder / "rows.json", json.dumps(rows))


def each(job: Job, parts: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Measures parts of a run by name, and saves each: a run that was stopped continues there."""
    file = job.folder / "measured.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name, measure in parts.items():
        if name not in found:
            job.stop_if_asked()
            say(job, f"{name} ({len(found) + 1}/{len(parts)})")
            found[name] = measure()
            writing.replace(file, json.dumps(found))
    return found


def say(job: Job, progress: str) -> None:
    """Reports to the process that started this one."""
    writing.replace(job.folder / "progress.txt", progress)


if __name__ == "__main__":
    main()
