"""Options of XLA that make it compile faster for a CPU.

XLA's own passes stay as they are; LLVM optimizes little of what they made. Programs of tests run a
few times, on little data: compiling them takes longer than they do, four times as long otherwise.
"""

import importlib.metadata
import os

OPTIONS: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,  # workers share the processors already
    "xla_cpu_enable_platform_dependent_math": False,  # a library that is linked to each program
}
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False  # later ones have no such option
# For programs of hundreds of steps, which run longer than they take to compile; for two that must
# round alike, whose products and sums LLVM then contracts in the same places; and where the
# logarithm of a group's largest element must be exact. All as for users where XLA_FLAGS say so.
AS_FOR_USERS = "--xla_backend_optimization_level=3" in os.environ.get("XLA_FLAGS", "")
OPTIMIZED = {} if AS_FOR_USERS else OPTIONS | {"xla_backend_optimization_level": 1}


def flags(options: dict[str, int | bool]) -> str:
    """Options as XLA_FLAGS has them."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())


FLAGS = flags(OPTIONS)
