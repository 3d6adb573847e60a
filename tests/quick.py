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

    To make one takes a quarter of the time that a program of one operation needs. A context keeps
    the types and locations of all its programs, so every ten have a new one. A program has one of
    its own if it is lowered while another one is, of which it would become a part, or while XLA
    partitions another one, in a thread of XLA's.
    """
    if not OLD:
        return
    from jax._src.interpreters import mlir

    new_context, uses, shared = mlir.make_ir_context, 0, None

    def context():
        nonlocal uses, shared
        in_main_thread = threading.current_thread() is threading.main_thread()
        if not in_main_thread or mlir.ir.Context.current is not None:
            return new_context()
        if uses % 10 == 0:
            shared = new_context()
        uses += 1
        return shared

    mlir.make_ir_context = context


def no_keys_without_a_cache() -> None:
    """Lets programs be compiled without the keys that a cache on disk would have for them.

    JAX makes a key of each program, by which it then looks in no folder: a 25th of the time that a
    program of one operation needs. Where there is a folder, all is as it was.
    """
    if not OLD:
        return
    import jax
    from jax._src import compiler

    key_of = compiler._get_cache_key

    def key(*args, **kwargs):
        if jax.config.values["jax_compilation_cache_dir"] is None:
            return None
        return key_of(*args, **kwargs)

    compiler._get_cache_key = key
