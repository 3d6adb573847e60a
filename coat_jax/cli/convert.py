"""Make a Hugging Face folder of a model, or quantize it: `coat convert FROM TO`.

FROM is the folder of a run, or a Hugging Face folder (config.json, safetensors). TO becomes a
Hugging Face folder, for transformers, vLLM and every command that takes a model. Tensors have the
dtype in the config of FROM, or that of --dtype, and otherwise stay the same bit for bit. One piece
of a tensor is in memory at a time. TO appears when it is complete.

With --to, the linear layers in TO have 8 bits, for inference with `coat generate`, vLLM or
transformers; with w4a8 their weights have 4 bits. Weights have one scale per output channel, or in
INT4 one for every 128 inputs of a channel. Activations stay as they are (--activations none), or
are rounded with a scale for each token (dynamic), or with one scale for a layer, which --calibrate
finds on a text (static). With --to w4a8 a text for --calibrate takes longer, and makes up for most
of the loss: weights are rounded so that their errors cancel out in what layers compute there
(GPTQ). One parameter of one layer is in memory at a time; while a text is read, the whole model is.
With w4a8 and --calibrate, sums over the inputs stay to the end: 22 GB for Llama-2-7B.

--balance reads a text and moves part of each outlier in the inputs of linear layers into their
weights. Outliers are columns that are much larger than the others, which are left few INT8 codes.
The model in TO computes the same as that in FROM, in BF16 and FP32 to the last bit. Use it with
--to int8, and before a model is trained in coat_int8. While the text is read, the whole model is in
memory. It also moves outliers in keys into queries, which makes coat generate --cache int4 better.

  coat convert out/llama_124m export --dtype bfloat16
  coat convert Llama-3.1-8B llama8b-int8 --to int8
  coat convert Llama-3.1-8B llama8b-int4 --to w4a8 --calibrate sample.txt
  coat convert out/llama_124m small --to mixed --activations static --calibrate sample.txt
  coat convert Llama-3.1-8B llama8b --balance sample.txt
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coat_jax.cli.arguments import STEP, add_count, require_effects
from coat_jax.cli.model_folder import tokens_of
from coat_jax.cli.output import exit_on_signals, note, progress_bar
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.printable import amount, printable
from coat_jax.quantization import Recipe
from coat_jax.training.checkpoint import conversion, weights

TOKENS = 65_536
FEW = 512  # tokens of a text that is noted to be short
FORMATS = {"int8": "int8", "fp8": "fp8", "mixed": "mixed", "w4a8": "int4"}
FITS = ("max", "mse", "percentile")
BIASED = (".query", ".key", ".value")  # projections that may have a bias
OF_RECIPE = ("fit", "activations", "activation_fit", "percentile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("source", type=Path, metavar="FROM", help="a folder with a model")
    add("out", type=Path, metavar="TO", help="the folder to make")
    dtype = "of the parameters in TO (default: that of FROM; with --to what the model computes in)"
    add("--dtype", choices=("float32", "bfloat16", "float16"), help=dtype)
    tokenizer = 'a tokenizer.json for texts and for TO (default: that of FROM), or "bytes"'
    add("--tokenizer", metavar="FILE", help=tokenizer)
    add("--balance", type=Path, metavar="FILE", help="a text on which the model is balanced")
    add_count(parser, "--tokens", None, f"how many of each text are read (default: {TOKENS:,})")
    add("--step", type=int, help=STEP)
    add = parser.add_argument_group("8 and 4 bits").add_argument
    to = "the format of linear layers; mixed takes int8 or fp8, which has less error, for each"
    add("--to", choices=FORMATS, help=to)
    add("--fit", choices=FITS, help="how the range of a channel is chosen (default: mse)")
    activations = "how activations are rounded (default: dynamic)"
    add("--activations", choices=("none", "static", "dynamic"), help=activations)
    static = "how the range of static ones is chosen (default: mse)"
    add("--activation-fit", choices=FITS, help=static)
    percentile = "percentile of the magnitudes that ends the range, for both (default: 99.9)"
    add("--percentile", type=float, metavar="P", help=percentile)
    leave = "layers that are not rounded, such as '*.down'; may be repeated"
    add("--leave", action="append", metavar="GLOB", help=leave)
    calibrate = "a text for static activations, for the choice of mixed, and for better w4a8"
    add("--calibrate", type=Path, metavar="FILE", help=calibrate)


def run(options: argparse.Namespace) -> int:
    """Converts, and prints a line about the result."""
    source, out = expand_user(options.source), expand_user(options.out)
    recipe = _recipe(options)
    tokens, balance_on = _tokens(options, "calibrate"), _tokens(options, "balance")
    exit_on_signals()
    with progress_bar() as bar:
        task = bar.add_task("Converting", total=None)
        schemes = conversion.convert(
            source,
            out,
            recipe,
            tokens=tokens,
            balance_on=balance_on,
            step=options.step,
            dtype=options.dtype,
            tokenizer=options.tokenizer,
            progress=lambda total, size: bar.update(task, total=total, advance=size),
            note=note,
        )
    if options.to == "w4a8" and recipe is not None:
        _note_vllm(recipe, schemes, weights.model_config(source), note)
    what = "a Hugging Face folder"
    if recipe is not None:
        formats = [scheme.format for scheme in schemes.values()]
        listed = ", ".join(f"{formats.count(f)} in {f.upper()}" for f in sorted(set(formats)))
        what = f"a quantized model; linear layers: {listed}"
    print(printable(f"{out} is {what}."))  # rich would fail if nobody reads it
    return 0


def _note_vllm(
    recipe: Recipe, schemes: Mapping[str, Any], config: Any, note: Callable[[str], object]
) -> None:
    """Notes what vLLM's kernel for W4AFP8 does not take."""
    biased = [name for name in BIASED if any(path.endswith(name) for path in schemes)]
    if recipe.activations == "static":
        note("vLLM's kernel for W4AFP8 has a scale for each token: leave out --activations static.")
    elif recipe.activations == "dynamic" and config.qkv_bias and biased:
        remedy = " ".join(f"--leave '*{name}'" for name in biased)
        note(f"vLLM's kernel for W4AFP8 takes no biases. For vLLM, leave them: {remedy}.")


