"""Check this machine: would training work here, and with which kernels?

  coat doctor           versions, devices and their memory, kernels

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
from collections.abc import Iterator, Sequence

import jax

from coat_jax import __version__
from coat_jax.kernels import dispatch
from coat_jax.printable import printable
from coat_jax.training.compilation import query_gpus

TRITON = ("jax-triton", "triton")
OF_TRAINER = ("grain", "matplotlib", "rich", "tokenizers")
PACKAGES = ["jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "safetensors"]
PACKAGES += [*OF_TRAINER, "jax-cuda13-plugin", "jax-cuda12-plugin", *TRITON]
TESTED = "jax 0.12.0.1, jax-triton 0.4.1, triton 3.9.0"  # in the GPU suite
FIRST_CUDA_13_DRIVER = 580


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares no arguments."""


def run(options: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if training would work, 1 otherwise."""
    problems = [*_examine()]
    for what, fix in problems:
        print(printable(f"\nproblem: {what}\nfix: {fix}"))
    print("\nTraining does not work here yet." if problems else "\nTraining works here.")
    return 1 if problems else 0


def _examine() -> Iterator[tuple[str, str]]:
    """Prints the findings on this machine; yields the problems, each with what fixes it."""
    driver, asked = nvidia_driver(), jax.config.values["jax_platforms"] or ""
    cuda = "gpu"  # the extra of this package with the release of CUDA that the driver supports
    if driver is not None:
        cuda = "cuda13" if int(driver.split(".")[0]) >= FIRST_CUDA_13_DRIVER else "cuda12"
    install = f"pip install -U 'coat_jax[{cuda},train]'"
    unset = f"Unset JAX_PLATFORMS, which is {asked!r}."
    _print("versions", _versions(driver))
    _print("tested on GPUs", TESTED)
    if missing := _missing(OF_TRAINER):
        yield f"The trainer needs {missing}: not installed.", install
    if (why := why_no_device()) is not None:
        fix = install if driver else f"Install NVIDIA's driver. {unset}"
        yield f"JAX finds no device: {why}", fix
        return
    devices = jax.local_devices()
    for device in devices:
        _print("device", _device(device))
    if driver is not None and all(device.platform != "gpu" for device in devices):
        what = f"JAX sees only the CPU, though there is an NVIDIA driver ({driver})."
        elsewhere = asked and not {"cuda", "gpu"} & set(asked.split(","))
        yield what, unset if elsewhere else install

    capability, runs = dispatch.gpu_capability(), "XLA"
    if capability is None:
        because = "there is no GPU; kernels in Triton run on GPUs"
    elif capability < dispatch.FIRST_WITH_FP8:
        because = "FP8 needs compute capability 8.9 (Ada) or newer; the GPU has "
        because += dispatch.describe_capability(capability)
        fix = "Train with --precision bf16, or on an Ada, Hopper or Blackwell GPU."
        yield f"FP8 layers do not run: {because}.", fix
    elif missing := _missing(TRITON):
        because = f"packages are not installed: {missing}; for Triton, {install}"
    else:
        runs, because = "Triton", f"the GPU has {dispatch.describe_capability(capability)}"
    _print("kernels", f"{runs}, because {because}")


def _print(name: str, found: str) -> None:
    line = f"{name:18} {found}"
    print(printable(textwrap.fill(line, 96, subsequent_indent=" " * 19, break_on_hyphens=False)))


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
    first = next(iter(query_gpus("driver_version")), "")
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
