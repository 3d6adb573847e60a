"""How long a Llama layer takes, forward and backward, and what it keeps in between.

Claim (the paper's tables 2 and 6): a layer that computes and keeps FP8 is faster than one in BF16
and keeps less. Measured as the marginal cost of a layer: stacks of 4 and of 8, halved difference
by count, so that what a stack does once (input, loss) cancels.

    python -m experiments.layer_speed                     on a GPU: Llama-2-7B's layer, all peers
    python -m experiments.layer_speed --table             the paper's four sizes as well
    python -m experiments.layer_speed --width 64 --sequence 64 --batch 1 --depths 1 2   anywhere

Every framework runs in a process of its own, one after the other on the same device. One that is
not installed is skipped with a line that says so. Layers are unrolled; weights and inputs are
BF16 and random. The step is the gradient with respect to input and all weights. Times are medians,
the device drained around each batch of steps. "saved" is what a further layer adds to the peak,
less its weights and their gradients: from XLA's own account of the program, or torch's allocator.
1 U = 2 bytes x batch x sequence x width.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
BATCHES, STEPS = 7, 4

Case = dict[str, Any]


class Sizes(NamedTuple):
    """A layer and what goes through it."""

    width: int = 4096
    sequence: int = 2048
    batch: int = 8
    head: int = 128

    @property
    def hidden(self) -> int:
        """The MLP's width: Llama's 8/3 of the width, in whole multiples of 256 from 4096 on."""
        return {2048: 5632, 4096: 11008}.get(self.width, -(-self.width * 8 // 3 // 16) * 16)

    @property
    def unit(self) -> int:
        """Bytes of the residual stream in BF16."""
        return 2 * self.batch * self.sequence * self.width

    @property
    def weight_bytes(self) -> int:
        """Of one layer in BF16, and so of its gradients."""
        return 2 * (4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width)


PAPER = [Sizes(width, sequence, 4) for width in (2048, 4096) for sequence in (2048, 4096)]


def main() -> None:
    """Measures every framework in its own process, prints the table and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4096, help="of the residual stream")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--head", type=int, default=128, help="numbers of a head")
    parser.add_argument("--depths", type=int, nargs=2, default=[4, 8], help="layers of the stacks")
    parser.add_argument("--only", nargs="*", help="frameworks: " + ", ".join(FRAMEWORKS))
    parser.add_argument("--table", action="store_true", help="also the sizes of the paper's table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory for the results")
    parser.add_argument("--draw", action="store_true", help="only draw the results of before")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = Sizes(options.width, options.sequence, options.batch, options.head)
    if options.worker:
        for case in FRAMEWORKS[options.worker](sizes, options.depths):
            print(json.dumps({**sizes._asdict(), **case}), flush=True)
        return
    if options.draw:
        draw(options.out)
        return
    from experiments import records

    cases: list[Case] = []
    for one in [sizes, *(PAPER if options.table else [])]:
        for framework in options.only or FRAMEWORKS:
            cases += _run_worker(framework, one, options.depths)
            records.write(options.out / "layer_speed.json", {"cases": cases})
    draw(options.out)


def _run_worker(framework: str, sizes: Sizes, depths: list[int]) -> list[Case]:
    command = [sys.executable, "-m", "experiments.layer_speed", "--worker", framework]
    for name, value in sizes._asdict().items():
        command += [f"--{name}", str(value)]
    command += ["--depths", *map(str, depths)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"},
        check=False,
    )
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for case in cases:
        print(
            f"{case['layer']:32} {case['forward_ms']:8.2f} + {case['backward_ms']:8.2f} = "
            f"{case['ms']:8.2f} ms a layer   saved {case['saved'] / sizes.unit:6.2f} U",
            flush=True,
        )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"{framework} stopped after {len(cases)} cases: {reason}", flush=True)
        cases.append({**sizes._asdict(), "layer": framework, "skipped": reason})
    return cases


def _median_ms(run: Callable[[], None], wait: Callable[[], None]) -> float:
    """Milliseconds of one call."""
    for _ in range(3):
        run()
    wait()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(STEPS):
            run()
        wait()
        times.append((time.perf_counter() - start) / STEPS * 1e3)
    return statistics.median(times)


