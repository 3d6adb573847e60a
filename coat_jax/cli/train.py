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
any more. With --debug, an error that ends it shows its traceback.

exit codes:
  0    done
  1    a bug, or a failure of the machine: the traceback says more
  2    bad input, a folder that another run is using, or out of memory
  3    a checkpoint or the metrics could not be written, for example because the disk is full
  4    diverged: too many steps in a row had no finite loss and gradients
  130  interrupted (Ctrl-C), without saving
  143  stopped by SIGTERM, SIGHUP or SIGUSR1, after saving
"""

from collections.abc import Sequence
from pathlib import Path

from coat_jax.errors import UserError
from coat_jax.training.config import TrainConfig
from coat_jax.training.config_files import list_shipped, load_config, source
from coat_jax.training.overrides import FIRST, explain, fields, override

STOPPED = 143
EXAMPLE = "llama_tiny"  # whose values the help shows without a config
HELP = {"--help", "-h", "--help-all"}
FLAGS = HELP | {"--print-config", "--debug"}


def run(arguments: Sequence[str]) -> int:
    """Trains, or prints what a flag asks for; returns the exit code."""
    flags = FLAGS.intersection(arguments)
    name, *settings = [word for word in arguments if word not in FLAGS] or [""]
    if not arguments:
        print(f"Configs that come with the package:\n\n{list_shipped()}\n")
        print("`coat train NAME` or FILE.py trains, `coat train NAME --help` explains it.")
        return UserError.exit_code
    config = override(load_config(name or (EXAMPLE if flags & HELP else "")), settings)
    if flags & HELP:
        print(_help(name, config, all_fields="--help-all" in flags))
        return 0
    if "--print-config" in flags:
        print(source(config), end="")
        return 0
    return _train(config)


def _help(name: str, config: TrainConfig, *, all_fields: bool) -> str:
    """Explains the fields that people set first, or all; without a name after the manual."""
    known, command = fields(config), f"coat train {name or 'CONFIG'}"
    usage = f"usage: {command} [--field value ...] [--print-config] [--help] [--help-all] [--debug]"
    if all_fields:
        return f"{usage}\n\n{explain(known)}"
    manual = [] if name else [__doc__.strip()]
    count = sum(not field.group for field in known)
    more = (
        f"`{command} --help-all` explains all {count} fields, --print-config prints a config file."
    )
    first = [field for field in known if field.name in FIRST]
    return "\n\n".join([usage, *manual, explain(first), more])


def _train(config: TrainConfig) -> int:
    import jax
    from rich.console import Console

    from coat_jax.cli.output import ignore_closed_output
    from coat_jax.training.checkpoint.step_folders import StepFolders
    from coat_jax.training.checkpoint.weights import CHECKPOINTS
    from coat_jax.training.cluster import distributed
    from coat_jax.training.compilation import use_one_queue
    from coat_jax.training.loop import train

    with ignore_closed_output():
        use_one_queue(offload=config.optimizer.offload)
        distributed.start()
        console = Console(quiet=jax.process_index() != 0)
        try:
            outcome = train(config, console)
        except KeyboardInterrupt:
            saved = StepFolders(Path(config.out) / CHECKPOINTS).steps()
            how = f"continues after step {saved[-1]:,}, saved last" if saved else "begins anew"
            console.print(f"The same command {how}.", highlight=False)
            raise
        if outcome.stopped:
            console.print(f"Stopped and saved after step {outcome.step:,}.", highlight=False)
    return STOPPED if outcome.stopped else 0
