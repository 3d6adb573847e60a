"""Results files: the figures of an experiment, and where they came from, their "parents".

    {"figures": ...,
     "parents": {"script", "commit", "dirty", "code", "hardware", "versions", "date"}}

`code` is a hash of the package. Older files name their code in other ways, too. Parents leave out
names of hosts and users and absolute paths, because they are published. `CHART` is the style of the
pictures: `with matplotlib.rc_context(records.CHART): ...`.
"""

import contextlib
import datetime
import hashlib
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
from experiments.command import ROOT

# As `coat plot` draws.
INK, PALE, ACCENT, LINES, CHART = chart.INK, chart.PALE, chart.ACCENT, chart.LINES, chart.CHART
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
PEERS = ("jax-triton", "triton", "torch", "torchao", "bitsandbytes")  # where they are installed


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
        "dirty": None if copied or head is None else _git("status", "--porcelain") != "",
        "code": code_hash(),
        "hardware": {
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "cpu": _cpu(),
            "cores": os.cpu_count(),
        },
        "versions": _versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def code_hash() -> str:
    """A hash of the package's source."""
    package = ROOT / "coat_jax"
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


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
    lines = listing.read_text().splitlines() if listing.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    return next(names, platform.processor() or platform.machine())


def _versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide how fast programs are."""
    found = {"coat_jax": coat_jax.__version__, "python": platform.python_version()}
    for package in (*PACKAGES, *PEERS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
