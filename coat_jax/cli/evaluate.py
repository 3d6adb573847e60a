"""Measure how well a model predicts texts and answers questions: `coat evaluate WHERE`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.

  coat evaluate out/llama_124m --text README.md docs/loss.md
  coat evaluate Llama-3.1-8B --tasks arc_easy.jsonl --batch 32
  coat evaluate out/llama_124m --text held_out.txt --precision bf16 --json

For each --text the table shows the loss in nats per token, the perplexity (its exponential), and
bits per byte, which are comparable between tokenizers. A text is read in windows that overlap by
half: each token is scored once, with at least half a window of text before it, or all that precedes
it. A window is as long as the run's sequences, for a model of Hugging Face as its context, or as
--window says. Each text is preceded by the token that ends a document, as in training; for a model
that was trained elsewhere, by the token with which its tokenizer begins a text, if any. Without
either, the first token is not scored. A file counts once, even if several names or patterns lead to
it.

A file of --tasks has a question on each line, where "context" may replace "question":

  {"question": "The capital of France is", "choices": ["London", "Paris"], "answer": 1}

The model's answer is the choice whose tokens are likeliest after the question; "per byte" divides
the log probability by the bytes of the choice. Accuracies have 95 % Wilson intervals.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coat_jax.cli.model_folder import ModelFolder, add_model_arguments, on_devices
from coat_jax.cli.output import note, on_terminal
from coat_jax.errors import UserError
from coat_jax.files import read_text
from coat_jax.printable import counted, printable, table
from coat_jax.training.data.paths import files_of

if TYPE_CHECKING:
    from coat_jax.evaluation import Accuracies, Accuracy, Question, Score
    from coat_jax.models import Config, Llama
    from coat_jax.quantization import Scheme

AXIS = "fsdp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add = parser.add_argument
    add_model_arguments(parser)
    add("--text", nargs="+", default=(), metavar="FILE", help="texts in UTF-8, or patterns")
    add(
        "--tasks",
        nargs="+",
        default=(),
        metavar="FILE.jsonl",
        help="questions with choices, or patterns",
    )
    add("--window", type=int, metavar="N", help="tokens of a text that the model sees at a time")
    add(
        "--batch",
        type=int,
        default=8,
        metavar="N",
        help="windows or choices at a time (default: %(default)s)",
    )
    add(
        "--devices",
        type=int,
        default=1,
        metavar="N",
        help="devices that share each batch (default: %(default)s)",
    )
    add("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Evaluates, and prints the results."""
    from coat_jax.nn import MeshAxes

    _require(options)
    sharded = options.devices > 1
    folder = ModelFolder(
        options,
        axes=MeshAxes(fsdp=AXIS if sharded else None),
        batch_axes=(AXIS,) if sharded else (),
    )
    context = folder.config.context
    window = folder.trained_length if options.window is None else options.window
    if options.text and not 2 <= window <= context:
        raise UserError(f"A window of {window} must be from 2 to the model's context={context}.")
    begin = folder.tokenizer.encode("")[:1] or folder.stops[:1]
    texts = {file: _text(file, folder, begin) for file in files_of(tuple(options.text))}
    tasks = {file: _questions(file, folder, begin) for file in files_of(tuple(options.tasks))}
    with on_devices(options.devices, AXIS):
        model = folder.load()
        of_texts = _scores(model, [*texts.values()], window, options.batch)
        of_tasks = _accuracies(model, [*tasks.values()], options.batch)
    scores = dict(zip(texts, of_texts, strict=True))
    accuracies = dict(zip(tasks, of_tasks, strict=True))
    if options.json:
        print(json.dumps(_as_json(options.where, model, window, scores, accuracies), indent=2))
        return 0
    if scores:
        print(printable(_table_of_texts(scores)))
    if scores and accuracies:
        print()
    if accuracies:
        print(printable(_table_of_tasks(accuracies)))
    return 0


# --- What is read ----------------------------------------------------------------------------


def _require(options: argparse.Namespace) -> None:
    if not options.text and not options.tasks:
        raise UserError("Name a text, --text FILE, or a file of questions, --tasks FILE.jsonl.")
    if options.batch < 1:
        raise UserError(f"--batch {options.batch} must be 1 or more.")
    if options.window is not None and not options.text:
        raise UserError(f"--window {options.window} is for texts: name one, --text FILE.")


def _text(file: Path, folder: ModelFolder, begin: Sequence[int]) -> tuple[list[int], int]:
    """The tokens of a text, after one that begins it, and its bytes."""
    from coat_jax.models.batches import require_known

    text = read_text(file)
    own = folder.tokenizer.encode_documents([text])[0].tolist()
    tokens = [*begin, *own]
    if not text:
        raise UserError(f"{file} is empty.")
    if len(tokens) < 2:
        needed = (
            "1" if begin else "2, because nothing comes before the first one, which is not scored"
        )
        raise UserError(f"{file} has {counted(len(own), 'token')}, fewer than {needed}.")
    require_known(f"{file} has", tokens, folder.config.vocab)
    return tokens, len(text.encode())


