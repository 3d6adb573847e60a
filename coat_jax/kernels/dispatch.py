"""Decides whether an operation runs through XLA or through Triton.

    implementation=None      Triton on a GPU that has FP8 units and where jax-triton is installed,
                             XLA everywhere else
    implementation="xla"     plain jax.numpy: the reference, on any device
    implementation="triton"  the kernel; an error where Triton cannot run

What has no kernel runs through XLA in each case: activations without one, heads of other widths
than powers of two, norms and activations that are not saved in FP8, leaves whose moments are in
FP32. The choice is made when a function is traced, and does not change silently afterwards.
"""

import functools
import importlib.util
from typing import Literal

import jax

from coat_jax.errors import UserError

Implementation = Literal["xla", "triton"]

FIRST_WITH_FP8 = 89  # Ada Lovelace; Hopper is 90
HOPPER = 90
SLOW_INT8 = (103,)  # B300, which multiplies INT8 at a thirtieth of FP8's rate


def choose(implementation: Implementation | None, *, products: bool = False) -> Implementation:
    """Returns the implementation to use; raises if the named one cannot run.

    On a GPU without FP8 units None stands for "xla", but raises if the operation computes
    `products` in FP8, which "xla" would compute in FP32.
    """
    if implementation not in (None, "xla", "triton"):
        raise ValueError(f'implementation must be None, "xla" or "triton", not {implementation!r}.')
    capability = gpu_capability()
    if capability is not None and capability < FIRST_WITH_FP8:
        if implementation == "triton" or (products and implementation is None):
            raise UserError(
                f"This GPU has {describe_capability(capability)}; kernels and products in FP8 need "
                "8.9 (Ada) or newer. Use precision=coat.BF16; or, in functions that take it, "
                'implementation="xla", which computes the same, products in FP32 and slowly.'
            )
        return "xla"
    if implementation is None:
        return "triton" if capability is not None and triton_installed() else "xla"
    if implementation == "triton" and not triton_installed():
        raise ImportError(
            'implementation="triton" needs the packages triton and jax-triton: '
            "pip install 'coat_jax[gpu]', or use implementation=\"xla\"."
        )
    return implementation


def require_fast_int8() -> None:
    """Raises on a GPU that multiplies INT8 far more slowly than FP8."""
    if (capability := gpu_capability()) in SLOW_INT8:
        raise UserError(
            f'forward_products="int8" is slow on this GPU, of {describe_capability(capability)}: '
            "its products in INT8 take 30 times as long as those in FP8. Use precision=coat.COAT, "
            "or coat.COAT_BF16_FORWARD for a lower loss."
        )


def triton_installed() -> bool:
    """Whether the packages that the kernels need can be imported."""
    return all(importlib.util.find_spec(name) for name in ("triton", "jax_triton"))


@functools.cache
def gpu_capability() -> int | None:
    """The first GPU's compute capability, as in 90 for 9.0; 0 for AMD's; None without a GPU."""
    if jax.default_backend() != "gpu":
        return None
    major, _, minor = jax.local_devices()[0].compute_capability.partition(".")
    return 10 * int(major) + int(minor) if major.isdecimal() else 0


def describe_capability(capability: int) -> str:
    """A GPU's compute capability, in words."""
    return f"compute capability {capability / 10:.1f}" if capability else "no compute capability"


def target_capability() -> int:
    """The compute capability to compile for: the GPU's, or without one Hopper's."""
    return gpu_capability() or HOPPER
