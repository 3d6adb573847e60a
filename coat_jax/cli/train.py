"""Trains a model: `coat train CONFIG [--field value ...]`.

CONFIG is a Python file with a function config() that returns a TrainConfig, or FILE:FUNCTION for
another one. It is executed: run those you trust. Every field of the config can be given another
value, by its path (--optimizer.peak 1e-3), or by its last part where no other field has it
(--peak 1e-3). Run with CONFIG and --help to see the values it has.

  coat train configs/llama_tiny.py                          COAT
  coat train configs/llama_tiny.py:bf16 --out out/bf16      the same in BF16, with optax's AdamW
  coat train configs/llama_tiny.py --steps 30 --peak 1e-3
  coat train configs/llama_tiny.py --print-config           the whole config, as Python

A run that was stopped goes on when the same command is given again. Exit codes: 0 done; 2 bad
input; 3 no room to save; 130 interrupted; 143 stopped by SIGTERM, after saving.
"""

import argparse
import sys

STOPPED, NO_ROOM = 143, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command line takes."""
    from coat_jax.training import overrides

    parser.usage = "coat train CONFIG [--field value ...] [--print-config] [--debug]"
    parser.epilog = overrides.explain()
    parser.add_argument("config", metavar="CONFIG", help="a Python file, or FILE:FUNCTION")
    parser.add_argument("overrides", metavar="--field value", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    from rich.console import Console

    from coat_jax.training import distributed, overrides
    from coat_jax.training.disk import DiskFull
    from coat_jax.training.loop import train

    flags = {"--help", "-h", "--print-config", "--debug"}
    given = flags.intersection(options.overrides)
    config = overrides.load_config(options.config)
    config = overrides.override(config, [a for a in options.overrides if a not in flags])
    if given & {"--help", "-h"}:
        print(overrides.explain(config))
        return 0
    if "--print-config" in given:
        print(overrides.source(config), end="")
        return 0
    distributed.start()
    console = Console(quiet=not distributed.is_main())
    try:
        outcome = train(config, console)
    except DiskFull as error:
        print(f"coat train: {error}", file=sys.stderr)
        return NO_ROOM
    if outcome.stopped:
        console.print(f"Stopped and saved after step {outcome.step:,}.", highlight=False)
        return STOPPED
    return 0
