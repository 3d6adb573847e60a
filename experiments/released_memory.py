"""How much of a GPU's memory released gradients save, by the sequences of a batch.

    python -m experiments.released_memory      anywhere with XLA's CUDA plugin: nothing is computed
    python -m experiments.released_memory 2x1024

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
BATCHES = ("1x256", "1x2048", "4x2048", "16x2048")  # sequences and their length
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
    with there():
        _, memory, _ = compile_step(config, (1, 1, 1))
    return {"batch": batch, "sequence": length, **memory._asdict()}


def main() -> None:
    """Compiles each, prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("batches", nargs="*", default=BATCHES, metavar="SEQUENCESxLENGTH")
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    table = Table(title="Peak in GB, by what becomes of gradients")
    for column in ("batch", *WAYS, "gradients", "activations"):
        table.add_column(column, justify="right")
    for name in options.batches:
        batch, length = map(int, name.split("x"))
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
