"""Results files: the figures of an experiment, and where they came from, their "parents".

    {"figures": ...,
     "parents": {"script", "commit", "code", "ran", "compilation", "dirty", "hardware", "versions",
                 "date"}}

`code` is a hash of all of `coat_jax/`; `ran` has hashes of the code that ran (see `measured_code`),
and `compilation` how many seconds compiling took (see there).
Parents leave out names of hosts and users and absolute paths, because they are published. `CHART`
is the style of the pictures: `with matplotlib.rc_context(records.CHART): ...`.
"""

import datetime
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import coat_jax
from coat_jax.training.report import chart
from experiments import compilation, machine, measured_code
from experiments.essence import ROOT, code_hash

# As `coat plot` draws.
INK, PALE, ACCENT, LINES, CHART = chart.INK, chart.PALE, chart.ACCENT, chart.LINES, chart.CHART


def write(path: str | Path, figures: dict[str, Any], *, of_all_code: bool = False) -> None:
    """Writes `figures` and their parents as JSON, making the folder where there is none.

    Args:
        path: of the file.
        figures: what was measured.
        of_all_code: whether the figures are of the whole package: of its tests, or of processes
            other than workers, which do not report what they ran and compiled.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"figures": figures, "parents": parents()}
    if of_all_code:
        del record["parents"]["ran"], record["parents"]["compilation"]
    path.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n")


def read(path: Path) -> dict[str, Any]:
    """The figures of a results file."""
    return json.loads(path.read_text())["figures"]


def parents() -> dict[str, Any]:
    """What made the figures of this process: the script, the code, the machine, the day."""
    copied = os.environ.get("COMMIT")  # where the code was copied without its history
    head = _git("rev-parse", "--verify", "--quiet", "HEAD")
    return {
        "script": _script(),
        "commit": copied or head,
        "code": code_hash(),
        "ran": measured_code.noted(),
        "compilation": compilation.seconds(),
        "dirty": None if copied or head is None else _git("status", "--porcelain") != "",
        "hardware": {
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "cpu": machine.cpu(),
            "cores": os.cpu_count(),
        },
        "versions": {"coat_jax": coat_jax.__version__, **machine.versions()},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _script() -> str:
    """The running program, as a path within the repository."""
    script = Path(sys.argv[0]).resolve()
    return str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else script.name


def _git(*arguments: str) -> str | None:
    """What git says of the repository; None where there is no git, repository or commit."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), *arguments]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return said.stdout.strip() if said.returncode == 0 else None
