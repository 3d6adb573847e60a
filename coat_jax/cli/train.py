"""Train a model: `coat train CONFIG [--field value ...]`.

CONFIG is the name of a config that comes with the package (`coat train` alone lists them), or a
Python file whose function config() returns a TrainConfig. NAME:FUNCTION and FILE:FUNCTION call
another function. The file is executed: run those you trust.

Every field of the config can be given another value, by its path (--optimizer.learning_rate 1e-3),
by its last part where no other field has it (--learning_rate 1e-3), or by a name that other
trainers have for it (--lr 1e-3). `coat train CONFIG --help` shows the values that a config has,
and --help-all all fields.

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
from typing import Any

from coat_jax.errors import UserError

STOPPED = 143
HELP = {"--help", "-h", "--help-all"}
FLAGS = HELP | {"--print-config", "--debug"}
USAGE = "coat train {} [--field value ...] [--print-config] [--help] [--help-all] [--debug]"
MORE = "\n\n`coat train {} --help-all` explains all {} fields, --print-config prints a config file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.usage, parser.epilog = USAGE.format("CONFIG"), _explained()
    parser.add_argument("config", metavar="CONFIG", help="a name, or a Python file")
    parser.add_argument("overrides", metavar="--field value", nargs=argparse.REMAINDER)


def _explained(config: Any = None, name: str = "CONFIG", *, all_fields: bool = False) -> str:
    """The fields of a config with their values: those that people set first, or all."""
    from coat_jax.training.fields import fields
    from coat_jax.training.overrides import explain, first_fields

    known = fields(config)
    if all_fields:
        return explain(known)
    count = sum(not field.group for field in known)
    return explain(first_fields(config)) + MORE.format(name, count)


def check(arguments: Sequence[str]) -> int | None:
    """Handles arguments without a config, which argparse would not explain; returns an exit code.

    Without arguments the configs are listed.
    """
    from coat_jax.training.config_files import list_shipped

    first = arguments[0] if arguments else None
    if first is None:
        print(f"Configs that come with the package:\n\n{list_shipped()}\n")
        print(
            "`coat train NAME` or FILE.py trains, `coat train NAME --help` explains the settings."
        )
        return UserError.exit_code
    if first == "--help-all":
        print(_explained(all_fields=True))
        return 0
    if first.startswith("-") and first not in HELP:
        raise UserError(
            f"A config comes before the settings, as in coat train llama_tiny {first}. "
            "`coat train` alone lists those of the package."
        )
    return None


def run(options: argparse.Namespace) -> int:
    """Trains; returns the exit code."""
    from rich.console import Console

    from coat_jax import multihost
    from coat_jax.cli.output import ignore_closed_output
    from coat_jax.files import expand_user
    from coat_jax.training.checkpoint.step_folders import StepFolders
    from coat_jax.training.checkpoint.weights import CHECKPOINTS
    from coat_jax.training.cluster import communication, distributed
    from coat_jax.training.config_files import load_config, source
    from coat_jax.training.loop import train
    from coat_jax.training.overrides import override

    given = FLAGS.intersection(options.overrides)
    config = load_config(options.config)
    config = override(config, [a for a in options.overrides if a not in FLAGS])
    if given & HELP:
        print(f"usage: {USAGE.format(options.config)}\n")
        print(_explained(config, options.config, all_fields="--help-all" in given))
        return 0
    if "--print-config" in given:
        print(source(config), end="")
        return 0
    with ignore_closed_output():
        communication.use_one_queue(offload=config.optimizer.offload)
        distributed.start()
        console = Console(quiet=not multihost.is_main())
        try:
            outcome = train(config, console)
        except KeyboardInterrupt:
            saved = StepFolders(expand_user(config.out) / CHECKPOINTS).steps()
            how = f"continues after step {saved[-1]:,}, saved last" if saved else "begins anew"
            console.print(f"The same command {how}.", highlight=False)
            raise
        if outcome.stopped:
            console.print(f"Stopped and saved after step {outcome.step:,}.", highlight=False)
    return STOPPED if outcome.stopped else 0
