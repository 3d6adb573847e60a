"""What coat_jax changes in other trainers: memory and time of the models of examples/.

Claim: at the same model and batch an example takes less memory with coat_jax than without.

    python -m experiments.examples_memory                        on a GPU
    python -m experiments.examples_memory --width 128 --steps 4  smoke test, anywhere

Each example runs twice, without coat_jax and with it, in a process of its own, so that peaks do not
add up. "state" is what the optimizer holds; "peak" is the device's own count. A step's time is the
median over steps, each of which waits for its loss. Models have FP32 parameters and compute in
FP32, as the examples do; a model that computes in BF16 gains less.
"""

import argparse
import importlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

from experiments.command import parser_of
from experiments.workers import reason, run_worker

EXAMPLES = ("flax_nnx", "flax_linen", "flax_lora")  # they need Flax and optax only
SIZES = ("width", "layers", "batch", "length")
WARM = 3  # steps that compile, or follow them


def main() -> None:
    """Measures every example in two processes, prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help=f"more than {WARM}")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--one", nargs=2, metavar=("EXAMPLE", "FP8"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}, the steps that are not timed")
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    if args.one:
        print(json.dumps(measure(args.one[0], args.one[1] == "1", args)))
        return
    from experiments import records

    sizes = {name: getattr(args, name) for name in SIZES}
    cases: list[dict[str, Any]] = []
    for name in EXAMPLES:
        for fp8 in (False, True):
            cases.append({"example": name, "coat_jax": fp8, **in_a_process(name, fp8, args)})
            print(" ".join(f"{value!s:>12}" for value in cases[-1].values()), flush=True)
            records.write(args.out / "examples_memory.json", {"sizes": sizes, "cases": cases})


def in_a_process(name: str, fp8: bool, args: argparse.Namespace) -> dict[str, Any]:
    """What `measure` returns, from a process of its own."""
    given = [f"--{option}={getattr(args, option)}" for option in (*SIZES, "steps")]
    ended = run_worker("experiments.examples_memory", *given, "--one", name, str(int(fp8)))
    if not ended.results:
        raise SystemExit(f"{name}: {reason(ended.stderr)}")
    return ended.results[-1]


def measure(name: str, fp8: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Trains one example and returns its bytes and time."""
    example = importlib.import_module(f"examples.{name}")
    import jax

    from examples import check

    began: list[float] = []

    def timed() -> Iterator[Any]:
        data = list(check.batches(args.steps, args.batch, args.length))
        for tokens in data:
            began.append(time.perf_counter())
            yield tokens
        began.append(time.perf_counter())

    run = example.train(fp8, timed(), width=args.width, layers=args.layers)
    seconds = [end - start for start, end in zip(began[WARM:-1], began[WARM + 1 :], strict=True)]
    memory = jax.local_devices()[0].memory_stats() or {}
    return {
        "loss": round(run.losses[-1], 4),
        "ms": round(1000 * statistics.median(seconds), 2),
        "state_bytes": check.bytes_of(run.state),
        "peak_bytes": memory.get("peak_bytes_in_use"),
    }


if __name__ == "__main__":
    main()
