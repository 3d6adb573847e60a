"""Convert a model from or to Hugging Face's format, or quantize it: `coat convert FROM TO`.

If FROM is a Hugging Face folder (config.json, safetensors), TO becomes the folder of a run. Its one
checkpoint holds only parameters, for `coat generate` and for `coat train --init_from`. If FROM is
the folder of a run, TO becomes a Hugging Face folder. Tensors stay the same bit for bit, unless
--dtype changes them. One piece of a tensor is in memory at a time. TO appears when it is complete.

With --to, FROM may be either kind of folder. TO becomes a Hugging Face folder whose linear layers
have 8 bits, for inference with `coat generate`, vLLM or transformers. Weights have one scale per
output channel. Activations stay as they are (--activations none), or are rounded with a scale for
each token (dynamic), or with one scale for a layer, which --calibrate finds on a text (static). One
parameter of one layer is in memory at a time; during calibration, the whole model.

--balance reads a text and moves part of each outlier in the inputs of linear layers into their
weights. Outliers are columns that are much larger than the others, which are left few INT8 codes.
The model in TO computes the same as that in FROM, in BF16 and FP32 to the last bit. Use it with
--to int8, and before a model is trained in coat_int8. While the text is read, the whole model is in
memory.

  coat convert Llama-3.1-8B llama8b
  coat convert out/llama_124m export --dtype bfloat16
  coat convert Llama-3.1-8B llama8b-int8 --to int8
  coat convert out/llama_124m small --to mixed --activations static --calibrate sample.txt
  coat convert Llama-3.1-8B llama8b --balance sample.txt
"""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_jax.cli.output import note, progress_bar
from coat_jax.errors import UserError
from coat_jax.files import expanded, status
from coat_jax.printable import counted, printable

if TYPE_CHECKING:
    from coat_jax.quantization import Recipe

DTYPES = ("float32", "bfloat16", "float16")
TOKENS = 65_536
FEW = 512  # tokens of a text that is noted to be short
UNSEEN = {"calibrate": "are clipped", "balance": "may remain or become outliers"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("source", type=Path, metavar="FROM", help="a folder with a model")
    add("out", type=Path, metavar="TO", help="the folder to make")
    add(
        "--dtype",
        choices=DTYPES,
        help="dtype of the parameters in TO; by default as in FROM, or with --to the dtype that "
        "the model computes in",
    )
    add(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizer.json, which is copied to TO and reads the texts; by default that in "
        'FROM; or "bytes", if each token is a byte',
    )
    add("--balance", type=Path, metavar="FILE", help="a text on which the model is balanced")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"how many of each text are read (default: {TOKENS:,})",
    )
    add("--step", type=int, help="step of a run's checkpoint; by default the newest intact one")
    quantized = parser.add_argument_group("8 bits")
    add = quantized.add_argument
    add(
        "--to",
        choices=("int8", "fp8", "mixed"),
        help="the format of linear layers; mixed chooses the one with less error for each",
    )
    fits = ("max", "mse", "percentile")
    add("--fit", choices=fits, help="how the range of a channel is chosen (default: mse)")
    add(
        "--activations",
        choices=("none", "static", "dynamic"),
        help="how activations are rounded (default: dynamic)",
    )
    add(
        "--activation-fit",
        choices=fits,
        help="how the range of static ones is chosen (default: mse)",
    )
    add(
        "--percentile",
        type=float,
        metavar="P",
        help="which percentile of the magnitudes ends the range, for --fit percentile and "
        "--activation-fit percentile (default: 99.9)",
    )
    add(
        "--leave",
        action="append",
        metavar="GLOB",
        help="layers that are not rounded, such as '*.down'; may be repeated",
    )
    add(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="a text for the ranges of static activations, and for the choice of mixed",
    )


def run(options: argparse.Namespace) -> int:
    """Converts, and prints a line about the result."""
    from coat_jax.cli.texts import BYTES
    from coat_jax.training.checkpoint import weights

    source = expanded(options.source)
    of_run = weights.is_run(weights.read_config_json(source))
    if options.step is not None and not of_run:
        raise UserError(
            f"--step chooses among the checkpoints of a run, and {source} is a Hugging Face folder."
        )
    if options.tokenizer is not None and not of_run and status(source / "tokenizer.json"):
        raise UserError(
            f"--tokenizer is for a folder without a tokenizer.json, and {source} has one: leave it "
            "out."
        )
    no_text = options.calibrate is None and options.balance is None
    if options.tokenizer == BYTES and no_text:
        raise UserError(
            f"--tokenizer {BYTES} is for --calibrate and --balance. No file says that tokens are "
            "bytes, so there is none to copy: leave it out."
        )
    if options.tokens is not None:
        if no_text:
            raise UserError(
                "--tokens says how much of a text is read: add --calibrate or --balance."
            )
        if options.tokens < 1:
            raise UserError(f"--tokens {options.tokens} must be 1 or more.")
    if options.to is not None:
        what = _quantize(options)
    else:
        for name in QUANTIZING:
            if getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} says how to quantize: add --to int8, fp8 or mixed.")
        what = _convert(options, of_run=of_run)
    print(printable(f"{expanded(options.out)} is {what}."))  # rich would fail if nobody reads it
    return 0


