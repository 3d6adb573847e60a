"""Compare small number formats on each tensor of a model: `coat formats WHERE`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.
For each weight matrix and each format the table shows how many bits are right: log2 of the root
mean square of the matrix divided by that of its rounding error. One more bit halves the error.

  coat formats out/llama_124m
  coat formats Llama-3.1-8B --over tensor --fit max
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
from collections.abc import Sequence
from pathlib import Path

from coat_jax.cli.arguments import STEP, add_count, require_effects
from coat_jax.cli.model_folder import tokens_of
from coat_jax.cli.output import note, progress_bar
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.numerics.quantizer import FITS, GRANULARITIES, Quantizer, format_named
from coat_jax.printable import amount, printable, table
from coat_jax.training.checkpoint import weights
from coat_jax.training.report import best_formats

FORMATS = ("INT8", "E2M5", "E3M4", "E4M3", "E5M2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("where", type=Path, metavar="WHERE", help="the folder of a model")
    formats = f"formats to compare (default: {' '.join(FORMATS)})"
    add("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help=formats)
    add("--over", choices=GRANULARITIES, default="channel", help=f"what shares a scale {default}")
    add("--size", type=int, default=128, metavar="N", help=f"size of a group or block {default}")
    add("--fit", choices=FITS, default="mse", help=f"how a scale's range is chosen {default}")
    percentile = f"for --fit percentile {default}"
    add("--percentile", type=float, default=99.9, metavar="P", help=percentile)
    add("--text", type=Path, metavar="FILE", help="a text, to measure activations and gradients on")
    add_count(parser, "--tokens", None, "tokens of the text (default: 512)")
    add("--tokenizer", metavar="FILE", help='a tokenizer.json, or "bytes", for --text')
    add("--step", type=int, help=STEP)


def run(options: argparse.Namespace) -> int:
    """Measures each format on each tensor, and prints the tables."""
    of_text = (options.text is not None, "--text FILE")
    require_effects(options, [("tokens", *of_text), ("tokenizer", *of_text)])
    settings = {name: getattr(options, name) for name in ("over", "fit", "size", "percentile")}
    try:
        quantizers = [Quantizer(format_named(n), axis=0, **settings) for n in options.formats]
    except ValueError as error:
        raise UserError(str(error)) from None
    where = expand_user(options.where)
    weights.require_not_quantized(where, "A comparison of formats")
    config = weights.model_config(where)
    tokens: list[int] = []
    if options.text is not None:
        most = min(config.context, options.tokens or 512)
        tokens = tokens_of(options.text, where, config, options.tokenizer, most=most)
        if len(tokens) < 2:
            raise UserError(f"{options.text} has {amount(len(tokens), 'token')}: give 2 or more.")
    parameters = weights.parameters_of(where, config, step=options.step, note=note)
    found = best_formats.weights(parameters, quantizers)
    with progress_bar() as bar:
        rows = [*bar.track(found, description="Measuring")]
    print(printable(_table_of("weights", rows)))
    if tokens:
        model = weights.load(where, config, step=options.step, note=note)
        formats = [quantizer.format for quantizer in quantizers]
        in_training = best_formats.in_training(model, formats, tokens)
        print(printable(_table_of("in training", in_training)))
    return 0


def _table_of(title: str, rows: Sequence[best_formats.Row]) -> str:
    """Returns the rows as text, and a line that counts for how many of them each format is best."""
    formats = list(rows[0].bits)
    lines = [[title, *formats, "best"]]
    lines += [
        [row.tensor, *(f"{bits:.2f}" for bits in row.bits.values()), row.best] for row in rows
    ]
    best = [row.best for row in rows]
    wins = ", ".join(f"{f} for {best.count(f)}" for f in formats if f in best)
    means = ", ".join(f"{f} {sum(r.bits[f] for r in rows) / len(rows):.2f}" for f in formats)
    columns = table(lines, words=(0, len(formats) + 1))
    return f"{columns}\n\nbest: {wins} of {len(rows)}; mean bits: {means}\n"
