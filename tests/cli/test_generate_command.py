"""`coat generate`: what it prints is what the model says, from whatever folder."""

import argparse
import dataclasses
import json
import sys

import jax.numpy as jnp
import pytest
from cli_cases import save_run, write_words
from small_model import SMALL, filled

from coat_jax import generation
from coat_jax.cli import generate, main
from coat_jax.cli.model_folder import ModelFolder
from coat_jax.cli.output import progress_bar
from coat_jax.errors import UserError
from coat_jax.models import hf

CONFIG = dataclasses.replace(SMALL, layers=1, dtype=jnp.float32, precision="coat")
WORDS = "<eos>", "yes", "no", "maybe", "other"
GREEDY = ["--temperature", "0", "--max-tokens", "12"]


MODEL = filled(CONFIG)


def continuation_of(model, *prompts, **settings):
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
    return save_run(tmp_path_factory.mktemp("run"), MODEL, filled(CONFIG, seed=1))


def coat(*arguments):
    return main(["generate", *map(str, arguments)])


def options(*arguments):
    """As `run` gets them."""
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    return parser.parse_args(list(map(str, arguments)))


# --- What is printed -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "seed"), [([], 1), (["--step", "1"], 0), (["--devices", "2"], 1)]
)
def test_the_prompt_and_what_a_checkpoint_says(run, arguments, seed, capsys):
    """By default the newest one; several devices say the same."""
    (text,) = continuation_of(filled(CONFIG, seed=seed), "def ")
    assert coat(run, "--prompt", "def ", *arguments, *GREEDY) == 0
    said = capsys.readouterr()
    assert said.out == f"def {text}\n"
    assert "tokens;" in said.err
    assert "s until the first, then" in said.err


def test_the_cache_has_the_format_that_is_asked_for(run, capsys):
    """In INT4 the text is another one; a choice that does not exist is refused."""
    model = filled(CONFIG, seed=1)
    text, other = (continuation_of(model, "def ", cache=cache)[0] for cache in ("int4", None))
    assert text != other
    assert coat(run, "--prompt", "def ", "--cache", "int4", *GREEDY) == 0
    assert capsys.readouterr().out == f"def {text}\n"
    assert coat(run, "--prompt", "def ", "--cache", "int5") == 2
    assert "choose from" in capsys.readouterr().err


def test_texts_end_with_a_stop_token(run, capsys):
    (text,) = continuation_of(filled(CONFIG, seed=1), "def ")
    stop = next(letter for letter in text[1:] if letter.isascii() and letter != text[0])
    assert coat(run, "--prompt", "def ", "--stop", stop, *GREEDY) == 0
    assert capsys.readouterr().out == f"def {text[: text.index(stop)]}\n"


def test_a_model_of_hugging_face_computes_as_it_is_stored(theirs, capsys):
    (text,) = continuation_of(filled(dataclasses.replace(CONFIG, precision="bf16")), "é")
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
    sampling = generation.Sampling(temperature=3, top_k=90, top_p=0.95, seed=5)
    texts = continuation_of(filled(CONFIG, seed=1), *prompts, sampling=sampling)
    assert parts == [prompt + text for prompt, text in zip(prompts, texts, strict=True)]


def test_each_line_that_is_not_blank_is_a_prompt(tmp_path):
    """Only newlines divide them; a byte order mark is no part of one."""
    for name, content, prompts in (
        ("p.txt", "\ufeffa\u2028b\r\n \t\n\nc\x85\n", ["a\u2028b", "c\x85"]),
        ("p.txt", "\na", ["a"]),
        ("p.jsonl", '{"prompt": "a\\nb"}\n"c"\n', ["a\nb", "c"]),
        ("p.JSONL", '\ufeff"a\u2028b"\n \n"c\x85"\n', ["a\u2028b", "c\x85"]),
    ):
        (tmp_path / name).write_bytes(content.encode())
        assert list(generate._lines(tmp_path / name)) == prompts


def test_an_error_begins_on_a_line_of_its_own(tmp_path, capsys):
    model = filled(CONFIG)
    model.norm.scale[...] = jnp.full_like(model.norm.scale[...], jnp.nan)
    hf.save(tmp_path / "damaged", model)
    assert coat(tmp_path / "damaged", "--prompt", "abc", *GREEDY) == 2
    said = capsys.readouterr()
    assert said.out == "abc\n"
    assert said.err.startswith("coat generate: The model's logits are not numbers")


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


