"""Answers in free text, compared with those of people.

    {"image": "street.jpg", "question": "How many cars?", "answers": ["2", "two", "3"]}

    exact      the answer is one of them, after both are normalized as in VQAv2: lower case, numbers
               as digits, no articles and no punctuation
    VQA        with ten answers of people or more: min(how many gave it / 3, 1), the mean over all
               choices of all people but one, as in VQAv2
    yes        if every question of a file is answered by yes or no: precision, recall and F1 of
               "yes", and how often it is said, as POPE reports them; an answer that does not begin
               with "yes" counts as no

Apostrophes are left out, where VQAv2 puts them in.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from coat_jax.evaluation.multiple_choice import Accuracy

PEOPLE = 10  # from so many answers on, VQA's accuracy is known
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBERS = {word: str(number) for number, word in enumerate(DIGITS)} | {"none": "0"}
ARTICLES = {"a", "an", "the"}
MARKS = ';/[]"{}()=+\\_-><@`,?!'
YES, NO = "yes", "no"


class Answer(NamedTuple):
    """What a model answered, and what people did."""

    text: str
    people: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        """Whether somebody gave the same answer."""
        return normalized(self.text) in map(normalized, self.people)

    @property
    def vqa(self) -> float:
        """VQA's accuracy, from 0 to 1."""
        own, people = normalized(self.text), [normalized(one) for one in self.people]
        same = people.count(own)
        # Without one who gave it, or without one who did not.
        without = [min((same - 1) / 3, 1)] * same + [min(same / 3, 1)] * (len(people) - same)
        return sum(without) / len(without)


class Scores(NamedTuple):
    """The answers of a file.

    Attributes:
        exact: how many were exact.
        vqa: the mean of VQA's accuracy; None with fewer than ten answers to a question.
        yes: of questions that are answered by yes or no; None if there are others.
    """

    exact: Accuracy
    vqa: float | None
    yes: "YesNo | None"


class YesNo(NamedTuple):
    """How a model answers questions that are answered by yes or no; NaN where nothing counts."""

    precision: float
    recall: float
    f1: float
    said: float


def score(answers: Sequence[Answer]) -> Scores:
    """Compares a model's answers with those of people."""
    exact = Accuracy(sum(answer.is_exact for answer in answers), len(answers))
    vqa = None
    if all(len(answer.people) >= PEOPLE for answer in answers):
        vqa = sum(answer.vqa for answer in answers) / len(answers)
    wanted = [{normalized(one) for one in answer.people} for answer in answers]
    if not all(of_one in ({YES}, {NO}) for of_one in wanted):
        return Scores(exact, vqa, None)
    said = [normalized(answer.text).split()[:1] == [YES] for answer in answers]
    right = [YES in of_one for of_one in wanted]
    both = sum(s and r for s, r in zip(said, right, strict=True))
    precision, recall = _share(both, sum(said)), _share(both, sum(right))
    f1 = _share(2 * both, sum(said) + sum(right))
    return Scores(exact, vqa, YesNo(precision, recall, f1, sum(said) / len(said)))


def normalized(text: str) -> str:
    """Returns an answer as VQAv2 compares it."""
    given = text = " ".join(text.split())
    has_thousands = re.search(r"\d,\d", given)
    for mark in MARKS:
        beside_space = f"{mark} " in given or f" {mark}" in given
        text = text.replace(mark, "" if beside_space or has_thousands else " ")
    text = re.sub(r"\.(?!\d)|'", "", text).lower()
    words = (NUMBERS.get(word, word) for word in text.split())
    return " ".join(word for word in words if word not in ARTICLES)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")
