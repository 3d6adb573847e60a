"""Measure how well a model predicts texts and answers questions: `coat evaluate WHERE`.

WHERE is the folder of a run, whose newest intact checkpoint is read, or of a Hugging Face model.

  coat evaluate out/llama_124m --text README.md docs/loss.md
  coat evaluate Llama-3.1-8B --tasks arc_easy.jsonl --batch 32
  coat evaluate out/llama_124m --text held_out.txt --precision bf16 --json
  coat evaluate SmolVLM-256M --vqa questions.jsonl --batch 32

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

A file of --vqa has a question about a picture on each line; paths start from the file's folder:

  {"image": "street.jpg", "question": "How many cars?", "answers": ["2", "two"]}

The model answers in its own words, taking the likeliest token each time. An answer is exact if it
is one of those listed, normalized as in VQAv2. With ten answers to each question there is VQAv2's
accuracy, too, and if all are yes or no, POPE's figures.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coat_jax import evaluation, quantization
from coat_jax.cli.arguments import add_count, add_model_arguments, require_effects
from coat_jax.cli.model_folder import ModelFolder, on_devices
from coat_jax.cli.output import note, progress_bar
from coat_jax.cli.pictures import Asker, add_question_template, answer, read_questions
from coat_jax.errors import UserError
from coat_jax.files import read_text
from coat_jax.nn import MeshAxes
from coat_jax.printable import amount, printable, table
from coat_jax.training.data.paths import files_of
from coat_jax.training.overrides import show

AXIS = "fsdp"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--text", nargs="+", default=(), metavar="FILE", help="texts in UTF-8, or patterns")
    add("--tasks", nargs="+", default=(), metavar="FILE.jsonl", help="questions, or patterns")
    add("--vqa", nargs="+", default=(), metavar="FILE.jsonl", help="questions about pictures")
    add_question_template(parser)
    add("--window", type=int, metavar="N", help="tokens of a text that the model sees at a time")
    add_count(parser, "--batch", 8, "windows or choices at a time")
    add_count(parser, "--devices", 1, "devices that share each batch")
    add("--json", action="store_true", help="print JSON instead of tables")


def run(options: argparse.Namespace) -> int:
    """Evaluates, and prints the results."""
    if not options.text and not options.tasks and not options.vqa:
        raise UserError(
            "Name a text, --text FILE, or a file of questions, --tasks FILE.jsonl, or of questions "
            "about pictures, --vqa FILE.jsonl."
        )
    require_effects(options, [("window", bool(options.text), "texts (--text FILE)")])
    axis = AXIS if options.devices > 1 else None
    folder = ModelFolder(options, axes=MeshAxes(fsdp=axis), batch_axes=(axis,) if axis else ())
    window = folder.trained_length if options.window is None else options.window
    if not 2 <= window <= folder.config.context:
        raise UserError(f"--window {window} must be from 2 to context={folder.config.context}.")
    begin = folder.tokenizer.encode("")[:1] or folder.stops[:1]
    texts = {str(file): _text(file, folder, begin) for file in files_of(tuple(options.text))}
    tasks = {str(file): _questions(file, folder, begin) for file in files_of(tuple(options.tasks))}
    asker, asked = None, {}
    if options.vqa:
        asker = Asker(folder, options.question_template)
        asked = {str(f): read_questions(f, asker) for f in files_of(tuple(options.vqa))}
    with on_devices(options.devices, AXIS), progress_bar() as bar:
        model, task = folder.load(), bar.add_task("Evaluating", total=None)
        how: dict[str, Any] = {
            "batch": options.batch,
            "progress": lambda done, of: bar.update(task, completed=done, total=of),
        }
        tokens, sizes = [one for one, _ in texts.values()], [size for _, size in texts.values()]
        of_texts = evaluation.perplexity(model.decoder, tokens, sizes, window=window, **how)
        of_tasks = evaluation.accuracies(model.decoder, [*tasks.values()], **how)
        answered = {
            file: evaluation.score(answer(model, folder, asker, questions, **how))
            for file, questions in asked.items()
            if asker is not None
        }
    scores = dict(zip(texts, of_texts, strict=True))
    accuracies = dict(zip(tasks, of_tasks, strict=True))
    if options.json:
        found = {
            "model": str(options.where),
            "precision": _precision_of(model),
            "window": window,
            "texts": [_score_as_json(file, score) for file, score in scores.items()],
            "tasks": [_accuracies_as_json(file, both) for file, both in accuracies.items()],
            "vqa": [_answers_as_json(file, scores) for file, scores in answered.items()],
        }
        print(json.dumps(found, indent=2))
    else:
        tables = [_table_of_texts(scores)] if scores else []
        tables += [_table_of_tasks(accuracies)] if accuracies else []
        tables += [_table_of_answers(answered)] if answered else []
        print(printable("\n\n".join(tables)))
    return 0


def _text(file: Path, folder: ModelFolder, begin: Sequence[int]) -> tuple[list[int], int]:
    """Returns the tokens of a text, after one that begins it, and its bytes."""
    text = read_text(file)
    tokens = [*begin, *folder.tokenizer.encode_documents([text])[0].tolist()]
    if len(tokens) < 2:
        raise UserError(f"{file} has no token after the first one, which is not scored.")
    return tokens, len(text.encode())


def _questions(file: Path, folder: ModelFolder, begin: Sequence[int]) -> list[evaluation.Question]:
    questions = evaluation.read(file, folder.tokenizer, begin, folder.config)
    if shortened := sum(question.left_out > 0 for question in questions):
        note(
            f"{file}: {shortened} of {amount(len(questions), 'question')} lose their beginning "
            f"to fit the model's context={folder.config.context}."
        )
    return questions


def _table_of_texts(scores: dict[str, evaluation.Score]) -> str:
    together = {"together": evaluation.combine([*scores.values()])} if len(scores) > 1 else {}
    lines = [["text", "tokens", "nats/token", "perplexity", "bits/byte"]]
    for name, score in (scores | together).items():
        rates = f"{score.per_token:.4f}", f"{score.perplexity:,.3f}", f"{score.bits_per_byte:.4f}"
        lines.append([name, f"{score.tokens:,}", *rates])
    return table(lines)


def _table_of_tasks(accuracies: dict[str, evaluation.Accuracies]) -> str:
    lines = [["task", "questions", "accuracy (95 %)", "per byte (95 %)"]]
    for file, both in accuracies.items():
        lines.append([file, f"{both.by_sum.questions:,}", *map(_percent, both)])
    return table(lines)


def _table_of_answers(answered: dict[str, evaluation.Scores]) -> str:
    lines = [["questions about pictures", "questions", "exact (95 %)"]]
    vqa, yes = (
        any(getattr(scores, name) is not None for scores in answered.values())
        for name in ("vqa", "yes")
    )
    lines[0] += ["VQA accuracy"] * vqa + ["precision", "recall", "F1", "yes"] * yes
    for file, scores in answered.items():
        line = [file, f"{scores.exact.questions:,}", _percent(scores.exact)]
        if vqa:
            line.append("" if scores.vqa is None else f"{100 * scores.vqa:.2f} %")
        if yes:
            of_file = scores.yes or [math.nan] * 4
            line += ["" if math.isnan(share) else f"{100 * share:.1f} %" for share in of_file]
        lines.append(line)
    return table(lines)


def _percent(accuracy: evaluation.Accuracy) -> str:
    low, high = accuracy.interval
    return f"{100 * accuracy.share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _score_as_json(file: str, score: evaluation.Score) -> dict[str, Any]:
    return {
        "file": file,
        "tokens": score.tokens,
        "bytes": score.size,
        "nats_per_token": score.per_token,
        "perplexity": score.perplexity if math.isfinite(score.perplexity) else None,
        "bits_per_byte": score.bits_per_byte,
    }


def _accuracies_as_json(file: str, both: evaluation.Accuracies) -> dict[str, Any]:
    listed: dict[str, Any] = {"file": file, "questions": both.by_sum.questions}
    for name, one in both._asdict().items():
        listed[name] = {"right": one.right, "accuracy": one.share, "interval_95": one.interval}
    return listed


def _answers_as_json(file: str, scores: evaluation.Scores) -> dict[str, Any]:
    shares = {} if scores.yes is None else scores.yes._asdict()
    return {
        "file": file,
        "questions": scores.exact.questions,
        "exact": scores.exact.share,
        "interval_95": scores.exact.interval,
        "vqa_accuracy": scores.vqa,
        "yes": {name: share if math.isfinite(share) else None for name, share in shares.items()},
    }


def _precision_of(model: Any) -> str:
    """Returns the name of a precision, or the formats of a quantized model's linear layers."""
    quantized = quantization.is_quantized(model)
    schemes = quantization.schemes_of(model).values() if quantized else ()
    return " ".join(sorted({scheme.format for scheme in schemes})) or show(model.config.precision)
