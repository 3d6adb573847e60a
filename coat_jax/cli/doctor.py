"""Check this machine: would training work here, and with which kernels?

  coat doctor           versions, devices, kernels, memory, the compilation cache
  coat doctor --json    the same for programs

exit codes:
  0    training works here
  1    it does not: the lines that begin with "fix" say what to do
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from coat_jax import nvidia
from coat_jax.files import expand_user
from coat_jax.printable import printable

BROKEN = 1
WIDTH = 96
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "safetensors")
TRITON = ("jax-triton", "triton")
OF_GPUS = ("jax-cuda13-plugin", "jax-cuda12-plugin", *TRITON)
OF_TRAINER = ("grain", "matplotlib", "rich", "tokenizers")
TESTED = {"jax": "0.12.0.1", "jax-triton": "0.4.1", "triton": "3.9.0"}  # in the GPU suite
FIRST_CUDA_13_DRIVER = 580
VERSION = re.compile(r"\d+(\.\d+)+")


class Problem(NamedTuple):
    """What is wrong, and what fixes it; a fatal one keeps training from running as it should."""

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
    else:
        print(printable(_text(findings, problems, works)))
    return 0 if works else BROKEN


def examine() -> tuple[dict[str, Any], list[Problem]]:
    """The findings on this machine, and what is wrong."""
    driver = nvidia_driver()
    findings: dict[str, Any] = {"versions": versions(), "tested": TESTED, "nvidia_driver": driver}
    problems = []
    if missing := [name for name in OF_TRAINER if not importlib.util.find_spec(name)]:
        what = f"The trainer needs {', '.join(missing)}: not installed."
        problems.append(Problem(what, "pip install 'coat_jax[train]'", fatal=True))
    asked = os.environ.get("JAX_PLATFORMS", "")
    fix = f"pip install -U 'coat_jax[{_extra(driver)},train]'"
    unset = f"nset JAX_PLATFORMS, which is {asked!r}."
    if (why := why_no_device()) is not None:
        if driver is None:
            fix = "Install NVIDIA's driver" + (f", or u{unset}" if asked else ".")
        return findings, [*problems, Problem(f"JAX finds no device: {why}", fix, fatal=True)]
    findings["devices"] = found = _devices()
    if driver is not None and all(one["platform"] != "gpu" for one in found):
        what = f"JAX sees only the CPU, though there is an NVIDIA driver ({driver})."
        elsewhere = asked and not {"cuda", "gpu"} & set(asked.split(","))
        problems.append(Problem(what, f"U{unset}" if elsewhere else fix, fatal=True))
    findings["kernels"], of_kernels = kernels(driver)
    findings["compilation_cache"], of_cache = cache()
    return findings, [*problems, *of_kernels, *of_cache]


def why_no_device() -> str | None:
    """Why JAX finds no device; None if it finds one.

    The platforms in JAX_PLATFORMS may be misspelt, or need a plugin that is not installed, or that
    does not start.
    """
    import jax

    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former without words, for CUDA's plugin
        said = " ".join(str(error).split())
        asked = os.environ.get("JAX_PLATFORMS")
        return said or f"JAX_PLATFORMS is {asked!r}, and no plugin for it starts."
    return None


def versions() -> dict[str, str]:
    """The versions of Python, this package and the packages that matter, where installed."""
    from coat_jax import __version__

    found = {"python": platform.python_version(), "coat_jax": __version__}
    for name in (*PACKAGES, *OF_TRAINER, *OF_GPUS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def nvidia_driver() -> str | None:
    """The version of NVIDIA's driver; None without one, or if nvidia-smi does not tell it."""
    first = next(iter(nvidia.query_gpus("driver_version")), "")
    return first if VERSION.fullmatch(first) else None


