"""Laws of encoders: special tokens are meant only where the template means them."""

import json

import numpy as np
import pytest
from data_cases import SPACED, write_spaced_tokenizer, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.errors import UserError
from coat_jax.tokenizers import Bytes, Tokenizer, document_tokenizer
from coat_jax.training.data import chat

tokenizers = pytest.importorskip("tokenizers")


@given(st.lists(st.text(alphabet="aé漢😀\n\x7f"), max_size=4))
def test_bytes_are_utf8(texts):
    assert [bytes(one.tolist()).decode() for one in Bytes().encode_documents(texts)] == texts


def test_tokens_are_those_of_the_library_and_special_ones_are_not_spelled_out(tmp_path):
    """Truncation in the file is not obeyed."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    texts = ["the thing that they", "", "héllo\n\nworld"]
    expected = [tokenizers.Tokenizer.from_file(str(path)).encode(text).ids for text in texts]
    truncation = {"direction": "Right", "strategy": "LongestFirst", "stride": 0, "max_length": 2}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": truncation}))
    encoder = Tokenizer(path)
    assert [one.tolist() for one in encoder.encode_documents(texts)] == expected
    assert encoder.dtype == np.uint16
    assert encoder.vocab <= 300
    (spelled,) = encoder.encode_documents(["<|endoftext|>"])
    assert encoder.end_of_text not in spelled
    assert encoder.encode_markers("<|endoftext|>").tolist() == [encoder.end_of_text]


def test_a_token_that_was_added_cannot_be_spelled_out_either(tmp_path):
    """Only if it ends documents, or is a marker of the template: others may be ordinary words."""
    path = write_tokenizer(tmp_path / "tokenizer.json", special=("<pad>",))
    library = tokenizers.Tokenizer.from_file(str(path))
    library.add_tokens(["<|endoftext|>", "<|user|>", "<|tool|>", "<", "{"])
    library.save(str(path))
    encoder = Tokenizer(path, template=chat.spelling("<|{role}|>\n{content}{end}\n"))
    (found,) = encoder.encode_documents(["<|endoftext|><|user|><|tool|>"])
    ids = [library.token_to_id(word) for word in ("<|endoftext|>", "<|user|>", "<|tool|>")]
    assert [word in found for word in ids] == [False, False, True]
    assert encoder.encode_markers("<|endoftext|><|user|>").tolist() == ids[:2]
    (found,) = encoder.encode_documents(["<{"])
    assert found.tolist() == [library.token_to_id("<"), library.token_to_id("{")]


@pytest.mark.parametrize("kind", SPACED)
def test_only_the_first_part_of_a_document_gets_a_space_in_front(kind, tmp_path):
    path = write_spaced_tokenizer(tmp_path / "tokenizer.json", kind)
    parts = ["they thought", "then", " the thing", "\n- that", "", "ê漢"]
    continued = [part > 0 for part in range(len(parts))]
    found = Tokenizer(path).encode_documents(parts, continued)
    library = tokenizers.Tokenizer.from_file(str(path))
    tokens = np.concatenate(found).tolist()
    assert library.decode(tokens, skip_special_tokens=False) == "".join(parts)
    assert found[0].tolist() == library.encode(parts[0]).ids
    assert found[4].size == 0


def unigram(path, letters, *splits):
    """A tokenizer of single letters, in words, which joins unknown characters."""
    pieces = [("<unk>", 0.0), *((letter, -3.0) for letter in letters)]
    library = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(list(splits))
    library.add_special_tokens(["</s>"])
    library.save(str(path))
    return library


def test_nothing_at_the_beginning_of_a_part_is_lost(tmp_path):
    """A space in front, where white space is dropped: it divides the words of two parts.

    Nor characters that the tokenizer does not know.
    """
    path, splits = tmp_path / "tokenizer.json", tokenizers.pre_tokenizers
    library = unigram(path, "▁abcdef", splits.WhitespaceSplit(), splits.Metaspace())
    found = Tokenizer(path).encode_documents(["ab cd\n", "ef"], [False, True])
    whole = library.encode("ab cd\nef", add_special_tokens=False).ids
    assert np.concatenate(found).tolist() == whole
    assert [library.id_to_token(token) for token in found[1]] == ["▁", "e", "f"]
    library = unigram(path, "▁ab", splits.Metaspace())
    for text, expected in (("漢", ["<unk>"]), ("漢ab", ["<unk>", "a", "b"]), ("ab", ["a", "b"])):
        (found,) = Tokenizer(path).encode_documents([text], [True])
        assert [library.id_to_token(token) for token in found] == expected


def test_bytes_refuse_the_character_that_ends_documents():
    with pytest.raises(UserError, match=r"NUL, which ends documents .*'a\\x00b': .*to 255"):
        Bytes().encode_documents(["fine", "a\0b"])
    assert Bytes(255).encode_documents(["a\0b"])[0].tolist() == [97, 0, 98]


def test_the_end_of_text_is_that_of_the_tokenizer_or_the_one_given(tmp_path):
    path = write_tokenizer(tmp_path / "a.json", special=("<pad>", "</s>"))
    assert document_tokenizer(path).end_of_text == 1
    assert document_tokenizer(path, 5).end_of_text == 5
    for file in (path, None):
        with pytest.raises(ValueError, match="end_of_text=999 is not in the tokenizer's vocab"):
            document_tokenizer(file, 999)
    unknown = write_tokenizer(tmp_path / "b.json", special=("<pad>",))
    with pytest.raises(ValueError, match=r"b.json has none of .* set end_of_text"):
        document_tokenizer(unknown)
