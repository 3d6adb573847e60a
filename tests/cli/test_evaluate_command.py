"""`coat evaluate`: the tables are those of the library, and bad input ends in one line."""

import dataclasses
import json
import shutil
import sys

import jax.numpy as jnp
import pytest
from cli_cases import save_run, write_words
from small_model import SMALL, filled

from coat_jax import evaluation, quantization
from coat_jax.cli import main
from coat_jax.models import hf
from coat_jax.tokenizers import Bytes

CONFIG = dataclasses.replace(SMALL, layers=1, context=32, dtype=jnp.float32, precision="coat")
IN_BF16 = dataclasses.replace(CONFIG, precision="bf16")
MODEL = filled(CONFIG)
TEXT = "def main():\n    print('Grüße')\n" * 4
QUESTIONS = [
    {"question": "1 + 1 =", "choices": ["2", "three"], "answer": 0},
    {"context": "The sky is", "choices": ["blue", "green", "far"], "answer": 0},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder."""
    return save_run(tmp_path_factory.mktemp("run"), filled(CONFIG, seed=1), MODEL)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path / "a.txt"


@pytest.fixture
def tasks(tmp_path):
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, QUESTIONS)) + "\n")
    return tmp_path / "b.jsonl"


def coat(*arguments):
    return main(["evaluate", *map(str, arguments)])


def json_of(capsys, *arguments):
    assert coat(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def score(model, text=TEXT, **settings):
    tokens = [0, *text.encode()]
    return evaluation.perplexity(model, [tokens], [len(text.encode())], **settings)[0]


def test_a_text_has_the_score_of_the_newest_checkpoint(run, text, capsys):
    said = json_of(capsys, run, "--text", text)
    expected, size = score(MODEL), len(TEXT.encode())
    assert (said["window"], said["precision"]) == (32, "coat")
    assert said["texts"] == [
        {
            "file": str(text),
            "tokens": size,
            "bytes": size,
            "nats_per_token": pytest.approx(expected.per_token),
            "perplexity": pytest.approx(expected.perplexity),
            "bits_per_byte": pytest.approx(expected.bits_per_byte),
        }
    ]
    other = json_of(capsys, run, "--text", text, "--step", 1)["texts"][0]
    assert other["nats_per_token"] == pytest.approx(score(filled(CONFIG, seed=1)).per_token)


def test_window_precision_and_devices(run, text, tmp_path, capsys):
    """By default a window is as long as the sequences of the run."""

    def nats(*arguments):
        return json_of(capsys, run, "--text", text, *arguments)["texts"][0]["nats_per_token"]

    assert nats("--window", 10) == pytest.approx(score(MODEL, window=10).per_token)
    in_bf16 = score(filled(IN_BF16)).per_token
    assert nats("--precision", "bf16") == pytest.approx(in_bf16)
    # The order of sums in FP32, a hundred products and ten deep.
    shared = nats("--precision", "bf16", "--devices", 4, "--batch", 2)
    assert shared == pytest.approx(in_bf16, rel=1e-5)
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text()) | {"sequence_length": 10}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert json_of(capsys, tmp_path / "run", "--text", text)["window"] == 10


def test_a_model_of_hugging_face(text, tasks, tmp_path, capsys):
    hf.save(tmp_path / "model", MODEL)
    said = json_of(capsys, tmp_path / "model", "--text", text, "--tasks", tasks)
    assert said["texts"][0]["nats_per_token"] == pytest.approx(score(filled(IN_BF16)).per_token)
    (expected,) = evaluation.accuracies(
        filled(IN_BF16), [evaluation.read(tasks, Bytes(), [0], CONFIG)]
    )
    of_tasks = {"file": str(tasks), "questions": 2}
    for name, accuracy in zip(("by_sum", "per_byte"), expected, strict=True):
        of_tasks[name] = {
            "right": accuracy.right,
            "accuracy": accuracy.share,
            "interval_95": list(accuracy.interval),
        }
    assert said["tasks"] == [of_tasks]


def test_a_quantized_model_is_evaluated_as_it_is(text, tmp_path, capsys):
    recipe = quantization.Recipe(format="int8", activations="none", leave=("*.down",))
    small = quantization.quantize(filled(IN_BF16), recipe)
    quantization.save(tmp_path / "small", small)
    said = json_of(capsys, tmp_path / "small", "--text", text)
    nats = said["texts"][0]["nats_per_token"]
    assert nats == pytest.approx(score(small).per_token, rel=1e-6)
    assert nats != pytest.approx(score(filled(IN_BF16)).per_token, rel=1e-6)
    assert said["precision"] == "int8"
    assert coat(tmp_path / "small", "--text", text, "--precision", "bf16") == 2
    assert "already quantized, which decides its precision" in capsys.readouterr().err


def test_the_tables_have_a_line_for_each_file(run, text, tasks, tmp_path, capsys):
    """However many names lead to it: its tokens would weigh twice in the score of all texts."""
    (tmp_path / "c.txt").write_text("other")
    (tmp_path / "c.jsonl").write_text(tasks.read_text())
    (tmp_path / "link.txt").symlink_to(text)
    texts = text, tmp_path / "c.txt", text, tmp_path / "link.txt", tmp_path / "*.txt"
    assert coat(run, "--text", *texts, "--tasks", tasks, tasks, tmp_path / "c.jsonl") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["text", "tokens", "nats/token", "perplexity", "bits/byte"]
    assert lines[1].startswith(str(text))
    assert lines[2].split()[1] == "5"
    assert lines[3].split()[:2] == ["together", str(len(TEXT.encode()) + 5)]
    assert lines[4] == ""
    assert lines[6].split()[1:] == lines[7].split()[1:]
    assert len(set(map(len, lines[:4]))) == 1
    assert len(lines) == 8


def test_progress_is_shown_on_a_terminal(run, text, capsys, monkeypatch):
    assert coat(run, "--text", text) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert coat(run, "--text", text) == 0
    assert "Evaluating" in capsys.readouterr().err


def test_questions_that_lose_their_beginning_are_counted(run, tasks, tmp_path, capsys):
    long = QUESTIONS[0] | {"question": "x" * 60}
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, [*QUESTIONS, long])))
    assert coat(run, "--tasks", tmp_path / "c.jsonl") == 0
    said = capsys.readouterr().err
    assert "c.jsonl: 1 of 3 questions lose their beginning to fit the model's context=32" in said


@pytest.mark.parametrize(("before", "scored"), [([], 2), (["<s>"], 3)])
def test_a_text_begins_as_the_tokenizer_says(before, scored, tmp_path, capsys):
    """Without a token that begins a text or ends one, the first is not scored."""
    folder, text = tmp_path / "model", tmp_path / "a.txt"
    hf.save(folder, filled(dataclasses.replace(CONFIG, vocab=3)))
    template = " ".join([*before, "$A"])
    words = folder / "tokenizer.json"
    write_words(words, "yes", "no", unknown="no", special=before, template=template)
    text.write_text("yes no yes")
    (said,) = json_of(capsys, folder, "--text", text)["texts"]
    tokens = [2, 0, 1, 0][-scored - 1 :]
    expected = evaluation.perplexity(hf.load(folder), [tokens], [10])[0]
    assert said["tokens"] == scored
    assert said["nats_per_token"] == pytest.approx(expected.per_token)
    text.write_text(" " if before else "yes")
    assert coat(folder, "--text", text) == 2
    assert "a.txt has no token after the first one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", "Name a text, --text FILE, or a file of questions, --tasks"),
        ("--text BINARY", "is not text in UTF-8"),
        ("--text TEXT --window 33", "--window 33 must be from 2 to context=32"),
        ("--tasks TASKS --window 9", "--window is for texts (--text FILE): leave it out"),
        ("--text TEXT --devices 3", "cannot be sharded as P"),
        ("--text TEXT --tokenizer WORDS", "words.json has a vocabulary of 300, and the model one"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(
    arguments, named, run, text, tasks, tmp_path, capsys
):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    write_words(tmp_path / "words.json", *map(str, range(300)))
    files = {"TEXT": text, "TASKS": tasks, "BINARY": tmp_path / "binary"}
    files["WORDS"] = tmp_path / "words.json"
    assert coat(run, *(files.get(word, word) for word in arguments.split())) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
