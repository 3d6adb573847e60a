"""Which tokenizer a model's folder has, and whether texts begin as its training's did."""

import dataclasses
import json

import pytest
from small_model import SMALL

from coat_jax.cli import texts
from coat_jax.errors import UserError
from coat_jax.tokenizers import Bytes

THEIRS = {"architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def tokenizer(tmp_path):
    """A file of two words, which begins a text with <s>."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"yes": 0, "no": 1, "<s>": 2}, unk_token="no")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 2)]
    )
    made.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def folder_of(tmp_path, said):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(said))
    return folder


def test_texts_of_a_run_begin_as_its_training_did_with_nothing_in_front(tmp_path, tokenizer):
    run = folder_of(tmp_path, {"model": {}, "data": {"tokenizer": str(tokenizer)}})
    assert texts.tokenizer_of(run, SMALL, None).encode("yes no") == [0, 1]
    assert texts.tokenizer_of(run, SMALL, str(tokenizer)).encode("yes no") == [0, 1]
    tokenizer.rename(run / "tokenizer.json")
    assert texts.tokenizer_of(run, SMALL, None).encode("yes no") == [0, 1]


def test_texts_of_a_run_that_was_converted_begin_as_its_tokenizer_says(tmp_path, tokenizer):
    run = folder_of(tmp_path, {"model": {}})
    assert texts.tokenizer_of(run, SMALL, str(tokenizer)).encode("yes no") == [2, 0, 1]
    tokenizer.rename(run / "tokenizer.json")
    assert texts.tokenizer_of(run, SMALL, None).encode("yes no") == [2, 0, 1]


def test_texts_of_other_models_begin_as_their_tokenizer_says(tmp_path, tokenizer):
    theirs = folder_of(tmp_path, THEIRS)
    assert texts.tokenizer_of(theirs, SMALL, str(tokenizer)).encode("yes no") == [2, 0, 1]
    tokenizer.rename(theirs / "tokenizer.json")
    assert texts.tokenizer_of(theirs, SMALL, None).encode("yes no") == [2, 0, 1]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"end_of_text": "x"}, "data.end_of_text='x' must be"),
        ({"tokenizer": 3}, "data.tokenizer=3 must be"),
        ([], "data=\\[\\] must be an object"),
    ],
)
def test_data_of_a_run_that_cannot_be_meant_is_refused_by_its_name(data, named, tmp_path):
    with pytest.raises(UserError, match=f"/config.json: {named}"):
        texts.data_of(tmp_path, {"model": {}, "data": data})


def test_bytes_are_for_models_of_256_tokens_and_for_those_who_ask(tmp_path):
    folder = folder_of(tmp_path, THEIRS)
    small = dataclasses.replace(SMALL, vocab=256)
    assert isinstance(texts.tokenizer_of(folder, small, None), Bytes)
    large = dataclasses.replace(SMALL, vocab=257)
    assert isinstance(texts.tokenizer_of(folder, large, "bytes"), Bytes)
    with pytest.raises(UserError, match=r"no tokenizer\.json.*257 tokens.*--tokenizer FILE"):
        texts.tokenizer_of(folder, large, None)


@pytest.mark.parametrize("asked", ["bytes", "words"])
def test_the_first_tokens_are_those_of_the_whole_text(tmp_path, tokenizer, asked):
    folder, text = folder_of(tmp_path, THEIRS), tmp_path / "text.txt"
    text.write_text("yes no yes, no? é\r\n" * 9000, newline="")  # longer than what is read first
    asked = str(tokenizer) if asked == "words" else asked
    every = texts.tokenizer_of(folder, SMALL, asked).encode(text.read_bytes().decode())
    for most in (1, 1000, 40_000, len(every) - 1, len(every), 10**9):
        assert texts.tokens_of(text, folder, SMALL, asked, most=most) == every[:most]


def test_what_follows_the_first_tokens_of_a_text_is_not_read(tmp_path):
    folder, text = folder_of(tmp_path, THEIRS), tmp_path / "text.txt"
    text.write_bytes(b"yes " * texts.PIECE + b"\xff")
    assert texts.tokens_of(text, folder, SMALL, "bytes", most=3) == list(b"yes")


def test_a_byte_order_mark_is_no_text(tmp_path):
    folder, text = folder_of(tmp_path, THEIRS), tmp_path / "text.txt"
    text.write_bytes(b"\xef\xbb\xbfyes")
    assert texts.tokens_of(text, folder, SMALL, "bytes", most=9) == list(b"yes")


def test_a_text_that_is_none_is_named(tmp_path):
    folder, text = folder_of(tmp_path, THEIRS), tmp_path / "text.txt"
    text.write_bytes(b"yes \xff")
    with pytest.raises(UserError, match=r"text\.txt:1 is not text in UTF-8: invalid start byte"):
        texts.tokens_of(text, folder, SMALL, "bytes", most=3)
    with pytest.raises(UserError, match="is a folder: name the file itself"):
        texts.tokens_of(tmp_path, folder, SMALL, "bytes", most=3)
