"""`coat generate`: what it prints is what the model says, from whatever folder."""

import codecs
import dataclasses
import json
import sys

import jax.numpy as jnp
import pytest
from flax import nnx
from small_model import filled

from coat_jax import generation, models
from coat_jax.cli import evaluate, formats, generate, main
from coat_jax.cli.model_folder import ModelFolder
from coat_jax.models import hf
from coat_jax.precision import BF16, COAT, FP8_LINEAR
from coat_jax.training import resume_rules
from coat_jax.training.checkpoint import Checkpoints
from coat_jax.training.state import State

tokenizers = pytest.importorskip("tokenizers")

CONFIG = models.Config(
    vocab=256,
    width=32,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=48,
    context=64,
    dtype=jnp.float32,
    precision="coat",
)
GREEDY = ["--temperature", "0", "--max-tokens", "12"]


MODEL = filled(CONFIG)


def continued(model, *prompts, **settings):
    """What the library gives: the bytes of each text after its prompt."""
    settings = {"sampling": generation.Sampling(temperature=0), "stops": [0], **settings}
    tokens = [list(prompt.encode()) for prompt in prompts]
    texts = generation.generate(model, tokens, max_tokens=12, **settings)
    return [bytes(text).decode("utf-8", "replace") for text in texts]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A Hugging Face folder."""
    folder = tmp_path_factory.mktemp("theirs")
    hf.save(folder, MODEL)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder, with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    save_run(folder, MODEL, filled(CONFIG, seed=1))
    return folder


def save_run(folder, *of_steps, data=None):
    with Checkpoints(folder / "checkpoints", keep=9) as checkpoints:
        for step, model in enumerate(of_steps, 1):
            count, params = jnp.int32(step), nnx.state(model)
            checkpoints.save(step, State(count, params, {"m": params}, count), {}, wait=True)
    said = {"model": resume_rules.to_json(of_steps[0].config), "data": data or {}}
    (folder / "config.json").write_text(json.dumps(said))


def words(folder):
    """A tokenizer of four words, one of which ends a text."""
    vocab = {"<eos>": 0, "yes": 1, "no": 2, "maybe": 3, "[unk]": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[unk]"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def coat(*arguments):
    return main(["generate", *map(str, arguments)])


def options(*arguments):
    """As `run` gets them."""
    import argparse

    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(list(map(str, arguments)))


# --- What is printed -------------------------------------------------------------------------


def test_the_prompt_and_what_the_newest_checkpoint_says(run, capsys):
    (text,) = continued(filled(CONFIG, seed=1), "def ")
    assert coat(run, "--prompt", "def ", *GREEDY) == 0
    said = capsys.readouterr()
    assert said.out == f"def {text}\n"
    assert "tokens;" in said.err
    assert "s until the first, then" in said.err


def test_an_older_checkpoint_by_its_step(run, capsys):
    (text,) = continued(MODEL, "def ")
    assert coat(run, "--prompt", "def ", "--step", 1, *GREEDY) == 0
    assert capsys.readouterr().out == f"def {text}\n"


def test_a_model_of_hugging_face_computes_as_it_is_stored(theirs, capsys):
    (text,) = continued(filled(dataclasses.replace(CONFIG, precision="bf16")), "é")
    assert coat(theirs, "--prompt", "é", *GREEDY) == 0
    assert capsys.readouterr().out == f"é{text}\n"


def test_prompts_come_in_order_whatever_the_batch(run, tmp_path, capsys):
    prompts = ["one", "two and more", "3", "vier"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts[1:]) + "\n")
    hot = ["--temperature", "3", "--top-k", "90", "--top-p", "0.95", "--seed", "5"]
    printed = []
    for batch in (4, 2):
        more = ["--prompts", tmp_path / "prompts.txt", "--batch", batch, "--max-tokens", 12]
        assert coat(run, "--prompt", prompts[0], *more, *hot) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    parts = printed[0].removesuffix("\n").split("\n---\n")
    assert [part.startswith(prompt) for part, prompt in zip(parts, prompts, strict=True)]
    sampling = generation.Sampling(temperature=3, top_k=90, top_p=0.95, seed=5)
    texts = continued(filled(CONFIG, seed=1), *prompts, sampling=sampling)
    assert parts == [prompt + text for prompt, text in zip(prompts, texts, strict=True)]


def test_prompts_of_jsonl_may_have_lines(run, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a\\nb"}\n"c"\n')
    assert coat(run, "--prompts", tmp_path / "prompts.jsonl", *GREEDY) == 0
    first, second = continued(filled(CONFIG, seed=1), "a\nb", "c")
    assert capsys.readouterr().out == f"a\nb{first}\n---\nc{second}\n"


def test_only_newlines_divide_prompts(run, tmp_path, capsys):
    (tmp_path / "p.txt").write_bytes("a\u2028b\r\nc\x85\n".encode())
    (tmp_path / "p.JSONL").write_bytes('"a\u2028b"\n\n"c\x85"\n'.encode())
    for name in ("p.txt", "p.JSONL"):
        assert coat(run, "--prompts", tmp_path / name, *GREEDY, "--max-tokens", 1) == 0
        first, second = capsys.readouterr().out.split("\n---\n")
        assert first.startswith("a\u2028b")
        assert second.startswith("c\x85")


@pytest.mark.parametrize("name", ["p.txt", "p.jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_prompt(run, tmp_path, capsys, name):
    (tmp_path / name).write_bytes(codecs.BOM_UTF8 + (b"abc" if name == "p.txt" else b'"abc"'))
    assert coat(run, "--prompts", tmp_path / name, *GREEDY) == 0
    (text,) = continued(filled(CONFIG, seed=1), "abc")
    assert capsys.readouterr().out == f"abc{text}\n"


def test_an_error_begins_on_a_line_of_its_own(tmp_path, capsys):
    model = filled(CONFIG)
    model.norm.scale[...] = jnp.full_like(model.norm.scale[...], jnp.nan)
    hf.save(tmp_path / "damaged", model)
    assert coat(tmp_path / "damaged", "--prompt", "abc", *GREEDY) == 2
    said = capsys.readouterr()
    assert said.out == "abc\n"
    assert said.err.startswith("coat generate: The model's logits are not numbers")


def test_blank_lines_are_no_prompts(run, tmp_path, capsys):
    for name, lines in (
        ("p.txt", ["", "a", " \t", "", "b", ""]),
        ("p.jsonl", ["", '"a"', " ", '"b"']),
    ):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        assert coat(run, "--prompts", tmp_path / name, *GREEDY) == 0
        first, second = continued(filled(CONFIG, seed=1), "a", "b")
        assert capsys.readouterr().out == f"a{first}\n---\nb{second}\n"


def test_several_devices_say_the_same(run, capsys):
    (text,) = continued(filled(CONFIG, seed=1), "def ")
    assert coat(run, "--prompt", "def ", "--devices", 2, *GREEDY) == 0
    assert capsys.readouterr().out == f"def {text}\n"


def test_a_text_comes_as_it_is_made(run, capsys, monkeypatch):
    """The first piece is there before the second chunk of tokens is asked for."""
    seen = []
    stream = generation.stream

    def watched(*arguments, **settings):
        for chunk in stream(*arguments, **settings):
            yield chunk
            seen.append(capsys.readouterr().out)

    monkeypatch.setattr(generation, "stream", watched)
    assert coat(run, "--prompt", "def ", *GREEDY, "--tokenizer", "bytes") == 0
    assert seen[0].startswith("def ")
    assert len([piece for piece in seen if piece]) > 1


def test_a_terminal_is_not_sent_control_characters(monkeypatch, capsys):
    generate._say("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\x1b[2J\tb\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generate._say("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\n"


def test_output_may_be_closed(monkeypatch):
    """`>&-` and `2>&-` close it, and Python then has None."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    generate._say("text")
    evaluate._progress("windows")(1, 2)
    assert list(formats._shown(iter([]))) == []


