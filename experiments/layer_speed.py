"""How long a Llama layer takes, forward and backward, and what it saves in between.

Claim (the paper's tables 2 and 6): a layer that computes and saves FP8 is faster than one in BF16
and saves less. The marginal cost of a layer is measured: the difference between stacks of 4 and of
8 layers, divided by 4, so that what a stack does once (input, loss) cancels.

    python -m experiments.layer_speed                     on a GPU: Llama-2-7B's layer, all peers
    python -m experiments.layer_speed --table             the paper's four sizes at batches of 4
                                                          and 8
    python -m experiments.layer_speed --width 64 --sequence 64 --batch 1 --depths 1 2   anywhere

Every framework runs in a process of its own, one after the other on the same device. One that is
not installed is skipped with a line that says so. Layers are unrolled; weights and inputs are
BF16 and random. The step is the gradient with respect to input and all weights. Times are medians;
the two stacks take turns, so that both meet the clocks of a GPU at its power limit. "saved" is what
a further layer leaves for the backward pass: the arrays that the function returned by `jax.vjp`
holds, weights left out, and for torch what its allocator holds after the forward pass. "peak" in
the results is of the whole step: XLA's own account of the program, or torch's allocator.
1 U = 2 bytes x batch x sequence x width.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.command import parser_of
from experiments.stacks import Measured, Sizes
from experiments.workers import reason, run_worker

Case = dict[str, Any]
BASELINE = "coat_jax BF16"

PAPER = [
    Sizes(w, sequence, batch) for batch in (4, 8) for w in (2048, 4096) for sequence in (2048, 4096)
]


def main() -> None:
    """Measures every framework in its own process, prints the table and writes the results."""
    parser = parser_of(__doc__, draws=True)
    parser.add_argument("--width", type=int, default=4096, help="width of the residual stream")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--head", type=int, help="width of a head; 128 where the width allows")
    parser.add_argument("--depths", type=int, nargs=2, default=[4, 8], help="layers of the stacks")
    parser.add_argument("--only", nargs="*", help="frameworks: " + ", ".join(FRAMEWORKS))
    parser.add_argument("--table", action="store_true", help="the sizes of the paper's table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    head = options.head or min(options.width, Sizes().head)
    sizes = Sizes(options.width, options.sequence, options.batch, head)
    if options.worker:
        for name, measured in FRAMEWORKS[options.worker]()(sizes, options.depths):
            case = _marginal(name, measured)
            print(json.dumps({**sizes._asdict(), **case}), flush=True)
        return
    path = options.out / ("layer_table.json" if options.table else "layer_speed.json")
    if not options.draw:
        measure(options, PAPER if options.table else [sizes], path)
    draw(path)


def measure(options: argparse.Namespace, every: list[Sizes], path: Path) -> None:
    """Every size by every framework; the results are written after each framework."""
    from experiments import records

    cases: list[Case] = []
    for sizes in every:
        for framework in options.only or FRAMEWORKS:
            print(
                f"width {sizes.width}, {sizes.batch} x {sizes.sequence}, {framework}:", flush=True
            )
            found = _in_a_process(framework, sizes, options.depths)
            cases += [{"framework": framework, **case} for case in found]
            records.write(path, {"cases": cases})


def _in_a_process(framework: str, sizes: Sizes, depths: list[int]) -> list[Case]:
    """The cases of a framework, and last why there are no more."""
    given = [f"--{name}={value}" for name, value in sizes._asdict().items()]
    given += ["--depths", *map(str, depths)]
    # The last line of a traceback tells why: JAX would append one of its own.
    ended = run_worker(
        "experiments.layer_speed", "--worker", framework, *given, JAX_TRACEBACK_FILTERING="off"
    )
    for case in ended.results:
        print(
            f"{case['layer']:38} {case['forward_ms']:6.2f} + {case['backward_ms']:6.2f} = "
            f"{case['ms']:6.2f} ms a layer   "
            f"saved {case['saved_bytes'] / sizes.unit:5.2f} U",
            flush=True,
        )
    if not ended.code:
        return ended.results
    why = reason(ended.stderr)
    print(f"{framework} stopped after {len(ended.results)} cases: {why}", flush=True)
    return [*ended.results, {**sizes._asdict(), "layer": framework, "skipped": why}]


def _marginal(name: str, measured: Measured) -> Case:
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
        "saved_bytes": per_layer("saved_bytes"),
        "stacks": measured,
    }


def _jax() -> Callable[[Sizes, list[int]], Iterator[tuple[str, Measured]]]:
    from experiments.stacks.in_jax import jax_cases

    return jax_cases


def _torch() -> Callable[[Sizes, list[int]], Iterator[tuple[str, Measured]]]:
    from experiments.stacks.in_torch import torch_cases

    return torch_cases


FRAMEWORKS = {"jax": _jax, "torch": _torch}  # imported by their own workers only


def draw(path: Path) -> None:
    """Draws one size as bars, ours in colour, and several as a row of points each."""
    from experiments import records

    cases = [c for c in records.read(path)["cases"] if "skipped" not in c]
    of_sizes: dict[Sizes, list[Case]] = {}
    for case in cases:
        of_sizes.setdefault(Sizes(*(case[key] for key in Sizes._fields)), []).append(case)
    if len(of_sizes) == 1:
        _draw_bars(path, *of_sizes.popitem())
    else:
        _draw_points(path, of_sizes)


def _draw_bars(path: Path, sizes: Sizes, cases: list[Case]) -> None:
    """Time per layer; activation_memory has the picture of what is saved."""
    import matplotlib.pyplot as plt

    from experiments import records

    shown = cases[::-1]
    names = [c["layer"] for c in shown]
    colors = [records.ACCENT if _is_ours(name) else records.PALE for name in names]
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(8, 0.4 * len(shown) + 1.6))
        bars = axes.barh(names, [c["ms"] for c in shown], color=colors, height=0.7)
        axes.bar_label(bars, [f"{c['ms']:.1f}" for c in shown], padding=3, fontsize=8)
        axes.tick_params(axis="y", labelsize=8)
        axes.set_xlabel("ms, forward and backward")
        axes.set_title(f"One more Llama layer: {_described(sizes)}")
        axes.margins(x=0.12)
        figure.savefig(path.with_suffix(".png"))


def _draw_points(path: Path, of_sizes: dict[Sizes, list[Case]]) -> None:
    """How many times as fast as BF16 each way is, a row for each size."""
    import matplotlib.pyplot as plt

    from experiments import records

    names = list(dict.fromkeys(c["layer"] for cases in of_sizes.values() for c in cases))
    markers = dict(zip(names, "os^Dos^D" * len(names), strict=False))
    with plt.rc_context(records.CHART | {"axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(11, 0.5 * len(of_sizes) + 2.2))
        for name in names:
            places, speeds = [], []
            for place, cases in enumerate(reversed(of_sizes.values())):
                ms = {case["layer"]: case["ms"] for case in cases}
                if name in ms:
                    places.append(place)
                    speeds.append(ms[BASELINE] / ms[name])
            ours = _is_ours(name)
            color = records.ACCENT if ours else records.INK
            axes.scatter(
                speeds,
                places,
                s=60,
                marker=markers[name],
                facecolors=color if ours else "white",
                edgecolors=color,
                label=name,
                zorder=3,
            )
        axes.set_yticks(range(len(of_sizes)), [_described(s) for s in reversed(of_sizes)])
        axes.set_ylim(-0.5, len(of_sizes) - 0.5)
        axes.set_xlabel(f"times as fast as {BASELINE}, forward and backward")
        axes.set_title("One more Llama layer")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)
        figure.savefig(path.with_suffix(".png"))


def _is_ours(name: str) -> bool:
    return name.startswith("coat")


def _described(sizes: Sizes) -> str:
    return f"width {sizes.width}, batch {sizes.batch} x {sizes.sequence}"


if __name__ == "__main__":
    main()
