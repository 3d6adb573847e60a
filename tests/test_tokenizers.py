"""Text in pieces is the whole text, whatever its characters and however it is cut into tokens."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
import tokenizers
from tokenizer_cases import SPACED, SPECIAL, write_spaced_tokenizer, write_tokenizer

from coat_jax.errors import UserError
from coat_jax.tokenizers import Bytes, Tokenizer, document_tokenizer
from coat_jax.training.data import chat

TEXTS = ["Żółć, 🙂🙃 — ok\n", "naïve  café: 日本語 テスト", "a👩‍👩‍👧b", " leading", "x", "e\u0301"]


def save(library, path):
    library.save(str(path))
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("a") / "tokenizer.json", special=SPECIAL)


@pytest.fixture(scope="module", params=["byte_level", "prepend"])
def path(request, byte_level, tmp_path_factory):
    if request.param == "byte_level":
        return byte_level
    return write_spaced_tokenizer(tmp_path_factory.mktemp("b") / "tokenizer.json", "prepend")


def in_pieces(reader, tokens, cuts):
    """The text of tokens that come a few at a time."""
    parts, rest = [], list(tokens)
    for cut in cuts:
        parts.append(reader.read(rest[:cut]))
        rest = rest[cut:]
    return [*parts, reader.read(rest), reader.end()]


# --- Bytes -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 255), max_size=40), st.lists(st.integers(0, 5), max_size=8))
def test_bytes_are_read_as_python_reads_them_all(tokens, cuts):
    pieces = in_pieces(Bytes().reader([]), tokens, cuts)
    assert "".join(pieces) == bytes(tokens).decode("utf-8", "replace")


def test_bytes_are_those_of_the_text_even_if_no_terminal_understood_them():
    assert bytes(Bytes().encode("é🙂")).decode() == "é🙂"
    assert Bytes().encode(b"a\xff\xfe".decode("utf-8", "surrogateescape")) == [97, 255, 254]


def test_a_character_is_said_when_it_is_whole_and_a_token_that_is_no_byte_is_no_text():
    reader = Bytes().reader([])
    assert [reader.read([byte]) for byte in "é🙂x".encode()] == ["", "é", "", "", "", "🙂", "x"]
    assert reader.read([0xF0, 0x9F]) == ""
    assert reader.end() == "\N{REPLACEMENT CHARACTER}"
    assert Bytes().reader([]).read([97, 300, 98]) == "a\N{REPLACEMENT CHARACTER}b"


# --- Tokens to text --------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_in_pieces_are_the_text_of_all_tokens(path, text):
    tokenizer, whole = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    prompt, tokens = tokenizer.encode("the cat"), whole.encode(text, add_special_tokens=False).ids
    for cut in (1, 3):
        pieces = in_pieces(tokenizer.reader(prompt), tokens, [cut] * len(tokens))
        assert "".join(pieces) == whole.decode(prompt + tokens)[len(whole.decode(prompt)) :]
        assert "".join(pieces).strip() == text.strip()
        assert len([*filter(None, pieces)]) > len(text) / 4
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_a_space_between_prompt_and_text_is_kept_and_special_tokens_are_not_said(path):
    tokenizer = Tokenizer(path)
    prompt = tokenizer.encode("the")
    after = [*tokenizer.encode("the cat")[len(prompt) :], tokenizer.token("</s>")]
    assert "".join(in_pieces(tokenizer.reader(prompt), after, [])) == " cat"


# --- Prompts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("single", "begin"),
    [("<s> $A", [0]), ("$A </s>", []), ("<s> $A </s>", [0]), ("<s> <unk> $A </s> </s>", [0, 2])],
)
def test_a_prompt_gets_what_comes_first_and_not_what_would_end_it(
    single, begin, byte_level, tmp_path
):
    """Nor twice what it spells out itself, as the templates of chats do, of Llama 3 and Mistral."""
    special = [("<s>", 0), ("</s>", 1), ("<unk>", 2)]
    made = tokenizers.Tokenizer.from_file(str(byte_level))
    made.post_processor = tokenizers.processors.TemplateProcessing(single, special_tokens=special)
    file = save(made, tmp_path / "tokenizer.json")
    tokenizer, the = Tokenizer(file), Tokenizer(file, begin=False).encode("the")
    assert not set(the) & {0, 1, 2}
    assert tokenizer.beginning == begin
    assert tokenizer.encode("") == begin
    assert tokenizer.encode("the") == [*begin, *the]
    assert tokenizer.encode("the</s>") == [*begin, *the, 1]
    assert tokenizer.encode("</s>") == [*begin, 1]
    spelled = "".join(SPECIAL[token] for token in begin)
    assert tokenizer.encode(f"{spelled}the") == [*begin, *the]
    assert tokenizer.encode("the<s>") == [*begin, *the, 0]


def words_with_an_end(*added, unknown=None):
    words = tokenizers.models.WordLevel({"foo": 0, "</s>": 1}, unknown or "missing")
    words = tokenizers.Tokenizer(words)
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(list(added))
    return words


def test_a_vocabulary_of_words_without_one_for_unknown_words_reads_prompts(tmp_path):
    words_with_an_end().save(str(tmp_path / "words.json"))
    tokenizer = Tokenizer(tmp_path / "words.json")
    assert tokenizer.beginning == []
    assert list(tokenizer.encode("foo </s>")) == [0, 1]


@pytest.mark.parametrize("added", [[], ["</s>"]])
def test_an_end_that_documents_can_spell_out_must_be_chosen(tmp_path, path, added):
    file = tmp_path / "words.json"
    words_with_an_end(*added, unknown="foo").save(str(file))
    with pytest.raises(UserError, match="encodes </s> in a text as the token that ends documents"):
        document_tokenizer(file)
    assert document_tokenizer(file, 1).end_of_text == 1
    assert document_tokenizer(path).end_of_text == 1


def test_a_token_is_found_by_how_it_is_written(path):
    tokenizer = Tokenizer(path)
    assert tokenizer.token("</s>") == tokenizer.end_of_text == 1
    assert tokenizer.token("a") == json.loads(path.read_text())["model"]["vocab"]["a"]
    with pytest.raises(
        ValueError, match=r"'a b c' is not one token: the tokenizer encodes it as \["
    ):
        tokenizer.token("a b c")
    assert Bytes().token("\n") == 10
    with pytest.raises(ValueError, match="'ab' is not a token: tokens are bytes, and it has 2"):
        Bytes().token("ab")


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer file .*missing\.json"):
        Tokenizer(tmp_path / "missing.json")
    with pytest.raises(UserError, match="is a folder: name the tokenizer file itself"):
        Tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"config\.json is not a file of the `tokenizers` library"):
        Tokenizer(tmp_path / "config.json")


# --- Documents -------------------------------------------------------------------------------


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
    encoder = Tokenizer(save(library, path), template=chat.spelling("<|{role}|>\n{content}{end}\n"))
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
    tokenizer = Tokenizer(path)
    found = tokenizer.encode_documents(parts[:1])
    found += tokenizer.encode_documents(parts[1:], continued=True)
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
    tokenizer = Tokenizer(path)
    found = tokenizer.encode_documents(["ab cd\n"])
    found += tokenizer.encode_documents(["ef"], continued=True)
    whole = library.encode("ab cd\nef", add_special_tokens=False).ids
    assert np.concatenate(found).tolist() == whole
    assert [library.id_to_token(token) for token in found[1]] == ["▁", "e", "f"]
    library = unigram(path, "▁ab", splits.Metaspace())
    for text, expected in (("漢", ["<unk>"]), ("漢ab", ["<unk>", "a", "b"]), ("ab", ["a", "b"])):
        (found,) = Tokenizer(path).encode_documents([text], continued=True)
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
        with pytest.raises(ValueError, match="end_of_text=999 must be"):
            document_tokenizer(file, 999)
    unknown = write_tokenizer(tmp_path / "b.json", special=("<pad>",))
    with pytest.raises(ValueError, match=r"end_of_text=None must be .* none of"):
        document_tokenizer(unknown)
