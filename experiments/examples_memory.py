"""What coat_jax changes in other trainers: memory and time of the models of examples/.

Claim: at the same model and batch the optimizer's state takes about a quarter of the memory with
coat_jax, and the peak is lower wherever moments or saved activations were a large part of it.

    python -m experiments.examples_memory                        on a GPU
    python -m experiments.examples_memory --width 128 --steps 4  smoke test, anywhere
    python -m experiments.examples_memory --large                MaxText and transformers

Each example runs twice, without coat_jax and with it, in a process of its own. One that fails, for
instance because its package is not installed, is left out with a line that says why. "state" is
what the optimizer holds; "peak" is the allocator's own count, torch's where torch trains. A step's
time is the median over steps, each of which waits for its loss; MaxText's is what it logs. Models
have FP32 parameters and compute in FP32, as the examples do; a model that computes in BF16 gains
less. With coat_jax, the model of transformers has BF16 parameters.
"""

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.command import parser_of
from experiments.workers import outcome, run_worker

SIZES = ("width", "layers", "batch", "length")
WARM = 3  # steps that compile, or follow them


def main() -> None:
    """Measures every example in two processes, prints a line for each and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help=f"more than {WARM}")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--large", action="store_true", help="those whose packages are large")
    parser.add_argument("--one", nargs=2, metavar=("EXAMPLE", "FP8"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps <= WARM:
        parser.error(f"--steps must be more than {WARM}, the steps that are not timed")
    os.environ.setdefault("JAX_PLATFORMS", "cuda,cpu")
    if args.one:
        name, fp8 = args.one
        print(json.dumps(EXAMPLES[name](fp8 == "1", args)))
        return
    from experiments import records

    sizes = {name: getattr(args, name) for name in SIZES}
    cases: list[dict[str, Any]] = []
    path = args.out / f"examples_memory{'_large' * args.large}.json"
    for name in [name for name in EXAMPLES if (name in LARGE) == args.large]:
        for fp8 in (False, True):
            found = in_a_process(name, fp8, args)
            if why := found.get("failed"):
                print(f"{name} is not measured: {why}", flush=True)
                break
            cases.append({"example": name, "coat_jax": fp8, **found})
            print(" ".join(f"{value!s:>12}" for value in cases[-1].values()), flush=True)
            records.write(path, {"sizes": sizes, "cases": cases})


def in_a_process(name: str, fp8: bool, args: argparse.Namespace) -> dict[str, Any]:
    """What an example's function returns, from a process of its own; or "failed", and why."""
    given = [f"--{option}={getattr(args, option)}" for option in (*SIZES, "steps")]
    variables = {}
    if name == "hugging_face" and not fp8:
        variables["JAX_PLATFORMS"] = "cpu"  # JAX would take the GPU's memory from torch
    return outcome(
        run_worker("experiments.examples_memory", *given, "--one", name, str(int(fp8)), **variables)
    )


def timed_batches(args: argparse.Namespace, times: list[float]) -> Iterator[Any]:
    """Batches for an example; `times` gets when it asked for each, and for one more."""
    from examples import check

    for tokens in list(check.batches(args.steps, args.batch, args.length)):
        times.append(time.perf_counter())
        yield tokens
    times.append(time.perf_counter())


def seconds_of(times: list[float]) -> list[float]:
    """What each step took."""
    return [end - begin for begin, end in pairwise(times)]


def jax_example(
    module: str, fp8: bool, args: argparse.Namespace, **settings: Any
) -> dict[str, Any]:
    """Trains an example whose `train` takes batches, a width and layers."""
    times: list[float] = []
    train = importlib.import_module(f"examples.{module}").train
    batches = timed_batches(args, times)
    run = train(fp8, batches, width=args.width, layers=args.layers, **settings)
    return figures(run, seconds_of(times), jax_peak())


def maxtext(fp8: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Trains MaxText's own model on its own data."""
    import jax

    from examples import maxtext_train

    heads = args.width // 32
    with tempfile.TemporaryDirectory() as name:
        run = maxtext_train.train(
            fp8,
            Path(name),
            hardware=jax.default_backend(),
            steps=args.steps,
            per_device_batch_size=args.batch,
            max_target_length=args.length,
            base_num_decoder_layers=args.layers,
            base_emb_dim=args.width,
            base_mlp_dim=4 * args.width,
            base_num_query_heads=heads,
            base_num_kv_heads=heads,
        )
        lines = map(json.loads, (Path(name) / "metrics.jsonl").read_text().splitlines())
        seconds = [line[key] for line in lines if (key := "perf/step_time_seconds") in line]
    return figures(run, seconds, jax_peak())


def hugging_face(fp8: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Tunes a checkpoint of transformers, without coat_jax in torch."""
    import torch

    from examples import hugging_face as example

    times: list[float] = []
    batches = timed_batches(args, times)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "downloaded"
        example.make_checkpoint(folder, args.width, args.layers)
        if fp8:
            run = example.train_ours(folder, Path(name) / "tuned", batches)
            return figures(run, seconds_of(times), jax_peak())
        torch.set_float32_matmul_precision("high")  # TF32, as XLA multiplies
        run = example.train_theirs(folder, batches)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        return figures(run, seconds_of(times), peak)


def jax_peak() -> int | None:
    """The most that JAX had of the device; None if it does not tell."""
    import jax

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def figures(run: Any, seconds: list[float], peak: int | None) -> dict[str, Any]:
    """The bytes and the time of a run."""
    from examples import check

    return {
        "loss": round(run.losses[-1], 4),
        "ms": round(1000 * statistics.median(seconds[WARM:]), 2),
        "state_bytes": check.bytes_of(run.state),
        "peak_bytes": peak,
    }


JAX = ("flax_nnx", "flax_linen", "flax_lora", "qwix_provider", "equinox_loop", "tunix_trainer")
EXAMPLES: dict[str, Callable[[bool, argparse.Namespace], dict[str, Any]]] = {
    **{name: partial(jax_example, name) for name in JAX},
    "tunix_trainer, LoRA": partial(jax_example, "tunix_trainer", lora=True),
    "maxtext_train": maxtext,
    "hugging_face": hugging_face,
}
LARGE = ("maxtext_train", "hugging_face")


if __name__ == "__main__":
    main()