# --- Texts -----------------------------------------------------------------------------------


def _tokens(options: argparse.Namespace, name: str) -> list[int]:
    """The first tokens of the text of --calibrate or --balance; none without it."""
    from coat_jax.cli.texts import tokens_of
    from coat_jax.training.checkpoint import weights

    text, source = getattr(options, name), expanded(options.source)
    if text is None:
        return []
    config, most = weights.model_config(source), options.tokens or TOKENS
    tokens = tokens_of(text, source, config, options.tokenizer, most=most)
    if not tokens:
        raise UserError(f"The text of --{name}, {text}, has no tokens: name a longer one.")
    if len(tokens) < FEW:
        note(
            f"--{name} sees {counted(len(tokens), 'token')} only. Activations that are larger on "
            f"other texts {UNSEEN[name]}: name a text of at least {FEW:,} tokens, better "
            f"{TOKENS:,}."
        )
    return tokens


# --- Between Hugging Face and runs -----------------------------------------------------------


def _convert(options: argparse.Namespace, *, of_run: bool) -> str:
    """Converts, and returns a description of the result."""
    from coat_jax.training.checkpoint import conversion

    source, out = expanded(options.source), expanded(options.out)
    with _settings(options) as settings:
        if not of_run:
            conversion.to_run(source, out, **settings)
            return "the folder of a run"
        conversion.to_hugging_face(source, out, step=options.step, note=note, **settings)
        return "a Hugging Face folder"


@contextlib.contextmanager
def _settings(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What all conversions take; a terminal shows how much has been read."""
    from coat_jax.cli.texts import BYTES

    balance_on = _tokens(options, "balance")
    with progress_bar() as bar:
        task = bar.add_task("", total=None)
        yield {
            "dtype": options.dtype,
            "balance_on": balance_on,
            "tokenizer": None if options.tokenizer == BYTES else options.tokenizer,
            "progress": lambda done, total: bar.update(task, completed=done, total=total),
        }


# --- 8 bits ----------------------------------------------------------------------------------

QUANTIZING = ("fit", "activations", "activation_fit", "percentile", "leave", "calibrate")


def _quantize(options: argparse.Namespace) -> str:
    """Quantizes, and returns a description of the result."""
    from coat_jax.training.checkpoint import conversion, weights

    source, recipe = expanded(options.source), _recipe(options)
    weights.require_not_quantized(source, "Quantization")
    tokens = _tokens(options, "calibrate")
    with _settings(options) as settings:
        schemes = conversion.to_quantized(
            source, options.out, recipe, tokens=tokens, step=options.step, note=note, **settings
        )
    formats = [scheme.format for scheme in schemes.values()]
    listed = ", ".join(f"{formats.count(f)} in {f.upper()}" for f in sorted(set(formats)))
    return f"a quantized model; linear layers: {listed}"


def _recipe(options: argparse.Namespace) -> "Recipe":
    """The recipe that the options describe; raises if a text is missing or not needed."""
    from coat_jax.quantization import Recipe

    names = ("fit", "activations", "activation_fit", "percentile")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    recipe = Recipe(format=options.to, leave=tuple(options.leave or ()), **given)
    what = f"--to {recipe.format} with --activations {recipe.activations}"
    if not recipe.calibrated:
        if options.calibrate is not None:
            raise UserError(
                "--calibrate is for --activations static, or for --to mixed with rounded "
                f"activations; {what} needs no text."
            )
    elif options.calibrate is None:
        raise UserError(f"{what} needs a text to see activations on: name it, --calibrate FILE.")
    if options.balance is not None and (recipe.format == "fp8" or recipe.activations == "none"):
        raise UserError(
            f"--balance is for activations in INT8, and {what} has none: leave it out. FP8 does "
            "not suffer from outliers."
        )
    if options.activation_fit is not None and recipe.activations != "static":
        raise UserError(
            f"--activation-fit is for --activations static, and {what} finds no range for them: "
            "leave it out."
        )
    if options.percentile is not None and "percentile" not in (recipe.fit, recipe.activation_fit):
        raise UserError(
            "--percentile is for --fit percentile or --activation-fit percentile: add one of "
            "these, or leave it out."
        )
    return recipe
