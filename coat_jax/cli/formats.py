"""Compare small number formats on each tensor of a model: `coat formats WHERE`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.
For each weight matrix and each format the table shows how many bits are right: log2 of the root
mean square of the matrix divided by that of its rounding error. One more bit halves the error.

  coat formats out/llama_124m
  coat formats Llama-3.1-8B --over tensor --fit max --out formats.png
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
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_jax.cli.output import note, on_terminal
from coat_jax.errors import UserError
from coat_jax.files import expanded, is_folder, is_regular, path_failures
from coat_jax.printable import counted, printable, table

if TYPE_CHECKING:
    from coat_jax.models import Config
    from coat_jax.numerics.quantizer import AnyFormat, Quantizer
    from coat_jax.training.report.best_formats import Row

FORMATS = ("INT8", "E2M5", "E3M4", "E4M3", "E5M2")
SAMPLE = 1 << 20
SIZE, PERCENTILE, TOKENS = 128, 99.9, 512  # where the options do not say otherwise
RESULT = {"model", "settings", "weights"}  # keys of what --out writes
TITLES = {"weights": "weights", "in_training": "in training"}  # of the tables, by their JSON keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add("where", type=Path, metavar="WHERE", help="the folder of a model")
    add(
        "--formats",
        nargs="+",
        default=FORMATS,
        metavar="FORMAT",
        help=f"formats to compare (default: {' '.join(FORMATS)})",
    )
    add(
        "--over",
        choices=("tensor", "channel", "group", "block"),
        default="channel",
        help="what shares a scale (default: %(default)s)",
    )
    add(
        "--size",
        type=int,
        metavar="N",
        help=f"size of a group or block (default: {SIZE})",
    )
    add(
        "--fit",
        choices=("mse", "max", "percentile"),
        default="mse",
        help="how the range of a scale is chosen (default: %(default)s)",
    )
    add(
        "--percentile",
        type=float,
        metavar="P",
        help=f"for --fit percentile (default: {PERCENTILE})",
    )
    add(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help="elements of a matrix to round, in whole channels or rows; 0 for all "
        "(default: %(default)s)",
    )
    add("--text", type=Path, metavar="FILE", help="a text, to measure activations and gradients on")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"tokens of the text to read (default: {TOKENS})",
    )
    add("--tokenizer", metavar="FILE", help='a tokenizer.json, or "bytes", for --text')
    add("--step", type=int, help="step of a run's checkpoint; by default the newest intact one")
    add("--out", type=Path, metavar="FILE.png", help="writes a picture, and the numbers to a .json")
    add("--json", action="store_true", help="print JSON instead of a table")


def run(options: argparse.Namespace) -> int:
    """Measures each format on each tensor, and prints the tables."""
    from coat_jax.training.checkpoint import weights
    from coat_jax.training.report import best_formats
    from coat_jax.training.report.output import save

    _settle(options)
    quantizers = _quantizers(options)
    out = None if options.out is None else expanded(options.out)
    if out is not None:
        _require_place(out)
    where = expanded(options.where)
    weights.require_not_quantized(where, "A comparison of formats")
    config = weights.model_config(where)
    tokens = _tokens(options, config, quantizers)
    parameters = weights.parameters_of(where, config, step=options.step, note=note)
    found = best_formats.weights(parameters, quantizers, sample=options.sample)
    tables = {"weights": list(_shown(found))}
    if tokens:

        def load(config: "Config") -> Any:
            return weights.load(where, config, step=options.step, note=note)

        formats = [quantizer.format for quantizer in quantizers]
        tables["in_training"] = best_formats.in_training(load, config, formats, tokens)
    numbers = json.dumps(_as_json(options, tables), indent=2)
    try:
        if out is not None:
            best_formats.draw(tables, out)
            save(numbers + "\n", out.with_suffix(".json"))
    finally:  # print the table even if the picture cannot be written
        shown = (_table_of(TITLES[key], rows) for key, rows in tables.items())
        print(printable(numbers if options.json else "\n".join(shown)))
    if out is not None and not options.json:
        print(printable(f"{out}\n{out.with_suffix('.json')}"))
    return 0


def _require_place(out: Path) -> None:
    """Raises, before the work begins, if the picture and its numbers cannot be written there."""
    import matplotlib  # noqa: F401, which is missing before the work begins, not after it

    if out.suffix.lower() != ".png":
        raise UserError(f"{out} does not end in .png.")
    for path in (out, out.with_suffix(".json")):
        if is_folder(path):
            raise UserError(f"{path} is a folder: choose another name for --out.")
    if not is_folder(out.parent):
        raise UserError(f"There is no folder {out.parent}, where --out is to be written: make it.")
    numbers = out.with_suffix(".json")
    if os.path.lexists(numbers) and not _is_result(numbers):
        raise UserError(
            f"{numbers} exists, and is no earlier result of `coat formats`: choose another name "
            "for --out, whose numbers go into a .json beside it."
        )


def _is_result(path: Path) -> bool:
    """Whether a file is what an earlier command wrote, and may be replaced."""
    from coat_jax.training.checkpoint import weights

    if not is_regular(path):
        return False
    with path_failures(path):
        found = weights.parsed(path)
    return found is not None and found.keys() >= RESULT


# --- What is measured ------------------------------------------------------------------------


def _settle(options: argparse.Namespace) -> None:
    """Gives options their defaults; raises for one that has no effect with the others."""
    effects = (
        ("size", SIZE, options.over in ("group", "block"), "--over group or --over block"),
        ("percentile", PERCENTILE, options.fit == "percentile", "--fit percentile"),
        ("tokens", TOKENS, options.text is not None, "--text FILE"),
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

    if options.sample < 0:
        raise UserError(f"--sample {options.sample} must be 0, for all elements, or more.")
    if options.size < 1:
        raise UserError(f"--size {options.size} must be 1 or more.")
    scales = {name: getattr(options, name) for name in ("over", "fit", "size", "percentile")}
    formats = [_format(name) for name in options.formats]
    try:
        found = [Quantizer(one, **scales) for one in formats]
    except ValueError as error:
        raise UserError(str(error)) from None
    if len({quantizer.format.name for quantizer in found}) < len(found):
        raise UserError(f"--formats {' '.join(options.formats)} names a format twice.")
    for quantizer in found:
        if not getattr(quantizer.format, "signed", True):
            raise UserError(f"{quantizer.format.name} has no sign, and weights have both signs.")
    return found


def _format(name: str) -> "AnyFormat":
    from coat_jax.numerics.quantizer import format_named

    try:
        return format_named(name)
    except ValueError as error:
        known = re.match("INT|U?E", name, re.IGNORECASE)
        advice = "" if known else " Integers are called INT2 to INT16, and FP4 is E2M1."
        raise UserError(f"--formats {name}: {error}{advice}") from None


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
    if config.context < 2:
        raise UserError(f"The model's context of {config.context} has no room for 2 tokens.")
    where, most = expanded(options.where), min(options.tokens, config.context)
    tokens = tokens_of(options.text, where, config, options.tokenizer, most=most)
    if len(tokens) < 2:
        raise UserError(f"{options.text} has {counted(len(tokens), 'token')}: give 2 or more.")
    return tokens


# --- What is printed -------------------------------------------------------------------------


def _shown(rows: Iterator["Row"]) -> Iterator["Row"]:
    """Passes the rows through, and shows the name of the current one on a terminal."""
    shows = on_terminal(sys.stderr)
    for row in rows:
        if shows:
            print(f"\r\033[K{printable(row.tensor)}", end="", file=sys.stderr, flush=True)
        yield row
    if shows:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _table_of(title: str, rows: Sequence["Row"]) -> str:
    """The rows as text, and a line that counts for how many of them each format is best."""
    formats = list(rows[0].bits)
    lines = [[title, *formats, "best"]]
    lines += [[row.tensor, *(f"{row.bits[f]:.2f}" for f in formats), row.best] for row in rows]
    best = [row.best for row in rows]
    wins = ", ".join(f"{f} for {best.count(f)}" for f in formats if f in best)
    means = ", ".join(f"{f} {sum(r.bits[f] for r in rows) / len(rows):.2f}" for f in formats)
    return "\n".join(
        [
            table(lines, words=(0, len(formats) + 1)),
            "",
            f"best: {wins} of {len(rows)}; mean bits: {means}",
            "",
        ]
    )


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
