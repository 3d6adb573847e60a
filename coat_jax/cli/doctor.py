"""Check this machine: would training work here, and with which kernels?

  coat doctor           versions, devices and their memory, kernels, the compilation cache
  coat doctor --json    the same for programs

exit codes:
  0    training works here
  1    it does not: the lines that begin with "fix" say what to do
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import textwrap
from typing import Any, NamedTuple

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
TESTED = {"jax": "0.12.0.1", "jax-triton": "0.4.1", "triton": "3.9.0"}  # in the GPU suite
FIRST_CUDA_13_DRIVER = 580
WRAPPER = textwrap.TextWrapper(96, subsequent_indent=" " * 19, break_on_hyphens=False)


class Problem(NamedTuple):
    """A fault and what fixes it; a fatal one keeps training from running as it should."""

    what: str
    fix: str
    fatal: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Prints the findings; returns 0 if training would work, 1 otherwise."""
    findings, problems = examine()
    works = not any(problem.fatal for problem in problems)
    if options.json:
        listed = [problem._asdict() for problem in problems]
        print(json.dumps({"works": works, **findings, "problems": listed}, indent=2))
        return 0 if works else 1
    for name, found in findings.items():
        for one in found if isinstance(found, list) else [found]:
            line = f"{name:18} " + ", ".join(f"{key} {value}" for key, value in one.items())
            print(printable(WRAPPER.fill(line)))
    for problem in problems:
        print(printable(f"\nproblem: {problem.what}\nfix: {problem.fix}"))
    print("\nTraining works here." if works else "\nTraining does not work here yet.")
    return 0 if works else 1


def examine() -> tuple[dict[str, Any], list[Problem]]:
    """Returns the findings on this machine, and what is wrong."""
    driver, asked = nvidia_driver(), _platforms()
    findings: dict[str, Any] = {"versions": versions(driver), "tested_on_gpu": TESTED}
    problems = []
    if missing := [name for name in OF_TRAINER if not importlib.util.find_spec(name)]:
        what = f"The trainer needs {', '.join(missing)}: not installed."
        problems.append(Problem(what, "pip install 'coat_jax[train]'", fatal=True))
    install = f"pip install -U 'coat_jax[{_extra(driver)},train]'"
    unset = f"Unset JAX_PLATFORMS, which is {asked!r}."
    if (why := why_no_device()) is not None:
        fix = install if driver else f"Install NVIDIA's driver. {unset if asked else ''}".strip()
        return findings, [*problems, Problem(f"JAX finds no device: {why}", fix, fatal=True)]
    findings["devices"] = found = [_device(device) for device in jax.local_devices()]
    if driver is not None and all(one["platform"] != "gpu" for one in found):
        what = f"JAX sees only the CPU, though there is an NVIDIA driver ({driver})."
        elsewhere = asked and not {"cuda", "gpu"} & set(asked.split(","))
        problems.append(Problem(what, unset if elsewhere else install, fatal=True))
    findings["kernels"], of_kernels = kernels(driver)
    findings["compilation_cache"], of_cache = cache()
    return findings, [*problems, *of_kernels, *of_cache]


def why_no_device() -> str | None:
    """Returns why JAX finds no device; None if it finds one.

    The platforms in JAX_PLATFORMS may be misspelt, or need a plugin that is not installed, or that
    does not start.
    """
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former without words, for CUDA's plugin
        said = " ".join(str(error).split())
        return said or f"JAX_PLATFORMS is {_platforms()!r}, and no plugin for it starts."
    return None


def _platforms() -> str:
    return jax.config.values["jax_platforms"] or ""


def versions(driver: str | None) -> dict[str, str]:
    """Returns the versions of Python, coat_jax, the packages that matter and NVIDIA's driver."""
    found = {"python": platform.python_version(), "coat_jax": __version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"nvidia-driver": driver or "none"}


def nvidia_driver() -> str | None:
    """Returns the version of NVIDIA's driver; None if nvidia-smi does not tell it."""
    first = next(iter(nvidia.query_gpus("driver_version")), "")
    return first if re.fullmatch(r"\d+(\.\d+)+", first) else None


def kernels(driver: str | None) -> tuple[dict[str, str], list[Problem]]:
    """Which implementation runs here and why, and how to get the other one."""
    capability = dispatch.gpu_capability()
    if capability is None:
        return {"runs": "xla", "because": "there is no GPU; kernels in Triton run on GPUs"}, []
    why = f"the GPU has {dispatch.describe_capability(capability)}"
    if dispatch.multiplies_fp8() and dispatch.triton_installed():
        return {"runs": "triton", "because": why}, []
    if dispatch.multiplies_fp8():
        missing = [name for name in TRITON if not importlib.util.find_spec(name.replace("-", "_"))]
        why = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        fix = f"pip install 'coat_jax[{_extra(driver)}]'"
        problem = Problem(f"XLA replaces Triton: {why}.", fix)
    else:
        why += "; FP8 needs 8.9 (Ada) or newer"
        fix = "Train with --precision bf16, or on an Ada, Hopper or Blackwell GPU."
        problem = Problem(f"FP8 layers do not run: {why}.", fix, fatal=True)
    return {"runs": "xla", "because": why}, [problem]


def cache() -> tuple[dict[str, str], list[Problem]]:
    """JAX's compilation cache: where it is, and why it cannot be used."""
    named = jax.config.values["jax_compilation_cache_dir"]
    folder = named or str(expand_user(compilation_cache.FOLDER))
    fix = "Choose another folder: coat train NAME --cache FOLDER"
    if named:
        fix = "Set JAX_COMPILATION_CACHE_DIR to another folder, or unset it."
    why = compilation_cache.why_unusable(folder)
    problems = [Problem(f"{why} Every start compiles anew.", fix)] if why else []
    return {"folder": folder}, problems


def _device(device: jax.Device) -> dict[str, Any]:
    found: dict[str, Any] = {"platform": device.platform, "kind": device.device_kind}
    if device.platform == "gpu":
        found["compute_capability"] = device.compute_capability
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        found["gigabytes_free"] = round(free / 1e9, 2)
    return found


def _extra(driver: str | None) -> str:
    """Returns the release of CUDA that a driver supports, as an extra of this package."""
    if driver is None:
        return "gpu"
    return "cuda13" if int(driver.split(".")[0]) >= FIRST_CUDA_13_DRIVER else "cuda12"