def _questions(file: Path, folder: ModelFolder, begin: Sequence[int]) -> list["Question"]:
    from coat_jax import evaluation

    questions = evaluation.read(file, folder.tokenizer, begin, folder.config)
    if shortened := sum(question.left_out > 0 for question in questions):
        note(
            f"{file}: {shortened} of {counted(len(questions), 'question')} lose their beginning "
            f"to fit the model's context={folder.config.context}."
        )
    return questions


# --- What is computed ------------------------------------------------------------------------


def _scores(
    model: "Llama", texts: Sequence[tuple[list[int], int]], window: int, batch: int
) -> list["Score"]:
    from coat_jax import evaluation

    if not texts:
        return []
    tokens, sizes = zip(*texts, strict=True)
    progress = _progress("windows")
    return evaluation.perplexity(
        model, tokens, sizes, window=window, batch=batch, progress=progress
    )


def _accuracies(
    model: "Llama", tasks: Sequence[Sequence["Question"]], batch: int
) -> list["Accuracies"]:
    from coat_jax import evaluation

    if not tasks:
        return []
    return evaluation.accuracies(model, tasks, batch=batch, progress=_progress("choices"))


def _progress(what: str) -> Callable[[int, int], None]:
    """Shows on a terminal how much is done."""

    def show(done: int, of: int) -> None:
        if on_terminal(sys.stderr):
            line = "" if done == of else f"{done:,} of {of:,} {what}"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    return show


# --- What is printed -------------------------------------------------------------------------


def _table_of_texts(scores: Mapping[Path, "Score"]) -> str:
    from coat_jax import evaluation

    named = [(str(file), score) for file, score in scores.items()]
    if len(scores) > 1:
        named.append(("together", evaluation.combine([*scores.values()])))
    lines = [["text", "tokens", "nats/token", "perplexity", "bits/byte"]]
    lines += [
        [
            name,
            f"{score.tokens:,}",
            f"{score.per_token:.4f}",
            f"{score.perplexity:,.3f}",
            f"{score.bits_per_byte:.4f}",
        ]
        for name, score in named
    ]
    return table(lines)


def _table_of_tasks(accuracies: Mapping[Path, "Accuracies"]) -> str:
    lines = [["task", "questions", "accuracy (95 %)", "per byte (95 %)"]]
    lines += [
        [str(file), f"{found.by_sum.questions:,}", _shown(found.by_sum), _shown(found.per_byte)]
        for file, found in accuracies.items()
    ]
    return table(lines)


def _shown(accuracy: "Accuracy") -> str:
    low, high = accuracy.interval
    return f"{100 * accuracy.share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _as_json(
    where: Path,
    model: "Llama",
    window: int,
    scores: Mapping[Path, "Score"],
    accuracies: Mapping[Path, "Accuracies"],
) -> dict[str, Any]:
    found: dict[str, Any] = {"model": str(where), **_precision_as_json(model)}
    if scores:
        found["window"] = window
        found["texts"] = [
            {
                "file": str(file),
                "tokens": score.tokens,
                "bytes": score.size,
                "nats_per_token": score.per_token,
                "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
                "bits_per_byte": score.bits_per_byte,
            }
            for file, score in scores.items()
        ]
    if accuracies:
        found["tasks"] = [
            {
                "file": str(file),
                "questions": both.by_sum.questions,
                "by_sum": _accuracy_as_json(both.by_sum),
                "per_byte": _accuracy_as_json(both.per_byte),
            }
            for file, both in accuracies.items()
        ]
    return found


def _precision_as_json(model: "Llama") -> dict[str, Any]:
    """The name of a preset, or what a precision consists of; of a quantized model its formats."""
    from coat_jax import quantization
    from coat_jax.precision import PRESETS
    from coat_jax.training import resume_rules

    schemes = quantization.schemes_of(model) if quantization.is_quantized(model) else {}
    if schemes:
        formats = {scheme.format for scheme in schemes.values()}
        precision = "mixed" if len(formats) > 1 else formats.pop()
        return {"precision": precision, "linear_layers": _linear_layers(model.config, schemes)}
    ours = model.config.precision
    name = next((name for name, preset in PRESETS.items() if preset == ours), None)
    return {"precision": name or resume_rules.to_json(ours)}


def _linear_layers(config: "Config", schemes: Mapping[str, "Scheme"]) -> list[dict[str, Any]]:
    """How many layers have each format and each way to round inputs; last, those left as they are.

    Args:
        config: of the model.
        schemes: of its quantized projections.
    """
    import jax.numpy as jnp

    from coat_jax.quantization.projections import paths_of

    counts: dict[tuple[str, str], int] = dict(sorted(Counter(schemes.values()).items()))
    if left := len(paths_of(config)) - len(schemes):
        counts[jnp.dtype(config.dtype).name, "none"] = left
    return [
        {"format": format, "activations": activations, "count": count}
        for (format, activations), count in counts.items()
    ]


def _accuracy_as_json(accuracy: "Accuracy") -> dict[str, Any]:
    return {
        "right": accuracy.right,
        "accuracy": accuracy.share,
        "interval_95": list(accuracy.interval),
    }
