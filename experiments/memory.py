"""What the trainer's step takes of a GPU's memory, by XLA's account.

    python -m experiments.memory             with XLA's CUDA plugin; computes nothing
    python -m experiments.memory released    one of these

    config      each config that comes with the package, in COAT and in BF16, with its own batch, or
                with one microbatch of it; layers in a loop: unrolled, they take as much or less
    recipe      Llama-2-7B in COAT on 1, 2, 4 and 8 GPUs, parameters and moments sharded over all
                of them. With 16 sequences on each, 1, 2 and 4 were measured (`training_throughput`)
    released    Llama-2-7B in COAT with gradients kept until the end of the backward pass, and with
                `--optimizer.release_gradients`

Steps are compiled ahead of time for H100s. The account is what `coat train` prints before the first
step.
"""

import dataclasses
from typing import Any

from coat_jax.training.config import TrainConfig
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
LLAMA2_7B = "llama2_7b:one_gpu"
RECIPES = ((8, 8), (8, 16), (4, 8), (2, 8), (1, 8))  # GPUs, and sequences on each
BATCHES = ((1, 256), (1, 2048), (4, 2048), (16, 2048))  # sequences and their length
WAYS = {"kept": False, "released": True}

Figures = dict[str, Any]


def main() -> None:
    """Compiles the steps, prints a line for each and writes the results."""
    parser = parser_of(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of: {', '.join(CASES)}")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"{unknown.pop()!r} is none of {', '.join(CASES)}.")
    for case in options.cases or CASES:
        records.write(options.out / f"{case}_memory.json", CASES[case]())


def config_memory() -> Figures:
    """By config and variant."""
    figures: Figures = {}
    for name, gpus in GPUS.items():
        figures[name] = {}
        for variant, function in VARIANTS.items():
            config = load_config(f"{name}:{function}")
            config = dataclasses.replace(config, model=dataclasses.replace(config.model, scan=True))
            rows = config.global_batch_size // config.gradient_accumulation_steps // gpus
            sizes = {"gpus": gpus, "rows": rows, "sequence": config.sequence_length}
            figures[name][variant] = sizes | _compiled(config, gpus, f"{name} {variant}")
    return figures


def recipe_memory() -> Figures:
    """By number of GPUs and sequences."""
    cases = []
    for gpus, rows in RECIPES:
        config = dataclasses.replace(load_config(LLAMA2_7B), global_batch_size=rows * gpus)
        name = f"{gpus} GPUs, {rows} rows each"
        cases.append({"gpus": gpus, "rows": rows, **_compiled(config, gpus, name)})
    return {"cases": cases}


def released_memory() -> Figures:
    """By what becomes of gradients, and by batch."""
    figures: Figures = {way: [] for way in WAYS}
    config = load_config(LLAMA2_7B)
    for batch, length in BATCHES:
        for way, release in WAYS.items():
            one = dataclasses.replace(
                config,
                global_batch_size=batch,
                sequence_length=length,
                optimizer=dataclasses.replace(config.optimizer, release_gradients=release),
            )
            memory = _compiled(one, 1, f"{batch} x {length}, gradients {way}")
            figures[way].append({"batch": batch, "sequence": length, **memory})
    return figures


def _compiled(config: TrainConfig, gpus: int, name: str) -> Figures:
    memory = memory_of(config, gpus)
    print(f"{name:32} {memory['peak'] / 1e9:6.1f} GB", flush=True)
    return memory


CASES = {
    "config": config_memory,
    "recipe": recipe_memory,
    "released": released_memory,
}


if __name__ == "__main__":
    main()