def test_a_terminal_is_not_sent_control_characters_and_output_may_be_closed(monkeypatch, capsys):
    """`>&-` and `2>&-` close it, and Python then has None."""
    generate._say("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\x1b[2J\tb\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    generate._say("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == "a\\x1b[2J\tb\n"
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    generate._say("text")
    with progress_bar() as bar:
        bar.add_task("")


# --- What follows from the folder ------------------------------------------------------------


def test_the_tokens_that_end_a_text_are_found(theirs, tmp_path):
    def stops(folder):
        return ModelFolder(options(folder)).stops

    run = tmp_path / "run"
    tokenizer = str(write_words(tmp_path / "words.json", *WORDS, special=["<eos>"]))
    save_run(run, MODEL)
    said = json.loads((run / "config.json").read_text())
    assert stops(theirs) == [0]
    for data, found in (
        ({"tokenizer": None, "end_of_text": None}, [0]),
        ({"tokenizer": tokenizer, "end_of_text": 3}, [3]),
        ({"tokenizer": tokenizer, "end_of_text": None}, [0]),
    ):
        (run / "config.json").write_text(json.dumps(said | {"data": data}))
        assert stops(run) == found
    hf.save(tmp_path / "d", MODEL, extra={"eos_token_id": 9})
    assert stops(tmp_path / "d") == [9]
    for settings, found in (("null", [9]), ("[4, 5, 999]", [4, 5])):
        (tmp_path / "d" / "generation_config.json").write_text(f'{{"eos_token_id": {settings}}}')
        assert stops(tmp_path / "d") == found


# --- Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "There is no prompt: give --prompt TEXT, or lines in --prompts FILE"),
        (["--prompt", "a", "--prompt", ""], "Prompt 2 has 0 tokens"),
        (["--prompt", "x" * 64], "64 tokens, and must have from 1 to 63"),
        (["--prompt", "a", "--max-tokens", "0"], "--max-tokens: 0 must be 1 or more"),
        (["--prompt", "a", "--stop", "<|end|>"], "'<|end|>' is not a token: tokens are bytes"),
        (["--prompt", "a", "--precision", "fp4"], "no precision 'fp4'. Use one of bf16"),
        (["--prompt", "a", "--step", "7"], "no checkpoint of step 7 in"),
        (["--prompt", "a", "--devices", "9"], "--devices 9: JAX finds 8 here"),
        (["--prompt", "a", "--devices", "3"], "cannot be sharded as P"),
        (["--prompt", "a", "--tokenizer", "none.json"], "no tokenizer file none.json"),
        (["--prompts", "none.txt"], "There is no file none.txt"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(arguments, named, run, capsys):
    assert coat(run, *arguments) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_files_without_prompts_are_named(tmp_path):
    for name, content, named in (
        ("p.jsonl", '"a"\n{', "p.jsonl:2 is not JSON"),
        ("p.jsonl", '"a"\n7', "p.jsonl:2 is neither a string nor"),
    ):
        (tmp_path / name).write_bytes(content.encode())
        with pytest.raises(UserError, match=named):
            list(generate._lines(tmp_path / name))


def test_folders_without_a_model_and_other_tokenizers_are_refused(theirs, tmp_path, capsys):
    def refused(folder, named, *arguments):
        assert coat(folder, "--prompt", "no", *arguments) == 2
        assert named in capsys.readouterr().err

    refused(tmp_path / "nowhere", "there is no such folder")
    refused(tmp_path, "there is no config.json in it")
    refused(theirs, "holds one model, and no steps", "--step", "1")
    hf.save(tmp_path / "ends", MODEL, extra={"eos_token_id": [1, 1.5]})
    refused(tmp_path / "ends", "eos_token_id=1.5 must be")
    save_run(tmp_path, MODEL)
    (tmp_path / "checkpoints" / "1").rename(tmp_path / "checkpoints" / "1.unfinished")
    refused(tmp_path, "There is no checkpoint in")
    hf.save(tmp_path / "words", filled(dataclasses.replace(CONFIG, vocab=8)))
    refused(tmp_path / "words", "has no tokenizer.json, and its model knows 8 tokens")
    write_words(tmp_path / "words" / "tokenizer.json", *WORDS)
    refused(tmp_path / "words", "[2, 1]", "--stop", "no yes")
