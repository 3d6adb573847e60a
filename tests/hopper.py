"""Reads what was compiled for an H100 on a machine that has none."""

import re
from typing import Any

from experiments.hopper import hopper_mesh

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)


def can_compile_for_hopper() -> bool:
    """Whether XLA's CUDA plugin is installed."""
    try:
        hopper_mesh((4,), ("x",))
    except (NotImplementedError, RuntimeError, ImportError):
        return False
    return True


def collectives(compiled: Any) -> list[str]:
    """The names of the collectives in a program."""
    return COLLECTIVE.findall(compiled.as_text())


def kernel_calls(compiled: Any) -> int:
    """How many Triton kernels a program launches."""
    return compiled.as_text().count('custom_call_target="triton_kernel_call"')


def copies(compiled: Any) -> int:
    """How many copies of arrays (not scalars) a program makes."""
    return len(re.findall(r"= \w+\[\d\S* copy(?:-start)?\(", compiled.as_text()))
