"""`coat evaluate`: the tables are those of the library, and bad input ends in one line."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from small_model import SMALL, filled

from coat_jax import evaluation, quantization
from coat_jax.cli import evaluate, main
from coat_jax.models import hf
from coat_jax.quantization import projections
from coat_jax.tokenizers import Bytes
from coat_jax.training import resume_rules
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.state import State

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
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        for step, model in enumerate((filled(CONFIG, seed=1), MODEL), 1):
            count, params = jnp.int32(step), nnx.state(model)
            checkpoints.save(step, State(count, params, {"m": params}, count), {}, wait=True)
    said = {"model": resume_rules.to_json(CONFIG), "data": {}}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


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


def found(capsys, *arguments):
    assert coat(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def score(model, text=TEXT, **settings):
    tokens = [0, *text.encode()]
    return evaluation.perplexity(model, [tokens], [len(text.encode())], **settings)[0]


def test_a_text_has_the_score_of_the_newest_checkpoint(run, text, capsys):
    said = found(capsys, run, "--text", text)
    expected = score(MODEL)
    assert (said["window"], said["precision"]) == (32, "coat")
    assert said["texts"] == [
        {
            "file": str(text),
            "tokens": len(TEXT.encode()),
            "bytes": len(TEXT.encode()),
            "nats_per_token": pytest.approx(expected.per_token),
            "perplexity": pytest.approx(expected.perplexity),
            "bits_per_byte": pytest.approx(expected.bits_per_byte),
        }
    ]
    other = found(capsys, run, "--text", text, "--step", 1)["texts"][0]
    assert other["nats_per_token"] == pytest.approx(score(filled(CONFIG, seed=1)).per_token)


def test_window_precision_and_devices(run, text, capsys):
    def nats(*arguments):
        return found(capsys, run, "--text", text, *arguments)["texts"][0]["nats_per_token"]

    assert nats("--window", 10) == pytest.approx(score(MODEL, window=10).per_token)
    in_bf16 = score(filled(IN_BF16)).per_token
    assert nats("--precision", "bf16") == pytest.approx(in_bf16)
    # The order of sums in FP32, a hundred products and ten deep.
    shared = nats("--precision", "bf16", "--devices", 4, "--batch", 2)
    assert shared == pytest.approx(in_bf16, rel=1e-5)


def test_a_window_is_as_long_as_the_sequences_of_the_run(run, text, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    config = json.loads((run / "config.json").read_text()) | {"sequence_length": 10}
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    said = found(capsys, tmp_path / "run", "--text", text)
    assert said["window"] == 10
    assert said["texts"][0]["nats_per_token"] == pytest.approx(score(MODEL, window=10).per_token)


def test_a_file_counts_once_however_many_names_lead_to_it(run, text, tasks, tmp_path, capsys):
    """As in training: its tokens would weigh twice in the score of all texts together."""
    (tmp_path / "link.txt").symlink_to(text)
    names = text, text, tmp_path / "link.txt", tmp_path / "*.txt"
    arguments = [run, "--text", *names, "--tasks", tasks, tasks]
    said = found(capsys, *arguments)
    assert [each["file"] for each in said["texts"]] == [str(text)]
    assert [each["file"] for each in said["tasks"]] == [str(tasks)]
    assert coat(*arguments) == 0
    assert "together" not in capsys.readouterr().out


def test_a_model_of_hugging_face(text, tasks, tmp_path, capsys):
    hf.save(tmp_path / "model", MODEL)
    said = found(capsys, tmp_path / "model", "--text", text, "--tasks", tasks)
    assert said["texts"][0]["nats_per_token"] == pytest.approx(score(filled(IN_BF16)).per_token)
    of_file = evaluation.read(tasks, Bytes(), [0], CONFIG)
    expected = evaluation.accuracies(filled(IN_BF16), [of_file])[0]
    assert said["tasks"] == [
        {
            "file": str(tasks),
            "questions": 2,
            "by_sum": {
                "right": expected.by_sum.right,
                "accuracy": expected.by_sum.share,
                "interval_95": list(expected.by_sum.interval),
            },
            "per_byte": {
                "right": expected.per_byte.right,
                "accuracy": expected.per_byte.share,
                "interval_95": list(expected.per_byte.interval),
            },
        }
    ]


def keys_of(value):
    """All keys within a JSON value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {*(value if isinstance(value, dict) else ()), *(k for v in inner for k in keys_of(v))}


