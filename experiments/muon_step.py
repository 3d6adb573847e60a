"""How long one step of Muon takes on a Llama's matrices, beside the matrix products that it needs.

Claim: `coat.optax.fp8_muon` takes at most 1.3 times as long as its Newton-Schulz products alone,
on one GPU and on several, and stores about a byte of state for each parameter.

    python -m experiments.muon_step                                    8 layers of Llama-2-7B
    python -m experiments.muon_step --model tiny --layers 2            smoke test, anywhere

All GPUs that are seen share the step, every matrix sharded by rows over all of them. Parameters and
gradients are random BF16 matrices, one array for each weight of each layer.

    products            x x^T, A^2 and B x of every Newton-Schulz step in BF16, and nothing else;
                        every GPU multiplies its equal share of the matrices, without communication
    coat fp8_muon       in place, momentum in 8 bits
    optax muon          jitted and donated; products in the dtype of its momentum, BF16 or FP32
    torch Muon          torch.optim.Muon; on several GPUs on DTensors

Each case runs in a process of its own. Times are medians over batches of steps, the devices drained
before and after each. "extra" is what a step allocates on one GPU beyond parameters, gradients and
state: XLA's temporary buffers, or the rise of torch's allocator. The peak is the fullest GPU's
allocator's, with everything in it; without a GPU, what XLA planned.
"""

import argparse
import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.command import parser_of
from experiments.workers import compiled, outcome, run_worker

ITERATIONS = 5  # of Newton-Schulz, everywhere
BATCHES, STEPS = 5, 3
SETTINGS = {"learning_rate": 1e-3, "weight_decay": 0.1, "consistent_rms": 0.2}

Shapes = list[tuple[int, int]]
Case = dict[str, Any]


def matrices(model: str, layers: int) -> Shapes:
    """The hidden matrices of the first layers of a model in `coat.models.PRESETS`."""
    from coat_jax import models

    config = models.config_of(model)
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = [(config.width, queries), *[(config.width, keys)] * 2, (queries, config.width)]
    mlp = [*[(config.width, config.ffn)] * 2, (config.ffn, config.width)]
    return [*attention, *mlp] * layers


def flops(shapes: Shapes) -> int:
    """FLOPs of the products of one step."""
    sides = [(min(shape), max(shape)) for shape in shapes]
    return ITERATIONS * sum(4 * m * m * n + 2 * m**3 for m, n in sides)


