"""Trains a model: `coat train CONFIG [--field value ...]`.

CONFIG is the name of a config that comes with the package (`coat train` alone lists them), or a
Python file whose function config() returns a TrainConfig. NAME:FUNCTION and FILE:FUNCTION call
another function. The file is executed: run those you trust.

Every field of the config can be given another value, by its path (--optimizer.learning_rate 1e-3),
or by its last part where no other field has it (--learning_rate 1e-3). Run with CONFIG and --help
to see the values it has.

  coat train llama_tiny                          COAT
  coat train llama_tiny:bf16 --out out/bf16      the same in BF16, with optax's AdamW
  coat train llama_tiny --total_steps 30 --learning_rate 1e-3
  coat train llama_tiny --print-config           the whole config, as Python

A run that was stopped goes on when the same command is given again. It also goes on when nobody
reads its output any more.

exit codes:
  0    done
  1    a bug, or a failure of the machine: the traceback says more
  2    bad input, a folder that another run is using, or out of memory
  3    a checkpoint or the metrics could not be written: no room, say
  4    diverged: too many steps in a row had no finite loss and gradients
  130  interrupted (Ctrl-C), without saving
  143  stopped by SIGTERM, SIGHUP or SIGUSR1, after saving
"""

import argparse

from coat_jax.errors import UserError

STOPPED = 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the command line takes."""
    from coat_jax.training import overrides

    parser.usage = "coat train CONFIG [--field value ...] [--print-config] [--debug]"
    parser.epilog = overrides.explain()
    parser.add_argument("config", metavar="CONFIG", help="a name, or a Python file")
    parser.add_argument("overrides", metavar="--field value", nargs=argparse.REMAINDER)


def run_without_arguments() -> int:
    """Lists the configs that there are; returns the exit code."""
    from coat_jax.training import overrides

    print(
        "Name a config: one that comes with the package, or a Python file of your own.\n\n"
        f"{overrides.list_shipped()}\n\n"
        "`coat train NAME` trains, `coat train NAME --help` lists all settings."
    )
    return UserError.exit_code


def run(options: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    from rich.console import Console

    from coat_jax.cli.output import lasting
    from coat_jax.training import overrides
    from coat_jax.training.cluster import distributed
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
    with lasting():
        distributed.start()
        console = Console(quiet=not distributed.is_main())
        outcome = train(config, console)
        if outcome.stopped:
            console.print(f"Stopped and saved after step {outcome.step:,}.", highlight=False)
    return STOPPED if outcome.stopped else 0
