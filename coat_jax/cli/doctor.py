"""Check this machine: would training work here, and with which kernels?

  coat doctor           versions, devices and their memory, kernels, the compilation cache

exit codes:
  0    training works here
  1    it does not: the lines that begin with "fix" say what to do
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import platform
import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

import jax

from coat_jax import __version__, nvidia
from coat_jax.files import expand_user
from coat_jax.kernels import dispatch
from coat_jax.printable import printable
from coat_jax.training import compilation_cache

TRITON = ("jax-triton", "triton")
OF_TRAINER = ("grain", "matplotlib", "rich", "tokenizers")
PACKAGES = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "safetensors"]
PACKAGES += [*OF_TRAINER, "jax-cuda13-plugin", "jax-cuda12-plugin", *TRITON]
TESTED = "jax 0.12.0.1, jax-triton 0.4.1, triton 3.9.0"  # in the GPU suite
FIRST_CUDA_13_DRIVER = 580


class Problem(NamedTuple):
    """A fault and what fixes it; a fatal one keeps training from running as it should."""

    what: str
    fix: str
    fatal: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares no arguments."""


def run(options: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if training would work, 1 otherwise."""
    findings, problems = examine()
    for name, found in findings:
        line = f"{name:18} {found}"
        wrapped = textwrap.fill(line, 96, subsequent_indent=" " * 19, break_on_hyphens=False)
        print(printable(wrapped))
    for problem in problems:
        print(printable(f"\nproblem: {problem.what}\nfix: {problem.fix}"))
    works = not any(problem.fatal for problem in problems)
    print("\nTraining works here." if works else "\nTraining does not work here yet.")
    return 0 if works else 1


def examine() -> tuple[list[tuple[str, str]], list[Problem]]:
    """Returns the findings on this machine, by name, and what is wrong."""
    driver, asked = nvidia_driver(), jax.config.values["jax_platforms"] or ""
    cuda = "gpu"  # the extra of this package with the release of CUDA that the driver supports
    if driver is not None:
        cuda = "cuda13" if int(driver.split(".")[0]) >= FIRST_CUDA_13_DRIVER else "cuda12"
    install = f"pip install -U 'coat_jax[{cuda},train]'"
    unset = f"Unset JAX_PLATFORMS, which is {asked!r}."
    findings = [("versions", _versions(driver)), ("tested on GPUs", TESTED)]
    problems = []
    if missing := _missing(OF_TRAINER):
        what = f"The trainer needs {missing}: not installed."
        problems.append(Problem(what, "pip install 'coat_jax[train]'", fatal=True))
    if (why := why_no_device()) is not None:
        fix = install if driver else f"Install NVIDIA's driver. {unset}"
        return findings, [*problems, Problem(f"JAX finds no device: {why}", fix, fatal=True)]
    devices = jax.local_devices()
    findings += [("device", _device(device)) for device in devices]
    if driver is not None and all(device.platform != "gpu" for device in devices):
        what = f"JAX sees only the CPU, though there is an NVIDIA driver ({driver})."
        elsewhere = asked and not {"cuda", "gpu"} & set(asked.split(","))
        problems.append(Problem(what, unset if elsewhere else install, fatal=True))

    capability, runs = dispatch.gpu_capability(), "XLA"
    if capability is None:
        because = "there is no GPU; kernels in Triton run on GPUs"
    elif not dispatch.multiplies_fp8():
        because = "FP8 needs compute capability 8.9 (Ada) or newer; the GPU has "
        because += dispatch.describe_capability(capability)
        fix = "Train with --precision bf16, or on an Ada, Hopper or Blackwell GPU."
        problems.append(Problem(f"FP8 layers do not run: {because}.", fix, fatal=True))
    elif missing := _missing(TRITON):
        because = f"packages are not installed: {missing}"
        fix = f"pip install 'coat_jax[{cuda}]'"
        problems.append(Problem(f"XLA replaces Triton, because {because}.", fix))
    else:
        runs, because = "Triton", f"the GPU has {dispatch.describe_capability(capability)}"
    findings.append(("kernels", f"{runs}, because {because}"))

    named = jax.config.values["jax_compilation_cache_dir"]
    folder = named or str(expand_user(compilation_cache.FOLDER))
    findings.append(("compilation cache", folder))
    if why := compilation_cache.why_unusable(folder):
        fix = "Choose another folder: coat train NAME --cache FOLDER"
        if named:
            fix = "Set JAX_COMPILATION_CACHE_DIR to another folder, or unset it."
        problems.append(Problem(f"{why} Every start compiles anew.", fix))
    return findings, problems


def _versions(driver: str | None) -> str:
    found = [f"python {platform.python_version()}, coat_jax {__version__}"]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join([*found, f"nvidia-driver {driver or 'none'}"])


def _missing(packages: Sequence[str]) -> str:
    """Returns the packages that are not installed, joined."""
    found = importlib.util.find_spec
    return ", ".join(name for name in packages if not found(name.replace("-", "_")))


def nvidia_driver() -> str | None:
    """Returns the version of NVIDIA's driver; None if nvidia-smi does not tell it."""
    first = next(iter(nvidia.query_gpus("driver_version")), "")
    return first if re.fullmatch(r"\d+(\.\d+)+", first) else None


def why_no_device() -> str | None:
    """Returns why JAX finds no device; None if it finds one.

    The platforms in JAX_PLATFORMS may be misspelt, or need a plugin that is not installed, or that
    does not start.
    """
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former without words, for CUDA's plugin
        asked = jax.config.values["jax_platforms"]
        said = " ".join(str(error).split())
        return said or f"JAX_PLATFORMS is {asked!r}, and no plugin for it starts."
    return None


def _device(device: jax.Device) -> str:
    found = f"{device.platform}, {device.device_kind}"
    if device.platform == "gpu":
        found += f", compute capability {device.compute_capability}"
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        found += f", {free / 1e9:.2f} GB free"
    return found
