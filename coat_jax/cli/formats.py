"""Compare small number formats on each tensor of a model: `coat formats WHERE`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.
For each weight matrix and each format the table shows how many bits are right: log2 of the root
mean square of the matrix divided by that of its rounding error. One more bit halves the error.

  coat formats out/llama_124m
  coat formats Llama-3.1-8B --over tensor --fit max --json
  coat formats Llama-3.1-8B --formats INT4 E2M1 E3M0 --over group --size 32
  coat formats out/llama_124m --text sample.txt

A format is INT2 to INT16 (INT8:asymmetric for data on one side of zero), or E and M with their
numbers of bits: E4M3 and E5M2 are the formats of FP8, E2M1 is FP4. A scale belongs to a tensor, an
output channel, a group of neighbours or a block; a block's scale is a power of two. The range of a
scale ends at the largest element (max), at a percentile of magnitudes (percentile), or where the
squared error is least (mse).

With --text a second table shows what training on that text rounds: inputs, weights and gradients of
all linear layers. Their scales are powers of two, one per tensor, from its largest element.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from coat_jax.cli.arguments import STEP, add_count, require_effects
from coat_jax.cli.model_folder import tokens_of
from coat_jax.cli.output import note
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.models import Config
from coat_jax.numerics.integer_format import IntegerFormat
from coat_jax.numerics.quantizer import FITS, GRANULARITIES, Quantizer, format_named
from coat_jax.printable import amount, printable, table
from coat_jax.training.checkpoint import weights
from coat_jax.training.report import best_formats

FORMATS = ("INT8", "E2M5", "E3M4", "E4M3", "E5M2")
SETTINGS = ("over", "fit", "size", "percentile")  # of a quantizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("where", type=Path, metavar="WHERE", help="the folder of a model")
    formats = f"formats to compare (default: {' '.join(FORMATS)})"
    add("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help=formats)
    add("--over", choices=GRANULARITIES, default="channel", help=f"what shares a scale {default}")
    add("--size", type=int, metavar="N", help="size of a group or block (default: 128)")
    add("--fit", choices=FITS, default="mse", help=f"how a scale's range is chosen {default}")
    percentile = "for --fit percentile (default: 99.9)"
    add("--percentile", type=float, metavar="P", help=percentile)
    sample = f"elements of a matrix to round, in whole channels or rows; 0 for all {default}"
    add("--sample", type=int, default=1 << 20, metavar="N", help=sample)
    add("--text", type=Path, metavar="FILE", help="a text, to measure activations and gradients on")
    add_count(parser, "--tokens", None, "tokens of the text (default: 512)")
    add("--tokenizer", metavar="FILE", help='a tokenizer.json, or "bytes", for --text')
    add("--step", type=int, help=STEP)
    add("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Measures each format on each tensor, and prints the tables."""
    effects = [
        ("size", options.over in ("group", "block"), "--over group and --over block"),
        ("percentile", options.fit == "percentile", "--fit percentile"),
        ("tokens", options.text is not None, "--text FILE"),
        ("tokenizer", options.text is not None, "--text FILE"),
    ]
    require_effects(options, effects)
    quantizers = _quantizers(options)
    where = expand_user(options.where)
    weights.require_not_quantized(where, "A comparison of formats")
    config = weights.model_config(where)
    tokens = _tokens(options, config, quantizers) if options.text else []
    parameters = weights.parameters_of(where, config, step=options.step, note=note)
    found = best_formats.weights(parameters, quantizers, sample=options.sample)
    err = Console(stderr=True)
    rows = track(found, "Measuring", console=err, transient=True, disable=not err.is_terminal)
    tables = {"weights": [*rows]}
    if tokens:
        load = partial(weights.load, where, step=options.step, note=note)
        formats = [quantizer.format for quantizer in quantizers]
        tables["in_training"] = best_formats.in_training(load, config, formats, tokens)
    if options.json:
        settings = {name: getattr(quantizers[0], name) for name in SETTINGS}
        listed: dict[str, Any] = {"model": str(options.where)}
        listed["settings"] = settings | {"sample": options.sample}
        for name, table_rows in tables.items():
            listed[name] = [{**row._asdict(), "best": row.best} for row in table_rows]
        print(json.dumps(listed, indent=2))
    else:
        for name, table_rows in tables.items():
            print(printable(_table_of(name.replace("_", " "), table_rows)))
    return 0


def _quantizers(options: argparse.Namespace) -> list[Quantizer]:
    """Returns a quantizer for each format."""
    given = {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    try:
        found = [Quantizer(format_named(name), **given) for name in options.formats]
    except ValueError as error:
        raise UserError(str(error)) from None
    for quantizer in found:
        if not getattr(quantizer.format, "signed", True):
            raise UserError(f"{quantizer.format.name} has no sign, and weights have both signs.")
    return found


def _tokens(
    options: argparse.Namespace, config: Config, quantizers: Sequence[Quantizer]
) -> list[int]:
    """Returns the tokens of --text."""
    for fmt in (quantizer.format for quantizer in quantizers):
        if isinstance(fmt, IntegerFormat) and (not fmt.symmetric or fmt.bits > 11):
            raise UserError(f"--text simulates symmetric integers up to INT11, not {fmt.name}.")
    where, most = expand_user(options.where), min(config.context, options.tokens or 512)
    tokens = tokens_of(options.text, where, config, options.tokenizer, most=most)
    if len(tokens) < 2:
        raise UserError(f"{options.text} has {amount(len(tokens), 'token')}: give 2 or more.")
    return tokens


def _table_of(title: str, rows: Sequence[best_formats.Row]) -> str:
    """Returns the rows as text, and a line that counts for how many of them each format is best."""
    formats = list(rows[0].bits)
    lines = [[title, *formats, "best"]]
    lines += [[row.tensor, *(f"{row.bits[f]:.2f}" for f in formats), row.best] for row in rows]
    best = [row.best for row in rows]
    wins = ", ".join(f"{f} for {best.count(f)}" for f in formats if f in best)
    means = ", ".join(f"{f} {sum(r.bits[f] for r in rows) / len(rows):.2f}" for f in formats)
    columns = table(lines, words=(0, len(formats) + 1))
    return f"{columns}\n\nbest: {wins} of {len(rows)}; mean bits: {means}\n"
