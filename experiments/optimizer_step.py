"""How long one optimizer step takes, and what memory it needs beyond parameters and state.

Claim: AdamW with 8-bit moments, in one pass and in place, is faster than AdamW with FP32
moments, because it moves fewer bytes; and it allocates nothing.

    python -m experiments.optimizer_step                 on a GPU: 2^28 parameters and Llama-2-7B
    python -m experiments.optimizer_step --elements 20   smoke test, anywhere

"24 bits" are BF16 parameters with corrections: they must be no slower than optax.adamw with FP32
parameters, and take 7.1 bytes a parameter with BF16 gradients.

Ours, optax, torch, torchao and bitsandbytes run in one go on one device, each framework in a
process of its own so that none holds memory that another needs. A framework that is not
installed is skipped with a line that says so. JAX optimizers get BF16 gradients; torch's take
gradients in the parameters' dtype only, so ours is also measured with those. Times are medians
over batches of steps, the device drained before and after each; parameters and gradients are
random. "extra" is what a step allocates: XLA's temporary buffers, or the rise of torch's
allocator.
"""

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.command import parser_of
from experiments.workers import compiled, reason, run_worker

BATCHES = 7

Shapes = list[tuple[int, ...]]
Case = dict[str, Any]


def one_leaf(log2_elements: int) -> Shapes:
    """A single matrix of 2^log2_elements parameters."""
    rows = 2 ** (log2_elements // 2)
    return [(rows, 2**log2_elements // rows)]


def llama2_7b() -> Shapes:
    """The parameters of Llama-2-7B, every layer's by itself."""
    hidden, ffn, vocabulary = 4096, 11008, 32000
    layer = [(hidden, hidden)] * 4 + [(hidden, ffn)] * 2 + [(ffn, hidden)] + [(hidden,)] * 2
    return [(vocabulary, hidden), *layer * 32, (hidden,), (hidden, vocabulary)]


def main() -> None:
    """Measures every framework in its own process, prints the table and writes the results."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("--elements", type=int, default=28, help="log2 of the one leaf's size")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        framework, model = options.worker
        shapes = llama2_7b() if model == "llama2_7b" else one_leaf(options.elements)
        for figures in FRAMEWORKS[framework](shapes):
            print(json.dumps({"model": model, **figures}), flush=True)
        return
    from experiments import records

    if options.draw:
        draw(options.out)
        return
    models = ["one_leaf", "llama2_7b"] if options.elements >= 28 else ["one_leaf"]
    cases: list[Case] = []
    for model in models:
        for framework in FRAMEWORKS:
            cases += _run_worker(framework, model, options.elements)
            figures = {"elements": 2**options.elements, "cases": cases}
            records.write(options.out / "optimizer_step.json", figures)
    _print_table(cases)
    draw(options.out)


def draw(folder: Path) -> None:
    """Draws the times for the one leaf as bars, ours in colour."""
    import matplotlib.pyplot as plt

    from experiments import records

    figures = records.read(folder / "optimizer_step.json")
    cases = [c for c in figures["cases"] if c["model"] == "one_leaf" and "skipped" not in c]
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
        for axes, dtype in zip(panels, ("float32", "bfloat16"), strict=True):
            shown = [c for c in cases if c["params"] == dtype]
            shown.sort(key=lambda c: -c["ms"])
            names = [f"{c['optimizer']}\n{c['grads']} gradients" for c in shown]
            colors = [
                records.ACCENT if c["optimizer"].startswith("coat") else records.PALE for c in shown
            ]
            bars = axes.barh(names, [c["ms"] for c in shown], color=colors, height=0.7)
            axes.bar_label(bars, [f"{c['ms']:.2f}" for c in shown], padding=3, fontsize=8)
            axes.tick_params(axis="y", labelsize=7)
            axes.set_title(f"{dtype} parameters")
            axes.set_xlabel("milliseconds a step")
            axes.margins(x=0.12)
        figure.suptitle(
            f"One optimizer step over 2^{math.log2(figures['elements']):.0f} parameters"
        )
        figure.savefig(folder / "optimizer_step.png")


def _run_worker(framework: str, model: str, elements: int) -> list[Case]:
    where = "--elements", str(elements), "--worker", framework, model
    ended = run_worker("experiments.optimizer_step", *where)
    cases: list[Case] = ended.results
    for case in cases:
        print(f"{model:10} {_name(case):60} {case['ms']:9.3f} ms", flush=True)
    if ended.code:
        why = reason(ended.stderr)
        print(f"{model:10} {framework} stopped after {len(cases)} cases: {why}", flush=True)
        cases.append({"model": model, "optimizer": framework, "skipped": why})
    return cases


# --- JAX -------------------------------------------------------------------------------------


def _jax_cases(shapes: Shapes) -> Iterator[Case]:
    import jax.numpy as jnp
    import optax

    import coat_jax as coat

    def chained(tx: Any) -> tuple[Any, Any]:
        # Results in the order of what is donated: XLA pairs buffers of the same shape in order,
        # and copies where parameters would land in the memory of a moment.
        def step(params: Any, grads: Any, state: Any) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return tx.init, step

    settings = {"b2": 0.95, "weight_decay": 0.1}
    adamw = chained(optax.adamw(1e-4, **settings))
    fused = tuple(coat.optax.fused_fp8_adamw(1e-4, **settings))
    rounding = tuple(coat.optax.fused_fp8_adamw(1e-4, **settings, round_params=True))
    corrected, corrected_rounding = (
        tuple(
            coat.optax.fused_fp8_adamw(1e-4, **settings, correct_params=True, round_params=rounds)
        )
        for rounds in (False, True)
    )
    chain = chained(coat.optax.fp8_adamw(1e-4, **settings))
    through_xla = chained(coat.optax.fp8_adamw(1e-4, **settings, implementation="xla"))
    f32, bf16 = jnp.float32, jnp.bfloat16
    cases = [
        ("optax.adamw", adamw, f32, bf16),
        ("optax.adamw", adamw, f32, f32),
        ("optax.adamw", adamw, bf16, bf16),
        ("coat fused_fp8_adamw", fused, f32, bf16),
        ("coat fused_fp8_adamw", fused, f32, f32),
        ("coat fused_fp8_adamw", fused, bf16, bf16),
        ("coat fused_fp8_adamw, stochastic", rounding, bf16, bf16),
        ("coat fused_fp8_adamw, 24 bits", corrected, bf16, bf16),
        ("coat fused_fp8_adamw, 24 bits, stochastic", corrected_rounding, bf16, bf16),
        ("coat fp8_adamw chain", chain, f32, bf16),
        ("coat fp8_adamw chain", chain, bf16, bf16),
        ("coat fp8_adamw chain, XLA", through_xla, f32, bf16),
    ]
    for name, (init, step), param_dtype, grad_dtype in cases:
        if len(shapes) > 1 and ("XLA" in name or grad_dtype != bf16):
            continue
        yield _measure_jax(name, init, step, shapes, param_dtype, grad_dtype)


def _measure_jax(
    name: str, init: Any, step: Any, shapes: Shapes, param_dtype: Any, grad_dtype: Any
) -> Case:
    import jax

    @functools.partial(jax.jit, static_argnums=(1, 2, 3))
    def random(key: Any, shape: tuple[int, ...], dtype: Any, scale: float) -> Any:
        return jax.random.normal(key, shape, dtype) * scale

    keys = jax.random.split(jax.random.key(0), len(shapes))
    params = [random(key, shape, param_dtype, 1.0) for key, shape in zip(keys, shapes, strict=True)]
    grads = [random(key, shape, grad_dtype, 1e-3) for key, shape in zip(keys, shapes, strict=True)]
    state = jax.jit(init)(params)
    elements = sum(p.size for p in params)
    jitted = jax.jit(step, donate_argnums=(0, 2))
    program, compile_seconds = compiled(lambda: jitted.lower(params, grads, state))
    moments = sum(a.nbytes for a in jax.tree.leaves(state) if a.ndim)

    steps = _steps(shapes)

    def run() -> None:
        nonlocal params, state
        for _ in range(steps):
            params, state = program(params, grads, state)
        jax.block_until_ready(params)

    return {
        "optimizer": name,
        "params": jax.numpy.dtype(param_dtype).name,
        "grads": jax.numpy.dtype(grad_dtype).name,
        "ms": _median_ms(run, steps),
        "extra_bytes": program.memory_analysis().temp_size_in_bytes,
        "state_bytes_per_param": moments / elements,
        "parameters": elements,
        "compile_seconds": compile_seconds,
    }


# --- torch -----------------------------------------------------------------------------------


def _torch_cases(shapes: Shapes) -> Iterator[Case]:
    import torch

    def make(params: Any) -> Any:
        return torch.optim.AdamW(params, 1e-4, (0.9, 0.95), weight_decay=0.1, fused=True)

    yield from _measure_both("torch AdamW fused", make, shapes)


def _torchao_cases(shapes: Shapes) -> Iterator[Case]:
    from torchao.optim import AdamW8bit, AdamWFp8

    for optimizer in (AdamWFp8, AdamW8bit):

        def make(params: Any, optimizer: Any = optimizer) -> Any:
            return optimizer(params, 1e-4, (0.9, 0.95), weight_decay=0.1)

        yield from _measure_both(f"torchao {optimizer.__name__}", make, shapes)


def _bitsandbytes_cases(shapes: Shapes) -> Iterator[Case]:
    import bitsandbytes

    def make(params: Any) -> Any:
        return bitsandbytes.optim.AdamW8bit(params, 1e-4, (0.9, 0.95), weight_decay=0.1)

    yield from _measure_both("bitsandbytes AdamW8bit", make, shapes)


def _measure_both(name: str, make: Any, shapes: Shapes) -> Iterator[Case]:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        yield _measure_torch(name, make, shapes, dtype)
        torch.cuda.empty_cache()


def _measure_torch(name: str, make: Any, shapes: Shapes, dtype: Any) -> Case:
    import torch

    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=dtype))
        param.grad = torch.randn(shape, device="cuda", dtype=dtype) * 1e-3
        params.append(param)
    elements = sum(param.numel() for param in params)
    before = torch.cuda.memory_allocated()
    optimizer = make(params)
    optimizer.step()
    torch.cuda.synchronize()
    state_bytes = torch.cuda.memory_allocated() - before

    steps = _steps(shapes)

    def run() -> None:
        for _ in range(steps):
            optimizer.step()
        torch.cuda.synchronize()

    run()
    torch.cuda.reset_peak_memory_stats()
    live = torch.cuda.memory_allocated()
    ms = _median_ms(run, steps)
    return {
        "optimizer": name,
        "params": str(dtype).removeprefix("torch."),
        "grads": str(dtype).removeprefix("torch."),
        "ms": ms,
        "extra_bytes": torch.cuda.max_memory_allocated() - live,
        "state_bytes_per_param": state_bytes / elements,
        "parameters": elements,
    }


FRAMEWORKS: dict[str, Callable[[Shapes], Iterator[Case]]] = {
    "jax": _jax_cases,
    "torch": _torch_cases,
    "torchao": _torchao_cases,
    "bitsandbytes": _bitsandbytes_cases,
}


def _steps(shapes: Shapes) -> int:
    """Steps between two drains of the device: enough to hide what the drain costs."""
    return 50 if len(shapes) == 1 else 5


def _median_ms(run: Callable[[], None], steps: int) -> float:
    """Median time of a step; `run` does `steps` of them and drains the device."""
    run()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / steps * 1e3)
    return statistics.median(times)


def _name(case: Case) -> str:
    return f"{case['optimizer']} ({case['params']} params, {case['grads']} grads)"


def _print_table(cases: list[Case]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One optimizer step")
    for column in ("model", "optimizer", "params", "grads"):
        table.add_column(column)
    for column in ("ms", "extra MiB", "state B/param"):
        table.add_column(column, justify="right")
    for case in cases:
        cells = [case.get(key, "") for key in ("model", "optimizer", "params", "grads")]
        if "skipped" in case:
            table.add_row(*cells, "skipped", "", "")
            continue
        extra = case["extra_bytes"] / 2**20
        state = case["state_bytes_per_param"]
        table.add_row(*cells, f"{case['ms']:.3f}", f"{extra:.1f}", f"{state:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
