"""The tokens of choices, the scores that follow from them, and lines that are no questions."""

import dataclasses
import json
import math
import statistics

import jax.numpy as jnp
import numpy as np
import pytest
from small_model import SMALL, filled

from coat_jax.errors import UserError
from coat_jax.evaluation import Accuracy, Passage, accuracies, log_probabilities, read
from coat_jax.tokenizers import Bytes, Tokenizer

tokenizers = pytest.importorskip("tokenizers")
CONFIG = dataclasses.replace(SMALL, layers=1, context=40, dtype=jnp.float32)
MODEL = filled(CONFIG)
LINE = {"question": "1 + 1 =", "choices": ["2", "three"], "answer": 0}


def file_of(folder, *lines):
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def questions(folder, *lines, text=None, begin=(0,), config=CONFIG):
    return read(file_of(folder, *lines), text or Bytes(), begin, config)


def test_the_tokens_of_a_choice_come_after_those_of_the_question(tmp_path):
    """Its size is in bytes of UTF-8."""
    (question,) = questions(tmp_path, LINE | {"choices": ["2", "zwölf"]})
    assert question.choices == (
        Passage(list(b"\x001 + 1 = 2"), 8),
        Passage([0, *"1 + 1 = zwölf".encode()], 8),
    )
    assert question.sizes == (1, 6)
    assert (question.answer, question.left_out) == (0, 0)


@pytest.mark.parametrize(
    ("context", "choice", "joined"),
    [
        ("a", "b", b"a b"),
        ("a ", "b", b"a b"),
        ("a", "\nb", b"a\nb"),
        ("", "b", b"b"),
    ],
)
def test_a_space_comes_between_unless_there_is_one(context, choice, joined, tmp_path):
    line = {"context": context, "choices": [choice, "other"], "answer": 1}
    (question,) = questions(tmp_path, line)
    assert question.choices[0] == Passage([0, *joined], 1 + len(context))


