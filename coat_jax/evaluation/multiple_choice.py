"""Questions with several answers, of which the model takes the likeliest.

    {"question": "The capital of France is", "choices": ["London", "Paris"], "answer": 1}

is a line of a file of questions; "context" is the same as "question". A space is put between
question and choice unless white space is there. A choice scores

    sum         log p(its tokens | the question)
    per byte    the same, divided by the bytes of its text, so that long choices are not worse off

A choice's tokens are those of both texts together, from the first one that differs from the
question's tokens. In a tie the first choice is taken. Accuracies have 95 % Wilson intervals, which
cover only the chance in which questions a file has.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from coat_jax.errors import UserError
from coat_jax.evaluation.likelihood import OnProgress, Passage, log_probabilities
from coat_jax.files import json_lines
from coat_jax.models import Config, Llama
from coat_jax.tokenizers import AnyTokenizer, begin_with
from coat_jax.validation import Between, brief, require

QUANTILE = 1.959964  # of the normal distribution, for 95 %


class Question(NamedTuple):
    """A question as tokens.

    Attributes:
        choices: the question with each of them; a choice's tokens are the scored ones.
        sizes: bytes of each choice.
        answer: the number of the right one.
        left_out: tokens of the question's beginning that the model's context has no room for.
    """

    choices: tuple[Passage, ...]
    sizes: tuple[int, ...]
    answer: int
    left_out: int


class Accuracy(NamedTuple):
    """The number of questions that were answered right."""

    right: int
    questions: int

    @property
    def share(self) -> float:
        """The share of all questions that were answered right, from 0 to 1."""
        return self.right / self.questions

    @property
    def interval(self) -> tuple[float, float]:
        """The Wilson interval of the share, at 95 %."""
        z2, n = QUANTILE**2, self.questions
        middle = (self.right + z2 / 2) / (n + z2)
        half = math.sqrt(z2 * self.right * (n - self.right) / n + z2**2 / 4) / (n + z2)
        return max(middle - half, 0.0), min(middle + half, 1.0)


# --- Reading ---------------------------------------------------------------------------------


def read(
    path: Path, tokenizer: AnyTokenizer, begin: Sequence[int], config: Config
) -> list[Question]:
    """Returns the questions of a file, each on a line.

    Args:
        path: of the file.
        tokenizer: reads the questions; special tokens in them count as such.
        begin: tokens that come before every question that does not spell them out itself.
        config: of the model. A question that is too long for it loses its beginning.
    """
    questions = []
    for where, record, _ in json_lines(path):
        question, choices, answer = _fields(where, record)
        alone, *both = (
            begin_with(begin, tokenizer.encode_markers(text).tolist())
            for text in (question, *(_join(question, choice) for choice in choices))
        )
        passages, left_out = _passages(where, alone, both, config)
        sizes = tuple(len(choice.encode()) for choice in choices)
        questions.append(Question(passages, sizes, answer, left_out))
    if not questions:
        raise UserError(f"{path} has no question.")
    return questions


def _fields(where: str, record: Mapping[str, Any]) -> tuple[str, list[str], int]:
    """Returns the question, the choices and the number of the right one."""
    names = [name for name in ("context", "question") if name in record]
    if len(names) != 1:
        raise UserError(
            f"{where} has {' and '.join(names) or 'neither context nor question'}: name the text "
            'before the choices "context" or "question".'
        )
    question, choices, answer = record[names[0]], record.get("choices"), record.get("answer")
    question = require(f"{where}: {names[0]}", question, str)
    texts = choices if isinstance(choices, list) else []
    if len(texts) < 2 or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(
            f"{where}: choices={brief(choices)} must be a list of two texts or more, none of them "
            "empty."
        )
    among = Annotated[int, Between(least=0, most=len(texts) - 1)]
    return question, texts, require(f"{where}: answer", answer, among)


def _join(question: str, choice: str) -> str:
    """Joins both texts, with white space between them."""
    apart = not question or question[-1].isspace() or choice[0].isspace()
    return f"{question}{'' if apart else ' '}{choice}"


def _passages(
    where: str, alone: list[int], both: Sequence[list[int]], config: Config
) -> tuple[tuple[Passage, ...], int]:
    """Returns the question with each choice, cut to fit the longest; how much is left out."""
    # The first token that differs from those of the question alone.
    firsts = [sum(itertools.takewhile(bool, map(operator.eq, alone, of))) for of in both]
    for number, (first, tokens) in enumerate(zip(firsts, both, strict=True)):
        if not 1 <= first < len(tokens):
            raise UserError(
                f"{where}: choice {number} has no token of its own, or none before it. Give the "
                "question a text, and use a tokenizer that knows the characters of both."
            )
    longest = max(map(len, both))
    left_out = max(longest - 1 - config.context, 0)
    if left_out >= min(firsts):
        raise UserError(
            f"{where}: a choice has {longest - min(firsts)} tokens, and the model's "
            f"context={config.context}. Shorten it."
        )
    passages = (
        Passage(tokens[left_out:], first - left_out)
        for tokens, first in zip(both, firsts, strict=True)
    )
    return tuple(passages), left_out


# --- Answering -------------------------------------------------------------------------------


class Accuracies(NamedTuple):
    """The questions that are answered right by the sums, and by the sums per byte."""

    by_sum: Accuracy
    per_byte: Accuracy


def accuracies(
    model: Llama,
    files: Sequence[Sequence[Question]],
    *,
    batch: int = 8,
    progress: OnProgress = lambda done, of: None,
) -> list[Accuracies]:
    """Counts the questions of each file that the model answers right.

    Args:
        model: on a mesh, call this with the mesh set.
        files: of questions.
        batch: choices at a time.
        progress: called with how many choices are done, and of how many.
    """
    passages = [choice for of_file in files for question in of_file for choice in question.choices]
    found = iter(log_probabilities(model, passages, batch=batch, progress=progress))
    results = []
    for of_file in files:
        right = [0, 0]
        for question in of_file:
            sums = [math.fsum(next(found).tolist()) for _ in question.choices]
            shares = [one / size for one, size in zip(sums, question.sizes, strict=True)]
            for kind, scores in enumerate((sums, shares)):
                right[kind] += scores.index(max(scores)) == question.answer
        results.append(Accuracies(*(Accuracy(count, len(of_file)) for count in right)))
    return results
