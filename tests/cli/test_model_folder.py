"""Which tokenizer a model's folder has, and whether texts begin as its training's did."""

import dataclasses
import json

import pytest
from cli_cases import write_words
from small_model import SMALL

from coat_jax.cli import model_folder
from coat_jax.errors import UserError
from coat_jax.tokenizers import Bytes

THEIRS = {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def tokenizer(tmp_path):
    """A file of two words, which begins a text with <s>."""
    words = "yes", "no", "<s>"
    return write_words(tmp_path / "words.json", *words, unknown="no", template="<s> $A")


def folder_of(tmp_path, said):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("said", "tokens"),
    [
        ({"model": {}, "data": {"tokenizer": "TOKENIZER"}}, [0, 1]),
        (THEIRS, [2, 0, 1]),
    ],
    ids=["trained here", "theirs"],
)
def test_texts_begin_as_those_of_training_did(said, tokens, tmp_path, tokenizer):
    """With nothing in front where a run was trained here, otherwise as the tokenizer says."""
    said = json.loads(json.dumps(said).replace("TOKENIZER", str(tokenizer)))
    folder = folder_of(tmp_path, said)
    for asked in (str(tokenizer), None) if "data" in said else (str(tokenizer),):
        assert model_folder.tokenizer_of(folder, SMALL, asked).encode("yes no") == tokens
    tokenizer.rename(folder / "tokenizer.json")
    assert model_folder.tokenizer_of(folder, SMALL, None).encode("yes no") == tokens


def test_bytes_are_for_models_of_256_tokens_and_for_those_who_ask(tmp_path):
    folder, large = folder_of(tmp_path, THEIRS), dataclasses.replace(SMALL, vocab=257)
    assert isinstance(model_folder.tokenizer_of(folder, SMALL, None), Bytes)
    assert isinstance(model_folder.tokenizer_of(folder, large, "bytes"), Bytes)
    with pytest.raises(UserError, match=r"no tokenizer\.json.*257 tokens.*--tokenizer FILE"):
        model_folder.tokenizer_of(folder, large, None)


@pytest.mark.parametrize("asked", ["bytes", "words"])
def test_the_first_tokens_are_those_of_the_whole_text(tmp_path, tokenizer, asked):
    folder, text = folder_of(tmp_path, THEIRS), tmp_path / "text.txt"
    text.write_text("yes no yes, no? é\r\n" * 4500, newline="")  # longer than what is read first
    asked = str(tokenizer) if asked == "words" else asked
    every = model_folder.tokenizer_of(folder, SMALL, asked).encode(text.read_bytes().decode())
    for most in (1, 1000, 40_000, len(every) - 1, len(every), 10**9):
        assert model_folder.tokens_of(text, folder, SMALL, asked, most=most) == every[:most]


@pytest.mark.parametrize(
    ("content", "tokens"),
    [(b"yes " * model_folder.PIECE + b"\xff", b"yes"), (b"\xef\xbb\xbfyes", b"yes")],
)
def test_a_text_ends_where_enough_is_read_and_begins_after_its_mark(tmp_path, content, tokens):
    folder, text = folder_of(tmp_path, THEIRS), tmp_path / "text.txt"
    text.write_bytes(content)
    assert model_folder.tokens_of(text, folder, SMALL, "bytes", most=3) == list(tokens)


def test_a_text_that_is_none_is_named(tmp_path):
    folder, text = folder_of(tmp_path, THEIRS), tmp_path / "text.txt"
    text.write_bytes(b"yes \xff")
    with pytest.raises(UserError, match=r"text\.txt:1 is not text in UTF-8: invalid start byte"):
        model_folder.tokens_of(text, folder, SMALL, "bytes", most=3)
    with pytest.raises(UserError, match="is a folder: name the file itself"):
        model_folder.tokens_of(tmp_path, folder, SMALL, "bytes", most=3)