def kernels(driver: str | None) -> tuple[dict[str, str], list[Problem]]:
    """Which implementation runs here and why, and how to get the other one."""
    from coat_jax.kernels import dispatch

    capability = dispatch.gpu_capability()
    if capability is None:
        return {"runs": "xla", "why": "there is no GPU; kernels in Triton run on GPUs"}, []
    if not dispatch.multiplies_fp8():
        why = f"the GPU has {dispatch.described(capability)}; FP8 needs 8.9 (Ada) or newer"
        fix = "Train with --precision bf16, or on an Ada, Hopper or Blackwell GPU."
        return {"runs": "xla", "why": why}, [Problem(f"FP8 layers do not run: {why}.", fix, True)]
    if dispatch.triton_installed():
        return {"runs": "triton", "why": f"the GPU has {dispatch.described(capability)}"}, []
    missing = [name for name in TRITON if not importlib.util.find_spec(name.replace("-", "_"))]
    why = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    fix = f"pip install 'coat_jax[{_extra(driver)}]'"
    return {"runs": "xla", "why": why}, [Problem(f"XLA replaces Triton: {why}.", fix)]


def cache() -> tuple[dict[str, Any], list[Problem]]:
    """JAX's compilation cache: where it is, how much it holds, and how much room there is."""
    import jax

    from coat_jax.training import compilation_cache

    named = jax.config.values["jax_compilation_cache_dir"]
    if named and compilation_cache.is_url(named):
        return {"folder": named, "entries": None, "bytes": None, "free_bytes": None}, []
    folder = Path(named) if named else expand_user(compilation_cache.FOLDER)
    found = {"folder": str(folder), "entries": 0, "bytes": 0, "free_bytes": 0}
    if problem := compilation_cache.why_unusable(folder):
        what = f"The compilation cache {folder} cannot be used: {problem}."
        fix = "Choose another folder: coat train NAME --cache FOLDER"
        if named:
            fix = "Set JAX_COMPILATION_CACHE_DIR to another folder, or unset it."
        return found, [Problem(f"{what} Every start compiles anew.", fix)]
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    sizes = [entry.stat().st_size for entry in folder.glob("*-cache")]
    free = shutil.disk_usage(there).free
    return found | {"entries": len(sizes), "bytes": sum(sizes), "free_bytes": free}, []


def _devices() -> list[dict[str, Any]]:
    import jax

    found = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit"), stats.get("bytes_in_use", 0)
        found.append(
            {
                "platform": device.platform,
                "kind": device.device_kind,
                "compute_capability": getattr(device, "compute_capability", None),
                "free_bytes": _available_memory() if limit is None else limit - used,
            }
        )
    return found


def _available_memory() -> int | None:
    """The memory that a new program can have; None where the system does not report it."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: +(\d+) kB", file.read_text() if file.exists() else "")
    return 1024 * int(found[1]) if found else None


def _extra(driver: str | None) -> str:
    """The release of CUDA that a driver supports, as an extra of this package."""
    if driver is None:
        return "gpu"
    return "cuda13" if int(driver.split(".")[0]) >= FIRST_CUDA_13_DRIVER else "cuda12"


def _text(findings: dict[str, Any], problems: list[Problem], works: bool) -> str:
    here = findings["versions"]
    other = {name: here[name] for name in TESTED if here.get(name, TESTED[name]) != TESTED[name]}
    versions = f"versions   {_listed(here)}"
    lines = textwrap.wrap(versions, WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    lines += [
        f"tested     on a GPU with {_listed(TESTED)}; {_listed(other) or 'the same'} here",
        f"driver     {findings['nvidia_driver'] or 'no NVIDIA driver'}",
    ]
    for one in findings.get("devices", []):
        capability = one["compute_capability"]
        more = f", compute capability {capability}" if capability else ""
        lines.append(f"device     {one['kind']} ({one['platform']}{more}), {_free(one)}")
    if "kernels" in findings:
        runs = {"triton": "Triton kernels", "xla": "XLA, without Triton kernels"}
        found = findings["kernels"]
        lines.append(f"kernels    {runs[found['runs']]}: {found['why']}")
    if "compilation_cache" in findings:
        found = findings["compilation_cache"]
        size = "not on this machine, so not examined"
        if found["entries"] is not None:
            size = f"{found['entries']:,} programs, {found['bytes'] / 1e9:.2f} GB; {_free(found)}"
        lines.append(f"cache      {found['folder']}: {size}")
    for problem in problems:
        lines += ["", f"problem    {problem.what}", f"fix        {problem.fix}"]
    end = "Training works here." if works else "Training does not work here yet."
    return "\n".join([*lines, "", end])


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _free(found: dict[str, Any]) -> str:
    free = found["free_bytes"]
    return "memory unknown" if free is None else f"{free / 1e9:,.1f} GB free"