def words(folder, vocab, pattern=r"\S+", added=()):
    """A tokenizer of the matches of a pattern."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[unk]"))
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "removed", invert=True)
    made.pre_tokenizer = split
    made.add_special_tokens(list(added))
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder / "tokenizer.json")


def test_a_token_that_the_choice_changes_is_scored(tmp_path):
    """Here "new" and "york" are one token if they stand together; it must fit, too."""
    vocab = {"[unk]": 0, "in": 1, "new": 2, "york": 3, "new york": 4, "delhi": 5}
    text = words(tmp_path, vocab, "new york|[a-z]+")
    line = {"question": "in new", "choices": ["york", "delhi"], "answer": 0}
    (question,) = questions(tmp_path, line, text=text, begin=())
    assert question.choices == (Passage([1, 4], 1), Passage([1, 2, 5], 2))
    line["choices"][1] = "delhi " * 39
    (question,) = questions(tmp_path, line, text=text, begin=())
    assert [passage.first for passage in question.choices] == [1, 2]
    line["choices"][1] += "delhi"
    with pytest.raises(UserError, match="a choice has 41 tokens, and the model's context=40"):
        questions(tmp_path, line, text=text, begin=())


def test_of_a_long_question_the_end_is_taken_the_same_for_all_choices(tmp_path):
    line = {"question": "x" * 50 + "y" * 20, "choices": ["1", "123456789"], "answer": 0}
    (question,) = questions(tmp_path, line)
    short, long = question.choices
    assert len(long.tokens) == 41
    assert bytes(long.tokens) == b"x" * 11 + b"y" * 20 + b" 123456789"
    assert bytes(short.tokens) == b"x" * 11 + b"y" * 20 + b" 1"
    assert short.first == long.first == 31
    assert question.left_out == 40


LINES = [
    {"question": f"Is {n} even?", "choices": ["yes", "no, it is odd", "?"], "answer": min(n % 4, 2)}
    for n in range(12)
]


def test_the_likeliest_choice_is_taken_and_files_are_counted_apart(tmp_path):
    files = [questions(tmp_path, *LINES[:5]), questions(tmp_path, *LINES[5:])]
    found = accuracies(MODEL, files, batch=5)
    for lines, of_file, both in zip((LINES[:5], LINES[5:]), files, found, strict=True):
        by_sum, per_byte = 0, 0
        for line, question in zip(lines, of_file, strict=True):
            sums = np.array([row.sum() for row in log_probabilities(MODEL, question.choices)])
            by_sum += np.argmax(sums) == line["answer"]
            sizes = [len(choice) for choice in line["choices"]]
            per_byte += np.argmax(sums / sizes) == line["answer"]
        assert both.by_sum == Accuracy(by_sum, len(lines))
        assert both.per_byte == Accuracy(per_byte, len(lines))
    assert any(both.by_sum != both.per_byte for both in found)  # these questions tell


def test_intervals_are_wilsons():
    """Their ends are the shares from which what was seen is 1.96 standard deviations away."""
    deviations, n = statistics.NormalDist().inv_cdf(0.975), 20
    for right in (0, 1, 7, 19, 20):
        accuracy = Accuracy(right, n)
        assert accuracy.share == right / n
        for end in accuracy.interval:
            away = deviations * math.sqrt(end * (1 - end) / n)
            assert abs(end - accuracy.share) == pytest.approx(away, abs=1e-7)
        assert accuracy.interval[0] < accuracy.interval[1]


CHOICES = "must be a list of two texts or more, none of them empty"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "tasks.jsonl:2 is not JSON"),
        ("7", "tasks.jsonl:2 is not a JSON object, but int"),
        ({"choices": ["a", "b"], "answer": 0}, "2 has neither context nor question"),
        (LINE | {"context": "x"}, "2 has context and question"),
        (LINE | {"question": 7}, "2: question=7 must be text"),
        ({"question": "a", "answer": 0}, f"choices=None {CHOICES}"),
        *((LINE | {"choices": choices}, CHOICES) for choices in (["a"], ["a", " "], ["a", 7])),
        (LINE | {"answer": 2}, "answer=2 must be a whole number from 0 to 1"),
        (LINE | {"choices": ["a", "b" * 40]}, "a choice has 41 tokens, and the model's context=40"),
    ],
)
def test_a_line_that_is_no_question_is_named(line, message, tmp_path):
    text = line if isinstance(line, str) else json.dumps(line)
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(LINE)}\n{text}\n")
    with pytest.raises(UserError, match=r"tasks\.jsonl:2") as error:
        read(tmp_path / "tasks.jsonl", Bytes(), [0], CONFIG)
    assert message in str(error.value)


def test_a_question_that_spells_its_beginning_out_is_not_begun_twice(tmp_path):
    text = words(tmp_path, {"[unk]": 0, "<s>": 1, "yes": 2, "no": 3}, added=["<s>"])
    lines = [
        {"question": question, "choices": ["yes", "no"], "answer": 0}
        for question in ("no", "<s> no", "", "<s>")
    ]
    found = questions(tmp_path, *lines, text=text, begin=[1])
    begun = (Passage([1, 3, 2], 2), Passage([1, 3, 3], 2))
    alone = (Passage([1, 2], 1), Passage([1, 3], 1))
    assert [question.choices for question in found] == [begun, begun, alone, alone]


def test_a_choice_needs_something_before_it_and_tokens_of_its_own(tmp_path):
    """Otherwise the tokens of the question would be scored in its place."""
    line = LINE | {"question": ""}
    assert len(questions(tmp_path, line)) == 1
    with pytest.raises(UserError, match=r"tasks.jsonl:1: choice 0 has no .* none before it"):
        questions(tmp_path, line, begin=())
    letters = {letter: number for number, letter in enumerate("1+ =23")}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    library.save(str(tmp_path / "tokenizer.json"))
    text, line = Tokenizer(tmp_path / "tokenizer.json"), LINE | {"question": "1 + 1 = "}
    assert questions(tmp_path, line | {"choices": ["2", "3"]}, text=text, begin=())
    with pytest.raises(UserError, match=r"tasks.jsonl:1: choice 1 has no token of its own"):
        questions(tmp_path, line, text=text, begin=())


def test_a_file_without_questions_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no question"):
        questions(tmp_path)
