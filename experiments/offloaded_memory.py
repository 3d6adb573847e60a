"""How much of a GPU's memory is saved by moments in host memory.

Claim: with 6 x 2048 tokens, a step of Llama-2-13B fits on an H100 only with its moments in host
memory, by XLA's account.

    python -m experiments.offloaded_memory      anywhere with XLA's CUDA plugin: nothing is computed
    python -m experiments.offloaded_memory 4    with 4 sequences

The step of Llama-2-13B in COAT, unrolled, with released gradients and 2048 tokens in a sequence, is
compiled ahead of time for an H100, with moments on the GPU and with `--optimizer.offload`. Memory
is XLA's account of the program, as `coat train` prints it before the first step: no step is taken.
"""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from coat_jax.training.config_files import load_config
from experiments import records
from experiments.command import parser_of
from experiments.hopper import memory_of

CONFIG = "llama2_13b"
BATCHES = (1, 6)
SEQUENCE = 2048
PLACES = {"gpu": False, "host": True}  # where moments are


def measure(batch: int, *, offload: bool) -> dict[str, Any]:
    """Bytes on the GPU and, as `on_host`, in host memory."""
    config = load_config(CONFIG)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, scan=False),
        optimizer=dataclasses.replace(config.optimizer, release_gradients=True, offload=offload),
        global_batch_size=batch,
        sequence_length=SEQUENCE,
        gradient_accumulation_steps=1,
    )
    return {"batch": batch, "sequence": SEQUENCE, **memory_of(config)}


def main() -> None:
    """Compiles each, prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("batches", nargs="*", type=int, default=BATCHES, help="sequences")
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {place: [] for place in PLACES}
    table = Table(title="Peak of the GPU in GB, by where moments are")
    for column in ("sequences", *PLACES, "in host memory"):
        table.add_column(column, justify="right")
    for batch in options.batches:
        for place, offload in PLACES.items():
            figures[place].append(measure(batch, offload=offload))
            print(f"{batch:3} {place:5} {figures[place][-1]['peak'] / 1e9:6.1f} GB", flush=True)
        sizes = [figures[place][-1]["peak"] for place in PLACES] + [figures["host"][-1]["on_host"]]
        table.add_row(str(batch), *(f"{size / 1e9:.1f}" for size in sizes))
    records.write(options.out / "offloaded_memory.json", figures)
    Console().print(table)


if __name__ == "__main__":
    main()
