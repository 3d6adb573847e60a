"""Answers are compared as VQAv2 and POPE compare them."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_jax.evaluation import Accuracy, Answer, YesNo, score
from coat_jax.evaluation.answers import normalized

PUNCTUATION = [*";/[]", '"', *"{}()=+", "\\", *"_-><@`,?!"]
WORDS = ["none", "zero", "one", "two", "three", "four", "five"]
WORDS += ["six", "seven", "eight", "nine", "ten"]


def as_in_vqa(text):
    """What VQAv2's evaluation makes of an answer without apostrophes."""
    text = out = text.replace("\n", " ").strip()
    for mark in PUNCTUATION:
        beside_space = mark + " " in text or " " + mark in text
        removed = beside_space or re.search(r"(\d)(,)(\d)", text) is not None
        out = out.replace(mark, "" if removed else " ")
    out = re.sub(r"\.(?!\d)", "", out)
    words = []
    for word in out.lower().split():
        if word not in ("a", "an", "the"):
            words.append(str(max(WORDS.index(word) - 1, 0)) if word in WORDS else word)
    return " ".join(words)


pieces = st.sampled_from(
    [*WORDS, *PUNCTUATION, *"  ..0179aAxé", "an", "The", "Two", "red", "1,000", " , ", "\n"]
)


@settings(max_examples=300)
@given(st.lists(pieces, max_size=8).map("".join))
def test_a_text_is_normalized_as_in_vqa(text):
    assert normalized(text) == as_in_vqa(text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("  A  red\tcar.\n", "red car"),
        ("Two", "2"),
        ("None", "0"),
        ("black/white", "black white"),
        ("black / white", "black white"),
        ("black /white/grey", "black whitegrey"),
        ("1,000 (one thousand)", "1000 1 thousand"),
        ("3.5", "3.5"),
        ("3.", "3"),
        ("Don't!", "dont"),
        ("the", ""),
    ],
)
def test_what_becomes_of_typical_answers(text, wanted):
    assert normalized(text) == wanted


answers = st.sampled_from(["yes", "no", "2", "two", "red"])


@given(answers, st.lists(answers, min_size=10, max_size=12))
def test_vqa_accuracy_is_the_mean_over_all_choices_of_all_people_but_one(own, people):
    shares = []
    for without in range(len(people)):
        others = [as_in_vqa(one) for i, one in enumerate(people) if i != without]
        shares.append(min(others.count(as_in_vqa(own)) / 3, 1))
    answer = Answer(own, tuple(people))
    assert answer.vqa == pytest.approx(sum(shares) / len(people))
    assert answer.is_exact == any(as_in_vqa(one) == as_in_vqa(own) for one in people)


@pytest.mark.parametrize(("same", "wanted"), [(0, 0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1)])
def test_vqa_accuracy_of_ten_answers(same, wanted):
    people = ("red",) * same + ("blue",) * (10 - same)
    found = score([Answer("Red.", people), Answer("blue", ("blue",) * 10)])
    assert found.vqa == pytest.approx((wanted + 1) / 2)
    assert found.exact == Accuracy(1 + (same > 0), 2)
    assert found.yes is None


def test_without_ten_answers_to_each_question_there_is_no_vqa_accuracy():
    answers = [Answer("red", ("red",) * count) for count in (10, 9)]
    assert score(answers[:1]).vqa == 1
    assert score(answers).vqa is None


def yes_no(*pairs):
    """The figures of answers, each before what is right."""
    return score([Answer(said, (wanted,)) for said, wanted in pairs]).yes


def test_figures_of_yes_are_those_of_pope():
    """Two of three that were said are right, of four that were to be said; of eight questions."""
    said_yes = ("Yes, there is.", "Yes"), ("yes", "yes"), ("YES!", "no")
    said_no = ("no", "yes"), ("I see none", "yes"), ("No.", "no"), ("Maybe yes", "no"), ("", "no.")
    found = yes_no(*said_yes, *said_no)
    assert found == pytest.approx(YesNo(precision=2 / 3, recall=2 / 4, f1=4 / 7, said=3 / 8))
    exact = score([Answer(said, (wanted,)) for said, wanted in said_yes + said_no]).exact
    assert exact == Accuracy(2, 8)


NAN = math.nan


@pytest.mark.parametrize(
    ("pairs", "wanted"),
    [
        ([("no", "yes"), ("no", "no")], YesNo(NAN, 0, 0, 0)),
        ([("yes", "no"), ("no", "no")], YesNo(0, NAN, 0, 1 / 2)),
        ([("no", "no")], YesNo(NAN, NAN, NAN, 0)),
        ([("yes", "yes")], YesNo(1, 1, 1, 1)),
    ],
)
def test_a_share_of_nothing_is_no_number(pairs, wanted):
    assert yes_no(*pairs) == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize(
    "people", [("yes", "no"), ("red",), ("yes", "sure"), ("yes it is",)], ids=" or ".join
)
def test_one_question_with_other_answers_leaves_the_figures_of_yes_out(people):
    asked = [Answer("yes", ("yes", "Yes.")), Answer("no", ("no",))]
    assert score(asked).yes is not None
    assert score([*asked, Answer("yes", people)]).yes is None