def test_keys_are_identifiers(run, text, tasks, capsys):
    keys = keys_of(found(capsys, run, "--text", text, "--tasks", tasks))
    assert {"nats_per_token", "interval_95"} <= keys
    assert all(key.isidentifier() and key.islower() for key in keys)


def test_a_quantized_model_is_evaluated_as_it_is(text, tmp_path, capsys):
    small = quantization.quantize(filled(IN_BF16), quantization.Recipe(format="int8"))
    quantization.save(tmp_path / "small", small)
    said = found(capsys, tmp_path / "small", "--text", text)["texts"][0]
    assert said["nats_per_token"] == pytest.approx(score(small).per_token, rel=1e-6)
    assert said["nats_per_token"] != pytest.approx(score(filled(IN_BF16)).per_token, rel=1e-6)
    assert coat(tmp_path / "small", "--text", text, "--precision", "bf16") == 2
    assert "already quantized, which decides its precision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "precision", "layers"),
    [
        ({"format": "fp8"}, "fp8", [("fp8", "dynamic", 7)]),
        (
            {"format": "int8", "activations": "none", "leave": ("*.down",)},
            "int8",
            [("int8", "none", 6), ("float32", "none", 1)],
        ),
    ],
)
def test_json_says_how_a_model_is_quantized(recipe, precision, layers, text, tmp_path, capsys):
    small = quantization.quantize(filled(IN_BF16), quantization.Recipe(**recipe))
    quantization.save(tmp_path / "small", small)
    said = found(capsys, tmp_path / "small", "--text", text)
    assert said["precision"] == precision
    assert [tuple(each.values()) for each in said["linear_layers"]] == layers
    assert all(list(each) == ["format", "activations", "count"] for each in said["linear_layers"])


def test_json_says_that_formats_are_mixed(tmp_path):
    schemes = dict.fromkeys(projections.paths_of(IN_BF16), quantization.Scheme("int8", "static"))
    schemes["layers.0.mlp.down"] = quantization.Scheme("fp8", "static")
    config = quantization.inference_config(IN_BF16)
    graph, state = quantization.abstract(config, schemes)
    model = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state))
    assert evaluate._precision_as_json(model) == {
        "precision": "mixed",
        "linear_layers": [
            {"format": "fp8", "activations": "static", "count": 1},
            {"format": "int8", "activations": "static", "count": 6},
        ],
    }


def test_the_tables_have_a_line_for_each_file(run, text, tasks, tmp_path, capsys):
    (tmp_path / "c.txt").write_text("other")
    (tmp_path / "c.jsonl").write_text(tasks.read_text())
    files = ["--text", text, tmp_path / "c.txt", "--tasks", tasks, tmp_path / "c.jsonl"]
    assert coat(run, *files) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["text", "tokens", "nats/token", "perplexity", "bits/byte"]
    assert lines[1].startswith(str(text))
    assert lines[2].split()[1] == "5"
    assert lines[3].split()[:2] == ["together", str(len(TEXT.encode()) + 5)]
    assert lines[4] == ""
    assert lines[6].split()[1:] == lines[7].split()[1:]
    assert len(set(map(len, lines[:4]))) == 1


def test_progress_is_shown_on_a_terminal(run, text, capsys, monkeypatch):
    assert coat(run, "--text", text) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(evaluate.sys.stderr, "isatty", lambda: True)
    assert coat(run, "--text", text, "--batch", 4) == 0
    assert "\r\033[K4 of 8 windows\r\033[K" in capsys.readouterr().err


def test_questions_that_lose_their_beginning_are_counted(run, tasks, tmp_path, capsys):
    long = QUESTIONS[0] | {"question": "x" * 60}
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, [*QUESTIONS, long])))
    assert coat(run, "--tasks", tmp_path / "c.jsonl") == 0
    said = capsys.readouterr().err
    assert "c.jsonl: 1 of 3 questions lose their beginning to fit the model's context=32" in said