def _recipe(options: argparse.Namespace) -> Recipe | None:
    """The recipe that the options describe, None without --to; raises for one without effect."""
    given = {name: value for name in OF_RECIPE if (value := getattr(options, name)) is not None}
    format: Any = FORMATS[options.to or "int8"]
    recipe = Recipe(format=format, leave=tuple(options.leave or ()), **given)
    reads = options.calibrate is not None or options.balance is not None
    quantizing = (*OF_RECIPE, "leave", "calibrate")
    rounded = "--activations static, for --to mixed with rounded activations, and for --to w4a8"
    fits = "--fit percentile and --activation-fit percentile"
    in_8_bits = options.to is not None and recipe.format != "int4"
    effects = [
        ("tokens", reads, "--calibrate and --balance"),
        ("fit", in_8_bits, "--to int8, fp8, mixed"),
        *((name, options.to is not None, f"--to {', '.join(FORMATS)}") for name in quantizing),
        ("calibrate", recipe.needs_calibration or recipe.format == "int4", rounded),
        ("activation_fit", recipe.activations == "static", "--activations static"),
        ("percentile", "percentile" in (recipe.fit, recipe.activation_fit), fits),
    ]
    require_effects(options, effects)
    if recipe.needs_calibration and options.calibrate is None:
        raise UserError(
            f"--to {options.to} with --activations {recipe.activations} needs a text to see "
            "activations on: name it, --calibrate FILE."
        )
    return None if options.to is None else recipe


def _tokens(options: argparse.Namespace, name: str) -> list[int]:
    """The first tokens of the text of --calibrate or --balance; none without it."""
    text, source = getattr(options, name), expand_user(options.source)
    if text is None:
        return []
    config, most = weights.model_config(source), options.tokens or TOKENS
    tokens = tokens_of(text, source, config, options.tokenizer, most=most)
    if not tokens:
        raise UserError(f"The text of --{name}, {text}, has no tokens: name a longer one.")
    if len(tokens) < FEW:
        note(
            f"--{name} sees {amount(len(tokens), 'token')} only, and activations may differ on "
            f"other texts: name a text of at least {FEW:,} tokens, better {TOKENS:,}."
        )
    return tokens
