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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_jax.cli.output import note
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.printable import counted, printable, table

if TYPE_CHECKING:
    from coat_jax.models import Config
    from coat_jax.numerics.quantizer import Quantizer
    from coat_jax.training.report.best_formats import Row

FORMATS = ("INT8", "E2M5", "E3M4", "E4M3", "E5M2")
TITLES = {"weights": "weights", "in_training": "in training"}  # of the tables, by their JSON keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("where", type=Path, metavar="WHERE", help="the folder of a model")
    formats = f"formats to compare (default: {' '.join(FORMATS)})"
    add("--formats", nargs="+", default=FORMATS, metavar="FORMAT", help=formats)
    scales = ("tensor", "channel", "group", "block")
    add("--over", choices=scales, default="channel", help=f"what shares a scale {default}")
    add("--size", type=int, metavar="N", help="size of a group or block (default: 128)")
    ranges = ("mse", "max", "percentile")
    add("--fit", choices=ranges, default="mse", help=f"how a scale's range is chosen {default}")
    percentile = "for --fit percentile (default: 99.9)"
    add("--percentile", type=float, metavar="P", help=percentile)
    sample = f"elements of a matrix to round, in whole channels or rows; 0 for all {default}"
    add("--sample", type=int, default=1 << 20, metavar="N", help=sample)
    add("--text", type=Path, metavar="FILE", help="a text, to measure activations and gradients on")
    add("--tokens", type=int, metavar="N", help="tokens of the text (default: 512)")
    add("--tokenizer", metavar="FILE", help='a tokenizer.json, or "bytes", for --text')
    add("--step", type=int, help="step of a run's checkpoint; by default the newest intact one")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Measures each format on each tensor, and prints the tables."""
    from rich.console import Console
    from rich.progress import track

    from coat_jax.training.checkpoint import weights
    from coat_jax.training.report import best_formats

    _settle(options)
    quantizers = _quantizers(options)
    where = expand_user(options.where)
    weights.require_not_quantized(where, "A comparison of formats")
    config = weights.model_config(where)
    tokens = _tokens(options, config, quantizers)
    parameters = weights.parameters_of(where, config, step=options.step, note=note)
    found = best_formats.weights(parameters, quantizers, sample=options.sample)
    err = Console(stderr=True)
    shown = track(found, "Measuring", console=err, transient=True, disable=not err.is_terminal)
    tables = {"weights": list(shown)}
    if tokens:

        def load(config: "Config") -> Any:
            return weights.load(where, config, step=options.step, note=note)

        formats = [quantizer.format for quantizer in quantizers]
        tables["in_training"] = best_formats.in_training(load, config, formats, tokens)
    if options.json:
        print(json.dumps(_as_json(options, tables), indent=2))
    else:
        for key, rows in tables.items():
            print(printable(_table_of(TITLES[key], rows)))
    return 0


def _settle(options: argparse.Namespace) -> None:
    """Gives options their defaults; raises for one that has no effect with the others."""
    effects = (
        ("size", 128, options.over in ("group", "block"), "--over group or --over block"),
        ("percentile", 99.9, options.fit == "percentile", "--fit percentile"),
        ("tokens", 512, options.text is not None, "--text FILE"),
        ("tokenizer", None, options.text is not None, "--text FILE"),
    )
    for name, default, has_effect, needed in effects:
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif not has_effect:
            raise UserError(f"--{name} is for {needed}: add that, or leave it out.")


def _quantizers(options: argparse.Namespace) -> list["Quantizer"]:
    """One for each format."""
    from coat_jax.numerics.quantizer import Quantizer

    scales = {name: getattr(options, name) for name in ("over", "fit", "size", "percentile")}
    try:
        found = [Quantizer(name, **scales) for name in options.formats]
    except ValueError as error:
        raise UserError(str(error)) from None
    for quantizer in found:
        if not getattr(quantizer.format, "signed", True):
            raise UserError(f"{quantizer.format.name} has no sign, and weights have both signs.")
    return found


def _tokens(
    options: argparse.Namespace, config: "Config", quantizers: Sequence["Quantizer"]
) -> list[int]:
    """The tokens of --text; none without it."""
    from coat_jax.cli.texts import tokens_of
    from coat_jax.numerics.integer_format import IntegerFormat

    if options.text is None:
        return []
    for fmt in (quantizer.format for quantizer in quantizers):
        if isinstance(fmt, IntegerFormat) and (not fmt.symmetric or fmt.bits > 11):
            raise UserError(f"--text simulates symmetric integers up to INT11, not {fmt.name}.")
    if options.tokens < 2:
        raise UserError(f"--tokens {options.tokens} must be 2 or more: a token and the next one.")
    where, most = expand_user(options.where), min(options.tokens, config.context)
    tokens = tokens_of(options.text, where, config, options.tokenizer, most=most)
    if len(tokens) < 2:
        raise UserError(f"{options.text} has {counted(len(tokens), 'token')}: give 2 or more.")
    return tokens


def _table_of(title: str, rows: Sequence["Row"]) -> str:
    """The rows as text, and a line that counts for how many of them each format is best."""
    formats = list(rows[0].bits)
    lines = [[title, *formats, "best"]]
    lines += [[row.tensor, *(f"{row.bits[f]:.2f}" for f in formats), row.best] for row in rows]
    best = [row.best for row in rows]
    wins = ", ".join(f"{f} for {best.count(f)}" for f in formats if f in best)
    means = ", ".join(f"{f} {sum(r.bits[f] for r in rows) / len(rows):.2f}" for f in formats)
    columns = table(lines, words=(0, len(formats) + 1))
    return f"{columns}\n\nbest: {wins} of {len(rows)}; mean bits: {means}\n"


def _as_json(options: argparse.Namespace, tables: dict[str, list["Row"]]) -> dict[str, Any]:
    settings = {name: getattr(options, name) for name in ("over", "fit", "sample")}
    if options.over in ("group", "block"):
        settings["size"] = options.size
    if options.fit == "percentile":
        settings["percentile"] = options.percentile
    listed = {
        key: [{**row._asdict(), "best": row.best} for row in rows] for key, rows in tables.items()
    }
    return {"model": str(options.where), "settings": settings, **listed}
