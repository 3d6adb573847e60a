"""Times of short calls whose operands come from HBM, as those of a model's layers do.

A program calls a function with the same x and one operand after another. Operands rotate through
more memory than the GPU's L2 cache has. Programs run in turns; what counts is how long their
kernels run.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from experiments.hopper import OPTIONS
from experiments.timing import kernels_ms, medians_ms

ALL_OPERANDS = 256e6  # bytes: five times an H200's L2 cache
OF_A_PROGRAM = 4e8  # bytes
MOST_CALLS = 64  # of a program
BATCHES = {"warmup": 1, "batches": 5, "calls": 3}
# Calls in a CUDA graph that do not depend on each other must not run at the same time.
BY_XLA: dict[str, Any] = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}
BY_CUBLAS: dict[str, Any] = {**OPTIONS, **BY_XLA}

Case = dict[str, Any]


class Program(NamedTuple):
    """A compiled program, its arguments, and how often it calls the function."""

    compiled: Callable[..., Any]
    arguments: tuple[Any, ...]
    calls: int


def operands_needed(size: int) -> int:
    """How many operands of `size` bytes do not fit into the L2 cache."""
    return min(math.ceil(ALL_OPERANDS / size), MOST_CALLS)


def repeat(
    call: Callable[[Any, Any], Any],
    x: Any,
    operands: Any,
    size: int,
    *,
    take: Callable[[Any, int], Any] | None = None,
    options: dict[str, Any] = BY_CUBLAS,
) -> Program:
    """A program that calls `call(x, operand)` with one operand after another.

    Args:
        call: the function.
        x: its first argument.
        operands: a list of second arguments, or what `take` takes them from.
        size: bytes of an operand.
        take: operand i, of any i.
        options: of XLA.
    """
    calls = min(math.ceil(OF_A_PROGRAM / size), MOST_CALLS)

    def run(x: Any, operands: Any) -> list[Any]:
        results = []
        for i in range(calls):
            operand = operands[i % len(operands)] if take is None else take(operands, i)
            result = call(x, operand)
            # Otherwise XLA would share work between calls, as they have the same x.
            x, result = lax.optimization_barrier((x, result))
            results.append(result)
        return results

    lowered = jax.jit(run).lower(x, operands)
    return Program(lowered.compile(compiler_options=options), (x, operands), calls)


def times_us(programs: list[Program]) -> list[float]:
    """Microseconds of one call of each program's function."""
    results: list[Any] = [None]

    def run_of(program: Program) -> Any:
        def call() -> None:
            results[0] = program.compiled(*program.arguments)

        return call, lambda: jax.block_until_ready(results[0])

    runs = [run_of(program) for program in programs]
    times = kernels_ms(runs) if jax.default_backend() == "gpu" else medians_ms(runs, **BATCHES)
    return [1e3 * ms / program.calls for ms, program in zip(times, programs, strict=True)]


def nbytes(tree: Any) -> int:
    """Bytes of arrays in memory, where two codes of JAX's INT4 share a byte."""
    bits = (
        (4 if array.dtype == jnp.int4 else 8 * array.dtype.itemsize, array.size)
        for array in jax.tree.leaves(tree)
    )
    return sum(of_one * size // 8 for of_one, size in bits)


def lines(cases: list[Case], most: int | None = None) -> Iterator[str]:
    """Microseconds, TB/s, and how many times as fast as the first case."""
    for case in cases[:most]:
        rate, ratio = case["bytes"] / case["us"] / 1e6, cases[0]["us"] / case["us"]
        yield f"    {case['way']:46} {case['us']:8.1f} us {rate:6.2f} TB/s {ratio:6.2f}"


def ranking(cases: list[Case], most: int = 8) -> Iterator[str]:
    """The ways that are fastest in the geometric mean over all values of "of"."""
    logs: dict[str, list[float]] = {}
    for case in cases:
        best = min(other["us"] for other in cases if other["of"] == case["of"])
        logs.setdefault(case["way"], []).append(math.log(case["us"] / best))
    means = {way: math.exp(sum(of_way) / len(of_way)) for way, of_way in logs.items()}
    yield "times the best of each, in the geometric mean:"
    for way in sorted(means, key=means.__getitem__)[:most]:
        yield f"    {way:46} {means[way]:6.3f}"