def _marginal(name: str, measured: dict[int, dict[str, float]], sizes: Sizes) -> Case:
    """The cost of one more layer, from two stacks."""
    few, many = sorted(measured)
    count = many - few

    def per_layer(figure: str) -> float:
        return (measured[many][figure] - measured[few][figure]) / count

    total, forward = per_layer("ms"), per_layer("forward_ms")
    return {
        "layer": name,
        "ms": total,
        "forward_ms": forward,
        "backward_ms": total - forward,
        "saved": per_layer("peak") - 2 * sizes.weight_bytes,  # a weight and its gradient
        "stacks": measured,
    }


# --- JAX -------------------------------------------------------------------------------------


def _jax_cases(sizes: Sizes, depths: list[int]) -> Iterator[Case]:
    import coat_jax as coat

    presets = {
        "BF16": coat.BF16,
        "FP8_LINEAR": coat.FP8_LINEAR,
        "COAT": coat.COAT,
        "COAT_LEAN": coat.COAT_LEAN,
    }
    for name, precision in presets.items():
        measured = {depth: _measure_jax(sizes, depth, precision) for depth in depths}
        yield _marginal(f"coat_jax {name}", measured, sizes)


def _measure_jax(sizes: Sizes, depth: int, precision: Any) -> dict[str, float]:
    import jax
    import jax.numpy as jnp

    from coat_jax import ops

    width, hidden = sizes.width, sizes.hidden

    def layer(x: Any, w: Any) -> Any:
        norm = ops.Norm(w["norm"])
        weights = (w["q"], w["k"], w["v"])
        q, k, v = ops.norm_linear(x, norm, weights, precision=precision)
        q, k, v = (y.reshape(*x.shape[:2], -1, sizes.head) for y in (q, k, v))
        q, k = (ops.rotate(y, jnp.arange(sizes.sequence), ops.Rotary()) for y in (q, k))
        x = x + ops.attention_linear(q, k, v, w["o"], precision=precision)
        norm = ops.Norm(w["mlp_norm"])
        return ops.gated_mlp(x, norm, w["gate"], w["up"], w["down"], precision=precision)

    def stack(layers: Any, x: Any) -> Any:
        for w in layers:
            x = layer(x, w)
        return x

    @jax.jit
    def create(key: Any) -> Any:
        shapes = dict.fromkeys("qkvo", (width, width))
        shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}

        def one(key: Any) -> Any:
            keys = jax.random.split(key, len(shapes))
            weights = {
                name: jax.random.normal(k, shape, jnp.bfloat16) * shape[0] ** -0.5
                for k, (name, shape) in zip(keys, shapes.items(), strict=True)
            }
            ones = jnp.ones(width, jnp.bfloat16)
            return weights | {"norm": ones, "mlp_norm": ones}

        *keys, last = jax.random.split(key, depth + 1)
        x = jax.random.normal(last, (sizes.batch, sizes.sequence, width), jnp.bfloat16)
        return [one(k) for k in keys], x

    # An arbitrary gradient of the output, so that no reduction is measured.
    def step(layers: Any, x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(stack, layers, x)
        return y, pull(dy)

    layers, x = create(jax.random.key(0))
    dy = jnp.roll(x, 1, axis=1)
    forward = jax.jit(stack).lower(layers, x).compile()
    compiled = jax.jit(step).lower(layers, x, dy).compile()
    results: list[Any] = [None]

    def run(program: Any, *arguments: Any) -> None:
        results[0] = None
        results[0] = program(layers, x, *arguments)

    def wait() -> None:
        jax.block_until_ready(results[0])

    forward_ms = _median_ms(lambda: run(forward), wait)
    ms = _median_ms(lambda: run(compiled, dy), wait)
    memory = compiled.memory_analysis()
    stats = jax.local_devices()[0].memory_stats() or {}
    return {
        "ms": ms,
        "forward_ms": forward_ms,
        "peak": float(
            memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes
        ),
        "allocator_peak": float(stats.get("peak_bytes_in_use", 0)),
    }


# --- torch -----------------------------------------------------------------------------------


def _torch_cases(sizes: Sizes, depths: list[int]) -> Iterator[Case]:
    import torch

    ways: dict[str, tuple[bool, str | None]] = {
        "torch BF16, eager": (False, None),
        "torch BF16, compiled": (True, None),
        "torchao float8 tensorwise, compiled": (True, "tensorwise"),
        "torchao float8 rowwise, compiled": (True, "rowwise"),
    }
    for name, (compiled, recipe) in ways.items():
        measured = {}
        for depth in depths:
            torch.compiler.reset()
            measured[depth] = _measure_torch(sizes, depth, compiled, recipe)
        yield _marginal(name, measured, sizes)


def _measure_torch(
    sizes: Sizes, depth: int, compiled: bool, recipe: str | None
) -> dict[str, float]:
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width, hidden = sizes.width, sizes.hidden
            self.norm, self.mlp_norm = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
            shapes = dict.fromkeys("qkvo", (width, width))
            shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
            for name, (inputs, outputs) in shapes.items():
                setattr(self, name, nn.Linear(inputs, outputs, bias=False))

        def forward(self, x: Any, cos: Any, sin: Any) -> Any:
            n = self.norm(x)
            q, k, v = (
                p(n).view(*x.shape[:2], -1, sizes.head).transpose(1, 2)
                for p in (self.q, self.k, self.v)
            )
            q, k = turn(q, cos, sin), turn(k, cos, sin)
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(o.transpose(1, 2).reshape(x.shape))
            n = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(n)) * self.up(n))

    def turn(y: Any, cos: Any, sin: Any) -> Any:
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        layers = nn.ModuleList([Layer().bfloat16() for _ in range(depth)])
        frequencies = 1e4 ** -(torch.arange(0, sizes.head, 2) / sizes.head)
        angles = torch.arange(sizes.sequence)[:, None] * frequencies
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        shape = sizes.batch, sizes.sequence, sizes.width
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    if recipe:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        convert_to_float8_training(layers, config=config)
    if compiled:
        for i in range(depth):
            layers[i] = torch.compile(layers[i])

    def forward() -> Any:
        y = x
        for layer in layers:
            y = layer(y, cos, sin)
        return y

    def step() -> None:
        for parameter in layers.parameters():
            parameter.grad = None
        x.grad = None
        forward().backward(dy)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    ms = _median_ms(step, wait)
    peak = 0.0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        step()
        wait()
        peak = float(torch.cuda.max_memory_allocated())
    with torch.no_grad():
        forward_ms = _median_ms(forward, wait)
    return {"ms": ms, "forward_ms": forward_ms, "peak": peak}