# --- What follows from the folder ------------------------------------------------------------


def test_the_precision_is_that_of_the_run_unless_told(run, theirs):
    def precision(*arguments):
        return ModelFolder(options(*arguments)).config.precision

    assert precision(run) == COAT
    assert precision(theirs) == BF16
    assert precision(run, "--precision", "bf16") == BF16
    assert precision(theirs, "--precision", "fp8_linear") == FP8_LINEAR


def test_the_tokenizer_is_found(theirs, tmp_path):
    def text(*arguments):
        return ModelFolder(options(*arguments)).tokenizer

    assert text(theirs).encode("no") == list(b"no")
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    run.mkdir()
    save_run(run, MODEL, data={"tokenizer": str(words(other)), "end_of_text": None})
    assert text(run).encode("no") == [2]
    assert text(theirs, "--tokenizer", other / "tokenizer.json").encode("no") == [2]
    assert text(run, "--tokenizer", "bytes").encode("no") == list(b"no")
    hf.save(other, MODEL)
    assert text(other).encode("no") == [2]


def test_the_tokens_that_end_a_text_are_found(theirs, tmp_path):
    def stops(folder, *arguments):
        return ModelFolder(options(folder, *arguments)).stops

    def folder(name, **data):
        (tmp_path / name).mkdir()
        save_run(tmp_path / name, MODEL, data=data)
        return tmp_path / name

    assert stops(theirs) == [0]
    tokenizer = str(words(tmp_path))
    assert stops(folder("a", tokenizer=None, end_of_text=None)) == [0]
    assert stops(folder("b", tokenizer=tokenizer, end_of_text=3)) == [3]
    assert stops(folder("c", tokenizer=tokenizer, end_of_text=None)) == [0]
    hf.save(tmp_path / "d", MODEL, extra={"eos_token_id": 9})
    assert stops(tmp_path / "d") == [9]
    (tmp_path / "d" / "generation_config.json").write_text('{"eos_token_id": null}')
    assert stops(tmp_path / "d") == [9]
    (tmp_path / "d" / "generation_config.json").write_text('{"eos_token_id": [4, 5, 999]}')
    assert stops(tmp_path / "d") == [4, 5]


