"""How long a Llama layer takes, forward and backward, and what it saves in between.

Claim (the paper's tables 2 and 6): a layer that computes and saves FP8 is faster than one in BF16
and saves less. The marginal cost of a layer is measured: the difference between stacks of 4 and of
8 layers, divided by 4, so that what a stack does once (input, loss) cancels.

    python -m experiments.layers              on a GPU: Llama-2-7B's layer, all peers
    python -m experiments.layers --table      the paper's four sizes at batches of 4 and 8
    python -m experiments.layers --width 64 --sequence 64 --batch 1 --depths 1 2   anywhere

Every framework runs in a process of its own, one after the other on the same device. One that is
not installed is skipped with a line that says so. Layers are unrolled; weights and inputs are
BF16 and random. The step is the gradient with respect to input and all weights. Times are medians;
the two stacks take turns. "saved" is what a further layer leaves for the backward pass: the arrays
that the function returned by `jax.vjp` holds, weights left out, and for torch what its allocator
holds after the forward pass. 1 U = 2 bytes x batch x sequence x width.
"""

import argparse
import json
from typing import Any

from experiments.command import parser_of
from experiments.layers import Measured, Sizes
from experiments.workers import reason, run_worker

FRAMEWORKS = ("jax", "torch")
PAPER = [
    Sizes(w, sequence, batch) for batch in (4, 8) for w in (2048, 4096) for sequence in (2048, 4096)
]

Case = dict[str, Any]


def main() -> None:
    """Measures every framework in its own process, and writes the results after each."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=4096, help="width of the residual stream")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--head", type=int, default=128, help="width of a head, if not narrower")
    parser.add_argument("--depths", type=int, nargs=2, default=[4, 8], help="layers of the stacks")
    parser.add_argument("--only", nargs="*", choices=FRAMEWORKS, help="frameworks")
    parser.add_argument("--table", action="store_true", help="the sizes of the paper's table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    head = min(options.head, options.width)
    sizes = Sizes(options.width, options.sequence, options.batch, head)
    if options.worker:
        measure(options.worker, sizes, options.depths)
        return
    from experiments import records

    path = options.out / ("layer_table.json" if options.table else "layer_speed.json")
    cases: list[Case] = []
    for one in PAPER if options.table else [sizes]:
        for framework in options.only or FRAMEWORKS:
            print(f"width {one.width}, {one.batch} x {one.sequence}, {framework}:", flush=True)
            found = _in_a_process(framework, one, options.depths)
            cases += [{"framework": framework, **case} for case in found]
            records.write(path, {"cases": cases})


def measure(framework: str, sizes: Sizes, depths: list[int]) -> None:
    """Prints a line of JSON for each way of a framework; imports no other framework."""
    if framework == "jax":
        from experiments.layers.in_jax import cases
    else:
        from experiments.layers.in_torch import cases
    for name, measured in cases(sizes, depths):
        print(json.dumps({**sizes._asdict(), **_marginal(name, measured)}), flush=True)


def _in_a_process(framework: str, sizes: Sizes, depths: list[int]) -> list[Case]:
    """The cases of a framework, and last why there are no more."""
    given = [f"--{name}={value}" for name, value in sizes._asdict().items()]
    given += ["--depths", *map(str, depths)]
    # The last line of a traceback tells why: JAX would append one of its own.
    ended = run_worker(
        "experiments.layers", "--worker", framework, *given, JAX_TRACEBACK_FILTERING="off"
    )
    for case in ended.results:
        times = f"{case['forward_ms']:6.2f} + {case['backward_ms']:6.2f} = {case['ms']:6.2f} ms"
        print(f"{case['layer']:38} {times}   saved {case['saved_bytes'] / sizes.unit:5.2f} U")
    if not ended.code:
        return ended.results
    why = reason(ended.stderr)
    print(f"{framework} stopped after {len(ended.results)} cases: {why}", flush=True)
    return [*ended.results, {**sizes._asdict(), "layer": framework, "skipped": why}]


def _marginal(name: str, measured: Measured) -> Case:
    """The cost of one more layer, from two stacks."""
    few, many = sorted(measured)

    def per_layer(figure: str) -> float:
        return (measured[many][figure] - measured[few][figure]) / (many - few)

    total, forward = per_layer("ms"), per_layer("forward_ms")
    return {
        "layer": name,
        "ms": total,
        "forward_ms": forward,
        "backward_ms": total - forward,
        "saved_bytes": per_layer("saved_bytes"),
        "stacks": measured,
    }


if __name__ == "__main__":
    main()