FRAMEWORKS: dict[str, Callable[[Sizes, list[int]], Iterator[Case]]] = {
    "jax": _jax_cases,
    "torch": _torch_cases,
}


# --- The picture -----------------------------------------------------------------------------


def draw(folder: Path) -> None:
    """Draws time and saved memory per layer as bars, ours in colour."""
    import matplotlib.pyplot as plt

    from experiments import records

    cases = json.loads((folder / "layer_speed.json").read_text())["figures"]["cases"]
    first = {key: cases[0][key] for key in Sizes._fields}
    shown = [c for c in cases if "skipped" not in c and first.items() <= c.items()]
    unit = Sizes(**first).unit
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.5 * len(shown) + 1.6))
        names = [c["layer"] for c in shown][::-1]
        colors = [records.ACCENT if c["layer"].startswith("coat") else records.PALE for c in shown][
            ::-1
        ]
        values = {left: [c["ms"] for c in shown], right: [c["saved"] / unit for c in shown]}
        for axes, title in ((left, "ms, forward and backward"), (right, "saved activations, U")):
            bars = axes.barh(names, values[axes][::-1], color=colors, height=0.7)
            axes.bar_label(bars, [f"{v:.1f}" for v in values[axes][::-1]], padding=3, fontsize=8)
            axes.tick_params(axis="y", labelsize=8)
            axes.set_title(title)
            axes.margins(x=0.12)
        figure.suptitle(
            "One more Llama layer: width {width}, batch {batch} x {sequence}".format(**first)
        )
        figure.savefig(folder / "layer_speed.png")


if __name__ == "__main__":
    main()
