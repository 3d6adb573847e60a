"""What each shipped config takes of a GPU's memory, in COAT and in BF16.

    python -m experiments.config_memory      anywhere with XLA's CUDA plugin: nothing is computed

The trainer's step is compiled ahead of time for H100s, with the config's own batch, or one
microbatch of it, with gradients accumulated, if it is divided into several. The peak is XLA's
account of the program, as `coat train` prints it before the first step. Layers run in a loop;
unrolled layers, as in some configs, take as much or less.
"""

import dataclasses
from typing import Any

from rich.console import Console
from rich.table import Table

from coat_jax.training.config_files import load_config
from experiments import records
from experiments.command import parser_of
from experiments.hopper import memory_of

GPUS = {
    "llama_124m": 1,
    "llama_350m": 1,
    "olmo_1b": 1,
    "llama2_7b": 4,
    "llama2_13b": 4,
    "llama_30b": 4,
}
VARIANTS = {"COAT": "config", "BF16": "bf16"}


def measure(name: str, function: str, gpus: int) -> dict[str, Any]:
    """Bytes on each GPU."""
    config = load_config(f"{name}:{function}")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, scan=True))
    memory = memory_of(config, gpus)
    rows = config.global_batch_size // config.gradient_accumulation_steps // gpus
    return {"gpus": gpus, "rows": rows, "sequence": config.sequence_length, **memory}


def main() -> None:
    """Compiles each, prints the table and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("configs", nargs="*", default=list(GPUS), help="their names")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    for name in options.configs:
        figures[name] = {}
        for variant, function in VARIANTS.items():
            figures[name][variant] = one = measure(name, function, GPUS[name])
            print(f"{name:12} {variant}  {one['peak'] / 1e9:6.1f} GB", flush=True)
    records.write(options.out / "config_memory.json", figures)
    table = Table(title="Peak of each GPU, in GB")
    for column in ("config", "GPUs", "rows of each", *VARIANTS):
        table.add_column(column, justify="left" if column == "config" else "right")
    for name, variants in figures.items():
        first = next(iter(variants.values()))
        rows = f"{first['rows']} x {first['sequence']}"
        peaks = (f"{one['peak'] / 1e9:.1f}" for one in variants.values())
        table.add_row(name, str(first["gpus"]), rows, *peaks)
    Console().print(table)


if __name__ == "__main__":
    main()
