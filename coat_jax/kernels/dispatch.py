"""Decides whether an operation runs through XLA or through Triton.

    implementation=None      Triton on a GPU that has FP8 units and where jax-triton and a Triton
                             that it can use are installed, XLA everywhere else
    implementation="xla"     plain jax.numpy: the reference, on any device
    implementation="triton"  the kernel; an error where Triton cannot run

What has no kernel runs through XLA in each case: activations without one, heads of other widths
than powers of two, norms and activations that are not saved in FP8, leaves whose moments are in
FP32. The choice is made when a function is traced, and does not change silently afterwards.
"""

import functools
import importlib.metadata
import importlib.util
import os
import re
import warnings
from typing import Literal

import jax

from coat_jax.errors import UserError

Implementation = Literal["xla", "triton"]

FIRST_WITH_FP8 = 89  # Ada Lovelace; Hopper is 90
HOPPER = 90
TRITON_FROM, TRITON_BELOW = (3, 6), (3, 8)  # the versions with which the kernels compile
TRITON_REMEDY = "pip install 'triton>={}.{},<{}.{}'".format(*TRITON_FROM, *TRITON_BELOW)


def choose(implementation: Implementation | None) -> Implementation:
    """Returns the implementation to use; raises if the named one cannot run."""
    if implementation is None:
        could_run = triton_installed() and (gpu_capability() or 0) >= FIRST_WITH_FP8
        return "triton" if could_run and not _warned_of_triton() else "xla"
    if implementation == "triton":
        _require_triton()
    elif implementation != "xla":
        raise ValueError(f'implementation must be None, "xla" or "triton", not {implementation!r}.')
    return implementation


def choose_fp8(implementation: Implementation | None) -> Implementation:
    """`choose` for FP8 products: raises on a GPU without them, unless `implementation` is "xla"."""
    if implementation is None and not multiplies_fp8():
        raise UserError(
            f"This GPU has {described(gpu_capability() or 0)}; products in FP8 need 8.9 (Ada) or "
            "newer. Use precision=coat.BF16; or, in functions of coat.ops that take it, "
            'implementation="xla", which computes the same in FP32, slowly.'
        )
    return choose(implementation)


def multiplies_fp8() -> bool:
    """Whether the GPU has FP8 products; true without a GPU."""
    capability = gpu_capability()
    return capability is None or capability >= FIRST_WITH_FP8


def triton_installed() -> bool:
    """Whether the packages that the kernels need can be imported."""
    needed = ("triton", "torch") if interpreting() else ("triton", "jax_triton")
    return all(importlib.util.find_spec(name) for name in needed)


def unsupported_triton() -> str | None:
    """What is wrong with the installed version of Triton; None if the kernels compile with it."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a build under another name
        return None
    found = re.match(r"(\d+)\.(\d+)", version)  # 3.7rc1 counts as 3.7
    if found and TRITON_FROM <= (int(found[1]), int(found[2])) < TRITON_BELOW:
        return None
    first, below = (".".join(map(str, v)) for v in (TRITON_FROM, TRITON_BELOW))
    return f"Triton {version} is installed, and the kernels need at least {first} and below {below}"


@functools.cache
def _warned_of_triton() -> bool:
    """Whether Triton cannot compile the kernels, of which the first call warns."""
    wrong = None if interpreting() else unsupported_triton()
    if wrong is not None:
        warnings.warn(f"XLA replaces Triton: {wrong}. {TRITON_REMEDY}", stacklevel=2)
    return wrong is not None


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter on the CPU, which is slow and for tests only."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def gpu_capability() -> int | None:
    """The first GPU's compute capability, as in 90 for 9.0; 0 for AMD's; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    major, _, minor = jax.local_devices()[0].compute_capability.partition(".")
    return 10 * int(major) + int(minor) if major.isdecimal() else 0


def described(capability: int) -> str:
    """A GPU's compute capability, in words."""
    return f"compute capability {capability / 10:.1f}" if capability else "no compute capability"


def target_capability() -> int:
    """The compute capability to compile for: the GPU's, or without one Hopper's."""
    return gpu_capability() or HOPPER


def _require_triton() -> None:
    if not triton_installed():
        raise ImportError(
            'implementation="triton" needs the packages triton and jax-triton: '
            "pip install 'coat_jax[gpu]', or use implementation=\"xla\"."
        )
    wrong = None if interpreting() else unsupported_triton()
    if wrong is not None:
        raise ImportError(f'{wrong}. {TRITON_REMEDY}, or use implementation="xla".')
    capability = gpu_capability()
    if capability is not None and capability < FIRST_WITH_FP8:
        raise RuntimeError(
            f"This GPU has {described(capability)}; FP8 kernels need 8.9 (Ada) or newer. "
            'Use implementation="xla".'
        )
