"""Train a model: `coat train CONFIG [--field value ...]`.

CONFIG is the name of a config that comes with the package (`coat train` alone lists them), or a
Python file whose function config() returns a TrainConfig. NAME:FUNCTION and FILE:FUNCTION call
another function. The file is executed: run those you trust.

Every field of the config can be given another value, by its path (--optimizer.learning_rate 1e-3),
or by its last part where no other field has it (--learning_rate 1e-3). Run with CONFIG and --help
to see the values it has.

  coat train llama_tiny                          COAT
  coat train llama_tiny:bf16 --out out/bf16      the same in BF16, with optax's AdamW
  coat train llama_tiny --total_steps 30 --learning_rate 1e-3
  coat train llama_tiny --print-config           the config as Python, without defaults

The same command continues a run that was stopped. A run also continues when nobody reads its output
any more.

exit codes:
  0    done
  1    a bug, or a failure of the machine: the traceback says more
  2    bad input, a folder that another run is using, or out of memory
  3    a checkpoint or the metrics could not be written, for example because the disk is full
  4    diverged: too many steps in a row had no finite loss and gradients
  130  interrupted (Ctrl-C), without saving
  143  stopped by SIGTERM, SIGHUP or SIGUSR1, after saving
"""

import argparse
from collections.abc import Sequence

from coat_jax.errors import UserError

STOPPED = 143
HELP = {"--help", "-h"}
FLAGS = HELP | {"--print-config", "--debug"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    from coat_jax.training.fields import explain

    parser.usage = "coat train CONFIG [--field value ...] [--print-config] [--debug]"
    parser.epilog = explain()
    parser.add_argument("config", metavar="CONFIG", help="a name, or a Python file")
    parser.add_argument("overrides", metavar="--field value", nargs=argparse.REMAINDER)


def run_without_arguments() -> int:
    """Lists the configs that there are; returns the exit code."""
    from coat_jax.training.config_files import list_shipped

    print(
        "Name a config: one that comes with the package, or a Python file of your own.\n\n"
        f"{list_shipped()}\n\n"
        "`coat train NAME` trains, `coat train NAME --help` lists all settings."
    )
    return UserError.exit_code


def check(arguments: Sequence[str]) -> None:
    """Raises an error if settings come first: argparse would not say that a config is missing."""
    first = arguments[0]
    if not first.startswith("-") or first in HELP:
        return
    from coat_jax.training.config_files import SHIPPED

    example = "--total_steps" if first in FLAGS else first.partition("=")[0]
    raise UserError(
        f"A config comes before the settings, as in coat train llama_tiny {example} ... "
        f"The package has {', '.join(SHIPPED)}; `coat train` alone describes them."
    )


def run(options: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    from rich.console import Console

    from coat_jax import agreement
    from coat_jax.cli.output import lasting
    from coat_jax.files import expanded
    from coat_jax.training.checkpoint.step_folders import StepFolders
    from coat_jax.training.checkpoint.weights import CHECKPOINTS
    from coat_jax.training.cluster import communication, distributed
    from coat_jax.training.config_files import load_config, source
    from coat_jax.training.fields import explain
    from coat_jax.training.loop import train
    from coat_jax.training.overrides import override

    given = FLAGS.intersection(options.overrides)
    config = load_config(options.config)
    config = override(config, [a for a in options.overrides if a not in FLAGS])
    if given & HELP:
        print(explain(config))
        return 0
    if "--print-config" in given:
        print(source(config), end="")
        return 0
    with lasting():
        communication.use_one_queue(offload=config.optimizer.offload)
        distributed.start()
        console = Console(quiet=not agreement.is_main())
        try:
            outcome = train(config, console)
        except KeyboardInterrupt:
            saved = StepFolders(expanded(config.out) / CHECKPOINTS).steps()
            how = f"continues after step {saved[-1]:,}, saved last" if saved else "begins anew"
            console.print(f"The same command {how}.", highlight=False)
            raise
        if outcome.stopped:
            console.print(f"Stopped and saved after step {outcome.step:,}.", highlight=False)
    return STOPPED if outcome.stopped else 0
