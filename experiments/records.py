"""Results files: the figures of an experiment, and where they came from, their "parents".

    {"figures": ...,
     "parents": {"script", "commit", "code", "dirty", "hardware", "versions", "date"}}

They leave out names of hosts and users and absolute paths, because they are published. `CHART` is
the look of the pictures beside them: `with matplotlib.rc_context(records.CHART): ...`.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

import coat_jax
from coat_jax.training.report import chart
from experiments.essence import ROOT, code_hash

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
PEERS = ("jax-triton", "triton", "torch", "torchao", "bitsandbytes")  # where they are installed

# As `coat plot` draws.
INK, PALE, ACCENT, LINES, CHART = chart.INK, chart.PALE, chart.ACCENT, chart.LINES, chart.CHART


def write(path: str | Path, figures: dict[str, Any]) -> None:
    """Writes `figures` and their parents as JSON, making the folder where there is none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"figures": figures, "parents": parents()}
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
        "dirty": None if copied or head is None else _git("status", "--porcelain") != "",
        "hardware": {
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
        },
        "versions": {
            "python": platform.python_version(),
            "coat_jax": coat_jax.__version__,
            **{package: importlib.metadata.version(package) for package in PACKAGES},
            **{peer: version for peer in PEERS if (version := _version(peer))},
        },
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _version(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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


def _cpu() -> str:
    """The processor's model, which Python only knows outside Linux."""
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return platform.processor() or platform.machine()
    names = [
        line.split(":", 1)[1] for line in listing.read_text().splitlines() if "model name" in line
    ]
    return names[0].strip() if names else platform.machine()
