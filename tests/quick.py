"""What makes JAX and XLA compile faster for a CPU.

XLA's own passes stay as they are; LLVM optimizes little of what they made. Programs of tests run a
few times, on little data: compiling them takes longer than they do, four times as long otherwise.
"""

import importlib.metadata
import os
import threading

OPTIONS: dict[str, int | bool] = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,  # workers share the processors already
    "xla_cpu_enable_platform_dependent_math": False,  # a library that is linked to each program
}
OLD = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11)
if OLD:
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


def share_contexts() -> None:
    """Lets ten programs in a row be lowered in one context of MLIR, as later releases of JAX do.

    To make one takes a quarter of the time that a program of one operation needs. In a context,
    types and locations stay that programs had, so there must be others; and a program that is
    lowered while another one is would become a part of it.
    """
    if not OLD:
        return
    from jax._src.interpreters import mlir

    new_context, of_thread = mlir.make_ir_context, threading.local()

    def context():
        if mlir.ir.Context.current is not None:
            return new_context()
        uses, shared = getattr(of_thread, "last", (10, None))
        if uses == 10:
            uses, shared = 0, new_context()
        of_thread.last = uses + 1, shared
        return shared

    mlir.make_ir_context = context
