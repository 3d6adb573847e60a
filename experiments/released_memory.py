"""How much of a GPU's memory released gradients save, by the number and length of sequences.

    python -m experiments.released_memory           with XLA's CUDA plugin; computes nothing
    python -m experiments.released_memory 2x1024    with 2 sequences of 1024 tokens

The step of Llama-2-7B in COAT (`llama2_7b:one_gpu`), with gradients kept until the end of the
backward pass and with `--optimizer.release_gradients`, is compiled ahead of time for an H100.
Memory is XLA's account of the program, as `coat train` prints it before the first step.
"""

import argparse
import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from coat_jax.training.config_files import load_config
from experiments import records
from experiments.command import parser_of
from experiments.hopper import memory_of

CONFIG = "llama2_7b:one_gpu"
BATCHES = ((1, 256), (1, 2048), (4, 2048), (16, 2048))  # sequences and their length
WAYS = {"kept": False, "released": True}


def measure(batch: int, length: int, *, release: bool) -> dict[str, Any]:
    """Bytes on the GPU."""
    config = load_config(CONFIG)
    config = dataclasses.replace(
        config,
        global_batch_size=batch,
        sequence_length=length,
        optimizer=dataclasses.replace(config.optimizer, release_gradients=release),
    )
    return {"batch": batch, "sequence": length, **memory_of(config)}


def _batch(text: str) -> tuple[int, int]:
    sequences, _, length = text.partition("x")
    if not (sequences.isdecimal() and length.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text} is not of the form 2x1024")
    return int(sequences), int(length)


def main() -> None:
    """Compiles each, prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "batches", nargs="*", type=_batch, default=BATCHES, metavar="SEQUENCESxLENGTH"
    )
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    table = Table(title="Peak in GB, by what becomes of gradients")
    for column in ("batch", *WAYS, "gradients", "activations"):
        table.add_column(column, justify="right")
    for batch, length in options.batches:
        name = f"{batch}x{length}"
        for way, release in WAYS.items():
            figures[way].append(measure(batch, length, release=release))
            print(f"{name:>8} {way:9} {figures[way][-1]['peak'] / 1e9:6.1f} GB", flush=True)
        kept = figures["kept"][-1]
        row = [figures[way][-1]["peak"] for way in WAYS] + [kept["gradients"], kept["activations"]]
        table.add_row(name, *(f"{size / 1e9:.1f}" for size in row))
    records.write(options.out / "released_memory.json", figures)
    Console().print(table)


if __name__ == "__main__":
    main()