def test_texts_end_with_a_stop_token(run, capsys):
    (text,) = continued(filled(CONFIG, seed=1), "def ")
    stop = next(letter for letter in text[1:] if letter.isascii() and letter != text[0])
    assert coat(run, "--prompt", "def ", "--stop", stop, *GREEDY) == 0
    assert capsys.readouterr().out == f"def {text[: text.index(stop)]}\n"


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "There is no prompt: give --prompt TEXT, or --prompts FILE"),
        (["--prompt", ""], "The prompt is empty"),
        (["--prompt", "a", "--prompt", ""], "Prompt 2 is empty"),
        (["--prompt", "x" * 64], "64 tokens, and the model's context=64"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens=0 must be a whole number from 1"),
        (["--prompt", "a", "--max-tokens", "many"], "invalid int value: 'many'"),
        (["--prompt", "a", "--temperature", "-1"], "temperature=-1.0 must be a number from 0"),
        (["--prompt", "a", "--top-p", "0"], "top_p=0.0 must be a number above 0"),
        (["--prompt", "a", "--top-p", "1.1"], "top_p=1.1 must be a number above 0 and at most 1"),
        (["--prompt", "a", "--top-k", "-1"], "top_k=-1"),
        (["--prompt", "a", "--seed", "-1"], "seed=-1"),
        (["--prompt", "a", "--batch", "0"], "--batch 0 must be 1 or more"),
        (["--prompt", "a", "--stop", "<|end|>"], "'<|end|>' is not a token: tokens are bytes"),
        (["--prompt", "a", "--precision", "fp4"], "no precision 'fp4'. Use one of bf16"),
        (["--prompt", "a", "--step", "7"], "no checkpoint of step 7 in"),
        (
            ["--prompt", "a", "--devices", "9"],
            "--devices 9 must be 1 or more, and JAX finds 8 devices",
        ),
        (["--prompt", "a", "--devices", "0"], "--devices 0 must be 1 or more"),
        (["--prompt", "a", "--devices", "3"], "cannot be sharded over 3 devices"),
        (["--prompt", "a", "--tokenizer", "none.json"], "no tokenizer file none.json"),
        (["--prompts", "/dev/zero"], "/dev/zero is a pipe or a device"),
        (["--prompts", "none.txt"], "There is no file none.txt"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(arguments, named, run, capsys):
    try:
        code = coat(run, *arguments)
    except SystemExit as error:
        code = error.code
    assert code == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_a_file_without_a_prompt_is_named(run, tmp_path, capsys):
    for content in ("", "\n", " \r\n\n"):
        (tmp_path / "none.txt").write_bytes(content.encode())
        assert coat(run, "--prompt", "a", "--prompts", tmp_path / "none.txt") == 2
        assert "none.txt is empty: it should have a prompt on each line." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "p.jsonl:2 is not JSON"),
        ("7", "p.jsonl:2 is neither a string nor"),
        ('""', "Prompt 2"),
    ],
)
def test_lines_that_are_no_prompts_are_named(line, named, run, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text(f'"a"\n{line}\n')
    assert coat(run, "--prompts", tmp_path / "p.jsonl") == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings",
    ["[", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null, 1.5]}', "[" * 9999],
)
def test_settings_of_generation_that_are_none_are_refused(settings, tmp_path, capsys):
    hf.save(tmp_path / "model", MODEL)
    (tmp_path / "model" / "generation_config.json").write_text(settings)
    assert coat(tmp_path / "model", "--prompt", "a") == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "generation_config.json is not" in said or "eos_token_id" in said


def test_folders_without_a_model_are_refused(theirs, tmp_path, capsys):
    def refused(folder, named, *arguments):
        assert coat(folder, "--prompt", "a", *arguments) == 2
        assert named in capsys.readouterr().err

    refused(tmp_path / "nowhere", "there is no such folder")
    refused(tmp_path, "there is no config.json in it")
    refused(theirs, "holds one model, and no steps", "--step", "1")
    save_run(tmp_path, MODEL)
    (tmp_path / "checkpoints" / "1").rename(tmp_path / "checkpoints" / "1.unfinished")
    refused(tmp_path, "There is no checkpoint in")


def test_a_tokenizer_must_be_that_of_the_model(tmp_path, capsys):
    hf.save(tmp_path, filled(dataclasses.replace(CONFIG, vocab=3)))
    assert coat(tmp_path, "--prompt", "no") == 2
    assert "has no tokenizer.json, and its model knows 3 tokens" in capsys.readouterr().err
    words(tmp_path)
    assert coat(tmp_path, "--prompt", "no") == 2
    assert "has a vocabulary of 5, and the model one of 3: it is" in capsys.readouterr().err
    hf.save(tmp_path / "padded", filled(dataclasses.replace(CONFIG, vocab=8)))
    words(tmp_path / "padded")
    assert coat(tmp_path / "padded", "--prompt", "no", "--stop", "no yes") == 2
    assert (
        "'no yes' is not one token: the tokenizer encodes it as [2, 1]" in capsys.readouterr().err
    )
