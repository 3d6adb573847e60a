"""How much of a GPU's memory released gradients save, by the size of the batch.

    python -m experiments.released_memory      anywhere with XLA's CUDA plugin: nothing is computed

The step of Llama-2-7B in COAT (`llama2_7b:one_gpu`), with gradients kept until the end of the
backward pass and with `--optimizer.release_gradients`, is compiled ahead of time for an H100.
Memory is XLA's account of the program, as `coat train` prints it before the first step.
"""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from coat_jax.training.config_files import load_config
from experiments import records
from experiments.command import parser_of
from experiments.hopper import compile_step, there

CONFIG = "llama2_7b:one_gpu"
BATCHES = (1, 4, 16)
WAYS = {"kept": False, "released": True}


def measure(batch: int, *, release: bool) -> dict[str, Any]:
    """Bytes on the GPU."""
    config = load_config(CONFIG)
    optimizer = dataclasses.replace(config.optimizer, release_gradients=release)
    config = dataclasses.replace(config, global_batch_size=batch, optimizer=optimizer)
    with there():
        _, memory, _ = compile_step(config, (1, 1, 1))
    return {"batch": batch, "sequence": config.sequence_length, **memory._asdict()}


def main() -> None:
    """Compiles each, prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("batches", nargs="*", type=int, default=BATCHES, help="sequences")
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    table = Table(title="Peak in GB, by what becomes of gradients")
    for column in ("sequences", *WAYS, "gradients", "activations"):
        table.add_column(column, justify="right")
    for batch in options.batches:
        for way, release in WAYS.items():
            figures[way].append(measure(batch, release=release))
            print(f"{batch:3} {way:9} {figures[way][-1]['peak'] / 1e9:6.1f} GB", flush=True)
        kept = figures["kept"][-1]
        row = [figures[way][-1]["peak"] for way in WAYS] + [kept["gradients"], kept["activations"]]
        table.add_row(str(batch), *(f"{size / 1e9:.1f}" for size in row))
    records.write(options.out / "released_memory.json", figures)
    Console().print(table)


if __name__ == "__main__":
    main()