@pytest.fixture
def of_words(tmp_path):
    """A folder whose tokenizer knows neither a token that begins a text nor one that ends it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"yes": 0, "no": 1}, unk_token="no"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    hf.save(tmp_path / "model", filled(dataclasses.replace(CONFIG, vocab=3)))
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def test_without_a_token_that_begins_a_text_the_first_is_not_scored(of_words, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("yes no yes")
    assert found(capsys, of_words, "--text", tmp_path / "a.txt")["texts"][0]["tokens"] == 2
    for text, said in (
        ("yes", "1 token, fewer than 2, because"),
        ("  \n", "0 tokens, fewer than 2"),
    ):
        (tmp_path / "a.txt").write_text(text)
        assert coat(of_words, "--text", tmp_path / "a.txt") == 2
        assert f"a.txt has {said}" in capsys.readouterr().err


def test_the_token_that_the_tokenizer_begins_a_text_with_comes_first(of_words, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(str(of_words / "tokenizer.json"))
    made.add_special_tokens(["<s>"])
    begins = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 2)])
    made.post_processor = begins
    made.save(str(of_words / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("yes no yes")
    said = found(capsys, of_words, "--text", tmp_path / "a.txt")["texts"][0]
    model = hf.load(of_words)
    expected = evaluation.perplexity(model, [[2, 0, 1, 0]], [10])[0]
    assert said["tokens"] == 3
    assert said["nats_per_token"] == pytest.approx(expected.per_token)
    (tmp_path / "a.txt").write_text(" ")
    assert coat(of_words, "--text", tmp_path / "a.txt") == 2
    assert "a.txt has 0 tokens, fewer than 1." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "Name a text, --text FILE, or a file of questions, --tasks"),
        (["--text", "none.txt"], "There is no file none.txt"),
        (["--text", "/dev/zero"], "/dev/zero is a pipe or a device"),
        (["--text", "EMPTY"], "empty.txt is empty"),
        (["--text", "BINARY"], "is not text in UTF-8"),
        (["--tasks", "EMPTY"], "has no question"),
        (["--tasks", "TEXT"], "a.txt:1 is not JSON"),
        (
            ["--text", "TEXT", "--window", "33"],
            "A window of 33 must be from 2 to the model's context",
        ),
        (["--text", "TEXT", "--window", "1"], "A window of 1 must be from 2"),
        (["--tasks", "TASKS", "--window", "9"], "--window 9 is for texts: name one"),
        (["--text", "TEXT", "--batch", "0"], "--batch 0 must be 1 or more"),
        (
            ["--text", "TEXT", "--devices", "9"],
            "--devices 9 must be 1 or more, and JAX finds 8 devices",
        ),
        (["--text", "TEXT", "--devices", "3"], "cannot be sharded over 3 devices"),
        (["--text", "TEXT", "--precision", "fp4"], "no precision 'fp4'"),
        (["--text", "TEXT", "--step", "7"], "no checkpoint of step 7"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(
    arguments, named, run, text, tasks, tmp_path, capsys
):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    files = {"TEXT": text, "TASKS": tasks}
    files |= {"EMPTY": tmp_path / "empty.txt", "BINARY": tmp_path / "binary"}
    assert coat(run, *(files.get(word, word) for word in arguments)) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_folder_that_an_option_took_is_explained(run, text, capsys):
    with pytest.raises(SystemExit):
        coat("--text", text, run)
    message = "required: WHERE; options take all words that follow, so put it first"
    assert message in capsys.readouterr().err


def test_a_tokenizer_must_be_that_of_the_model(text, tmp_path, capsys):
    hf.save(tmp_path / "model", filled(dataclasses.replace(CONFIG, vocab=100)))
    assert coat(tmp_path / "model", "--text", text) == 2
    assert "its model knows 100 tokens" in capsys.readouterr().err
    assert coat(tmp_path / "model", "--text", text, "--tokenizer", "bytes") == 2
    assert "a.txt has token 100, outside the model's vocabulary" in capsys.readouterr().err
