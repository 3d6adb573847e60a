"""What a measurement runs on: GPUs, processor and packages. Does not import JAX."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
PEERS = ("jax-triton", "triton", "torch", "torchao", "bitsandbytes")  # where they are installed


def described() -> dict[str, Any]:
    """What must be the same for cases of two runs to share a file."""
    return {"devices": gpu_kinds() or [cpu()], "versions": versions()}


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide how fast programs are."""
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
        **{peer: version for peer in PEERS if (version := _version(peer))},
    }


def _version(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gpu_kinds() -> list[str]:
    """The kinds of GPU of this machine, asked of the driver: JAX would take their memory."""
    if shutil.which("nvidia-smi") is None or os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    lines = (line for line in listed.stdout.splitlines() if line.startswith("GPU "))
    return sorted({line.partition(": ")[2].partition(" (UUID")[0] for line in lines})


def cpu() -> str:
    """The processor's model, which Python only knows outside Linux."""
    listing = Path("/proc/cpuinfo")
    if not listing.exists():
        return platform.processor() or platform.machine()
    names = [
        line.split(":", 1)[1] for line in listing.read_text().splitlines() if "model name" in line
    ]
    return names[0].strip() if names else platform.machine()
