"""What Llama-2-7B takes of each GPU's memory on 1, 2, 4 and 8 GPUs, in COAT.

    python -m experiments.recipe_memory      anywhere with XLA's CUDA plugin: nothing is computed

The step of `llama2_7b:one_gpu` is compiled ahead of time for H100s, with parameters and moments
sharded over all of them and 8 sequences of 2048 tokens on each. The peak is XLA's account of the
program, as `coat train` prints it before the first step. With 16 sequences, 1, 2 and 4 GPUs were
measured (`training_throughput`); 8 are compiled here.
"""

import dataclasses

from coat_jax.training.config_files import load_config
from experiments import records
from experiments.command import parser_of
from experiments.hopper import memory_of

CASES = ((8, 8), (8, 16), (4, 8), (2, 8), (1, 8))  # GPUs, and sequences on each


def main() -> None:
    """Compiles each, prints a line for it and writes the results."""
    options = parser_of(__doc__).parse_args()
    config = load_config("llama2_7b:one_gpu")
    cases = []
    for gpus, rows in CASES:
        memory = memory_of(dataclasses.replace(config, global_batch_size=rows * gpus), gpus)
        cases.append({"gpus": gpus, "rows": rows, **memory})
        print(f"{gpus} GPUs, {rows:2} rows each: {memory['peak'] / 1e9:6.1f} GB", flush=True)
    records.write(options.out / "recipe_memory.json", {"cases": cases})


if __name__ == "__main__":
    main()