def main() -> None:
    """Measures every case in its own process, prints a line for each and writes the results."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("cases", nargs="*", help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--model", default="llama2_7b", help="a name in coat.models.PRESETS")
    parser.add_argument("--layers", type=int, default=8, help="how many layers' matrices")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]!r} is none of {', '.join(CASES)}.")
    if options.worker:
        (name,) = options.cases
        measured = CASES[name](matrices(options.model, options.layers))
        print(json.dumps({"case": name, **measured}), flush=True)
        return
    from experiments import records

    path = _path(options.out)
    if not options.draw:
        shapes = matrices(options.model, options.layers)
        figures: dict[str, Any] = {
            "model": options.model,
            "layers": options.layers,
            "parameters": sum(map(math.prod, shapes)),
            "flops": flops(shapes),
            "cases": [],
        }
        for name in options.cases or CASES:
            figures["cases"].append(_in_a_process(name, options))
            _compare_with_products(figures["cases"])
            print(_line(figures["cases"][-1]), flush=True)
            records.write(path, figures)
    draw(path)


def _path(folder: Path) -> Path:
    """The results of one GPU, or of that many."""
    import jax

    gpus = jax.device_count()
    return folder / ("muon_step" + (f"_{gpus}_gpus" if gpus > 1 else "") + ".json")


def _in_a_process(name: str, options: argparse.Namespace) -> Case:
    sizes = "--model", options.model, "--layers", str(options.layers)
    ended = run_worker("experiments.muon_step", name, "--worker", *sizes)
    return {"case": name, **outcome(ended)}


def _compare_with_products(cases: list[Case]) -> None:
    """Adds to every case how many times as long as the products alone it takes."""
    alone = next((case["ms"] for case in cases if case["case"] == "products" and "ms" in case), 0)
    for case in cases:
        if alone and "ms" in case:
            case["over_products"] = case["ms"] / alone


def _line(case: Case) -> str:
    if "failed" in case:
        return f"{case['case']:28} failed: {case['failed']}"
    line = f"{case['case']:28} {case['ms']:10.2f} ms"
    if "over_products" in case:
        line += f"   {case['over_products']:5.2f} x products"
    if "peak" in case:
        line += f"   peak {case['peak'] / 1e9:6.2f} GB   extra {case['extra_bytes'] / 1e9:6.2f} GB"
        line += f"   state {case['state_bytes_per_param']:.3f} B/param"
    return line


def draw(path: Path) -> None:
    """Draws the time of each case, and the peak of its memory."""
    import matplotlib.pyplot as plt

    from experiments import records

    record = json.loads(path.read_text())
    figures, gpus = record["figures"], record["parents"]["hardware"]["devices"]
    shown = [case for case in figures["cases"] if "failed" not in case][::-1]
    names = [case["case"] for case in shown]
    colors = [records.ACCENT if name.startswith("coat") else records.PALE for name in names]
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.5 * len(shown) + 1.6))
        for axes, values, title, form in (
            (left, [case["ms"] for case in shown], "milliseconds a step", "{:,.0f}"),
            (right, [case.get("peak", 0) / 1e9 for case in shown], "peak memory, GB", "{:.1f}"),
        ):
            bars = axes.barh(names, values, color=colors, height=0.7)
            labels = [form.format(value) if value else "" for value in values]
            axes.bar_label(bars, labels, padding=3, fontsize=8)
            axes.set_title(title)
            axes.margins(x=0.15)
        where = "one GPU" if gpus == 1 else f"{gpus} GPUs"
        figure.suptitle(
            f"One step of Muon on {figures['layers']} layers of {figures['model']}, {where}"
        )
        figure.savefig(path.with_suffix(".png"))


def _median_ms(run: Callable[[], None]) -> float:
    """Median time of a step; `run` does `STEPS` of them and drains the devices."""
    run()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(times)


# --- JAX -------------------------------------------------------------------------------------


def optimizer_of(name: str) -> tuple[Callable, Callable]:
    """`init` and `step(params, grads, state)` of a JAX case."""
    import jax.numpy as jnp
    import optax

    import coat_jax as coat

    if name == "coat fp8_muon":
        fused = coat.optax.in_place(coat.optax.fp8_muon(**SETTINGS, ns_steps=ITERATIONS))
        return fused.init, fused.step
    dtype = jnp.float32 if "FP32" in name else jnp.bfloat16
    tx = optax.contrib.muon(**SETTINGS, ns_steps=ITERATIONS, mu_dtype=dtype)

    def step(params: Any, grads: Any, state: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx.init, step


def step_of(name: str, shapes: Shapes, mesh: Any) -> tuple[Any, Any, Any]:
    """The jitted step of a JAX case on a mesh, and the shapes of its parameters and state."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from coat_jax.optax import FusedOptimizer, state_shardings
    from coat_jax.training.cluster.communication import communication_options

    optimizer = FusedOptimizer(*optimizer_of(name))
    by_rows = NamedSharding(mesh, P(mesh.axis_names))
    params = {
        f"matrix_{i}": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=by_rows)
        for i, shape in enumerate(shapes)
    }
    shardings: Any = state_shardings(optimizer, params)  # type: ignore[arg-type]
    state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(optimizer.init, params),
        shardings,
    )
    jitted = jax.jit(
        optimizer.step,
        donate_argnums=(0, 2),
        out_shardings=(by_rows, shardings),
        compiler_options=communication_options(mesh),
    )
    return jitted, params, state


