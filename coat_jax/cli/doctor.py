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
from coat_jax.cli import devices
from coat_jax.files import expanded
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
    """What is wrong, and what fixes it.

    Attributes:
        what: in a sentence.
        fix: what to do.
        fatal: whether training cannot run, or would not run where it should.
    """

    what: str
    fix: str
    fatal: bool


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
    problems = _missing_packages()
    driver = nvidia_driver()
    findings: dict[str, Any] = {"versions": versions(), "tested": TESTED, "nvidia_driver": driver}
    if (why := devices.why_none()) is not None:
        problems.append(
            Problem(f"JAX finds no device: {why}", _fix_of_platform(driver), fatal=True)
        )
        return findings, problems
    findings["devices"] = found_devices = _devices()
    if driver is not None and all(one["platform"] != "gpu" for one in found_devices):
        problems.append(_unused_gpu(driver))
    findings["kernels"], found = kernels(driver)
    problems += found
    findings["compilation_cache"], found = cache()
    return findings, problems + found


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
    first = next(iter(nvidia.ask("driver_version")), "")
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
    return {"runs": "xla", "why": why}, [Problem(f"XLA replaces Triton: {why}.", fix, False)]


def cache() -> tuple[dict[str, Any], list[Problem]]:
    """JAX's compilation cache: where it is, how much it holds, and how much room there is."""
    import jax

    from coat_jax.training import compilation_cache

    named = jax.config.values["jax_compilation_cache_dir"]
    if named and compilation_cache.is_url(named):
        return {"folder": named, "entries": None, "bytes": None, "free_bytes": None}, []
    folder = Path(named) if named else expanded(compilation_cache.FOLDER)
    if problem := compilation_cache.why_unusable(folder):
        what = (
            f"The compilation cache {folder} cannot be used: {problem}. Every start compiles anew."
        )
        fix = "Choose another folder: coat train NAME --cache FOLDER"
        if named:
            fix = "Set JAX_COMPILATION_CACHE_DIR to another folder, or unset it."
        found = {"folder": str(folder), "entries": 0, "bytes": 0, "free_bytes": 0}
        return found, [Problem(what, fix, fatal=False)]
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    entries = compilation_cache.entries(folder)
    found = {
        "folder": str(folder),
        "entries": len(entries),
        "bytes": sum(entry.stat().st_size for entry in entries),
        "free_bytes": shutil.disk_usage(there).free,
    }
    return found, []


# --- Parts -----------------------------------------------------------------------------------


def _missing_packages() -> list[Problem]:
    missing = [name for name in OF_TRAINER if not importlib.util.find_spec(name)]
    if not missing:
        return []
    what = f"The trainer needs {', '.join(missing)}: not installed."
    return [Problem(what, "pip install 'coat_jax[train]'", fatal=True)]


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


def _unused_gpu(driver: str) -> Problem:
    asked = os.environ.get("JAX_PLATFORMS", "")
    what = f"JAX sees only the CPU, though there is an NVIDIA driver ({driver})."
    if asked and not {"cuda", "gpu"} & set(asked.split(",")):
        return Problem(what, f"Unset JAX_PLATFORMS, which is {asked!r}.", fatal=True)
    return Problem(what, f"pip install -U 'coat_jax[{_extra(driver)},train]'", fatal=True)


def _fix_of_platform(driver: str | None) -> str:
    asked = os.environ.get("JAX_PLATFORMS")
    if driver is not None:
        return f"pip install -U 'coat_jax[{_extra(driver)},train]'"
    return "Install NVIDIA's driver" + (
        f", or unset JAX_PLATFORMS, which is {asked!r}." if asked else "."
    )


def _extra(driver: str | None) -> str:
    """The release of CUDA that a driver supports, as an extra of this package."""
    if driver is None:
        return "gpu"
    return "cuda13" if int(driver.split(".")[0]) >= FIRST_CUDA_13_DRIVER else "cuda12"


def _text(findings: dict[str, Any], problems: list[Problem], works: bool) -> str:
    versions = f"versions   {_listed(findings['versions'])}"
    lines = textwrap.wrap(versions, WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
    lines += [
        f"tested     {_of_tested(findings['versions'])}",
        f"driver     {findings['nvidia_driver'] or 'no NVIDIA driver'}",
    ]
    for one in findings.get("devices", []):
        capability = one["compute_capability"]
        more = f", compute capability {capability}" if capability else ""
        lines.append(f"device     {one['kind']} ({one['platform']}{more}), {_free(one)}")
    if "kernels" in findings:
        runs = {"triton": "Triton kernels", "xla": "XLA, without Triton kernels"}
        lines.append(
            f"kernels    {runs[findings['kernels']['runs']]}: {findings['kernels']['why']}"
        )
    if "compilation_cache" in findings:
        lines.append(f"cache      {_of_cache(findings['compilation_cache'])}")
    for problem in problems:
        lines += ["", f"problem    {problem.what}", f"fix        {problem.fix}"]
    end = "Training works here." if works else "Training does not work here yet."
    return "\n".join([*lines, "", end])


def _of_tested(here: dict[str, str]) -> str:
    """The versions that the tests last passed with on a GPU, and what differs from them here."""
    other = {name: here[name] for name in TESTED if here.get(name, TESTED[name]) != TESTED[name]}
    return f"on a GPU with {_listed(TESTED)}; {_listed(other) if other else 'the same'} here"


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _of_cache(found: dict[str, Any]) -> str:
    if found["entries"] is None:
        return f"{found['folder']}: not on this machine, so not examined"
    size = f"{found['entries']:,} programs, {found['bytes'] / 1e9:.2f} GB"
    return f"{found['folder']}: {size}; {_free(found)} on the disk"


def _free(found: dict[str, Any]) -> str:
    free = found["free_bytes"]
    return "memory unknown" if free is None else f"{free / 1e9:,.1f} GB free"
