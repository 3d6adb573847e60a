"""How long a step of any optax transformation takes with its moments in FP8, and what memory.

Claim: with `in_place(compress(tx))` any transformation steps in place, on moments of a byte a
parameter. State besides moments, such as the second parameters of schedule_free, is not compressed.

    python -m experiments.in_place_step                  on a GPU: 2^28 BF16 parameters
    python -m experiments.in_place_step --elements 20    smoke test, anywhere

    optax          tx.update and apply_updates, jitted and donated; most states are in BF16
    in_place       `coat.optax.in_place(tx)`: the state of FP32 parameters for BF16 ones
    compressed     `coat.optax.in_place(coat.optax.compress(tx))`: moments in FP8

Parameters, one matrix, and gradients are random and in BF16. Each case has a process of its own.
Times are medians over batches of steps; "extra" is what XLA's program allocates during a step.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.command import parser_of
from experiments.workers import compiled, outcome, run_worker

BATCHES, STEPS = 7, 20
WAYS = ("optax", "in_place", "compressed")

Case = dict[str, Any]


def transformations() -> dict[str, Callable[[], Any]]:
    """The measured transformations, by name."""
    import optax

    return {
        "lion": lambda: optax.lion(1e-4, weight_decay=0.1),
        "sgd": lambda: optax.sgd(1e-4, momentum=0.9),
        "adafactor": lambda: optax.adafactor(1e-4, momentum=0.9),
        "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-4, weight_decay=0.1),
    }


def main() -> None:
    """Measures every case in its own process, prints a line for each and writes the results."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("--elements", type=int, default=28, help="log2 of the matrix's size")
    parser.add_argument("--worker", nargs=2, metavar=("NAME", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        name, way = options.worker
        print(json.dumps({"case": name, "way": way, **measure(name, way, options.elements)}))
        return
    from experiments import records

    if not options.draw:
        cases: list[Case] = []
        for name in transformations():
            for way in WAYS:
                cases.append(_in_a_process(name, way, options.elements))
                print(_line(cases[-1]), flush=True)
                figures = {"elements": 2**options.elements, "cases": cases}
                records.write(options.out / "in_place_step.json", figures)
    draw(options.out)


def _in_a_process(name: str, way: str, elements: int) -> Case:
    ended = run_worker(
        "experiments.in_place_step", "--elements", str(elements), "--worker", name, way
    )
    return {"case": name, "way": way, **outcome(ended)}


def _line(case: Case) -> str:
    head = f"{case['case']:14} {case['way']:11}"
    if "failed" in case:
        return f"{head} failed: {case['failed']}"
    return (
        f"{head} {case['ms']:9.3f} ms   state {case['state_bytes_per_param']:6.3f} B/param   "
        f"extra {case['extra_bytes'] / 2**20:8.1f} MiB"
    )


def step_of(name: str, way: str) -> tuple[Callable, Callable]:
    """`init` and `step(params, grads, state)` of a case."""
    import optax

    import coat_jax as coat

    tx = transformations()[name]()
    if way != "optax":
        optimizer = coat.optax.in_place(coat.optax.compress(tx) if way == "compressed" else tx)
        return optimizer.init, optimizer.step

    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def measure(name: str, way: str, log2_elements: int) -> Case:
    """Time and memory of a case."""
    import jax
    import jax.numpy as jnp

    shape = (2 ** (log2_elements // 2), 2 ** (log2_elements - log2_elements // 2))
    init, step = step_of(name, way)
    random = jax.jit(lambda seed, scale: scale * jax.random.normal(jax.random.key(seed), shape))
    params, grads = (
        {"w": random(seed, scale).astype(jnp.bfloat16)} for seed, scale in ((0, 1.0), (1, 1e-3))
    )
    # Some states hold parameters as they are: a copy, because both are donated.
    state = jax.tree.map(jnp.copy, jax.jit(init)(params))
    jitted = jax.jit(step, donate_argnums=(0, 2))
    program, compile_seconds = compiled(lambda: jitted.lower(params, grads, state))

    def run() -> None:
        nonlocal params, state
        for _ in range(STEPS):
            params, state = program(params, grads, state)
        jax.block_until_ready(params)

    run()
    seconds = []
    for _ in range(BATCHES):
        begin = time.perf_counter()
        run()
        seconds.append((time.perf_counter() - begin) / STEPS)
    return {
        "ms": statistics.median(seconds) * 1e3,
        "extra_bytes": program.memory_analysis().temp_size_in_bytes,
        "state_bytes_per_param": sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)
        / 2**log2_elements,
        "compile_seconds": compile_seconds,
    }


def draw(folder: Path) -> None:
    """Draws time and state of each case, ours in colour."""
    import matplotlib.pyplot as plt

    from experiments import records

    figures = records.read(folder / "in_place_step.json")
    shown = [case for case in figures["cases"] if "failed" not in case][::-1]
    names = [f"{case['case']}, {case['way']}" for case in shown]
    colors = [records.PALE if case["way"] == "optax" else records.ACCENT for case in shown]
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.35 * len(shown) + 1.4))
        for axes, key, title in (
            (left, "ms", "milliseconds a step"),
            (right, "state_bytes_per_param", "bytes of state a parameter"),
        ):
            values = [case[key] for case in shown]
            bars = axes.barh(names, values, color=colors, height=0.7)
            axes.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8)
            axes.set_title(title)
            axes.margins(x=0.15)
        figure.suptitle(f"One step over {figures['elements']:,} BF16 parameters")
        figure.savefig(folder / "in_place_step.png")


if __name__ == "__main__":
    main()