def _measure_jax(name: str, shapes: Shapes) -> Case:
    import jax

    from coat_jax.training.cluster.communication import use_one_queue
    from coat_jax.training.cluster.mesh import make_mesh
    from coat_jax.training.config import MeshConfig

    use_one_queue()
    mesh = make_mesh(MeshConfig())
    step, like, state_like = step_of(name, shapes, mesh)
    with jax.set_mesh(mesh):
        program, compile_seconds = compiled(lambda: step.lower(like, like, state_like))

    def random(seed: int, scale: float) -> Any:
        def one(key: Any, leaf: Any) -> Any:
            sharded = jax.jit(
                lambda key: jax.random.normal(key, leaf.shape, leaf.dtype) * scale,
                out_shardings=leaf.sharding,
            )
            return sharded(key)

        keys = jax.random.split(jax.random.key(seed), len(like))
        return {at: one(key, like[at]) for at, key in zip(like, keys, strict=True)}

    with jax.set_mesh(mesh):
        params, grads = random(0, 0.02), random(1, 1e-3)
        init = optimizer_of(name)[0]
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state_like)
        state = jax.jit(init, out_shardings=shardings)(params)

        def run() -> None:
            nonlocal params, state
            for _ in range(STEPS):
                params, state = program(params, grads, state)
            jax.block_until_ready((params, state))

        ms = _median_ms(run)
    planned = program.memory_analysis()
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    held = planned.argument_size_in_bytes + planned.temp_size_in_bytes
    held += planned.output_size_in_bytes - planned.alias_size_in_bytes
    return {
        "ms": ms,
        "devices": mesh.size,
        "extra_bytes": planned.temp_size_in_bytes,
        "peak": max(one.get("peak_bytes_in_use", held) for one in stats),
        "state_bytes_per_param": sum(leaf.nbytes for leaf in jax.tree.leaves(state) if leaf.ndim)
        / sum(map(math.prod, shapes)),
        "compile_seconds": compile_seconds,
    }


def _measure_products(shapes: Shapes) -> Case:
    import jax
    import jax.numpy as jnp

    devices = jax.devices()
    counts = Counter((min(shape), max(shape)) for shape in shapes)

    @jax.jit
    def products(x: Any, gram: Any) -> Any:
        return x @ x.T, gram @ gram, gram @ x

    def random(shape: tuple[int, int], device: Any) -> Any:
        key = jax.device_put(jax.random.key(0), device)
        return jax.random.normal(key, shape, jnp.bfloat16)

    operands = {
        (m, n): [(random((m, n), device), random((m, m), device)) for device in devices]
        for m, n in counts
    }

    def run() -> None:
        last: list[Any] = []
        for _ in range(STEPS):
            for shape, count in counts.items():
                for i in range(ITERATIONS * count):
                    at = i % len(devices)
                    last = [*last, products(*operands[shape][at])][-len(devices) :]
        jax.block_until_ready(last)

    ms = _median_ms(run)
    rate = flops(shapes) / len(devices) / (ms / 1e3)
    return {"ms": ms, "devices": len(devices), "flops_per_second": rate}


# --- torch -----------------------------------------------------------------------------------


def _measure_torch(shapes: Shapes) -> Case:
    from experiments.muon_step_torch import measure

    return measure(shapes, steps=STEPS, iterations=ITERATIONS, median_ms=_median_ms)


CASES: dict[str, Callable[[Shapes], Case]] = {
    "products": _measure_products,
    "coat fp8_muon": lambda shapes: _measure_jax("coat fp8_muon", shapes),
    "torch Muon": _measure_torch,
    "optax muon, BF16 momentum": lambda shapes: _measure_jax("optax muon, BF16 momentum", shapes),
    "optax muon, FP32 momentum": lambda shapes: _measure_jax("optax muon, FP32 momentum", shapes),
}


if __name__ == "__main__":
    main()
