"""Text in pieces is the whole text, whatever its characters and however it is cut into tokens."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_jax.errors import UserError
from coat_jax.tokenizers import Bytes, Tokenizer, document_tokenizer

tokenizers = pytest.importorskip("tokenizers")
TEXTS = ["Żółć, 🙂🙃 — ok\n", "naïve  café: 日本語 テスト", "a👩‍👩‍👧b", " leading", "x", "e\u0301"]
SPECIAL = ["<s>", "</s>", "<unk>"]


def byte_level():
    """As GPT-2, Llama 3 and Qwen have it: a token is some bytes, perhaps not whole characters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat 日本語 日本語"] * 3, trainer)
    return tokenizer


def byte_fallback():
    """As Llama 2 and Mistral have it: words begin with a mark, rare characters become bytes."""
    words = ["▁the", "▁cat", "▁", "a", "b", "c", "t", "s", "h", "e"]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: number for number, name in enumerate(names)}
    model = tokenizers.models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(path))
    return path


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


@settings(max_examples=30)
@given(st.lists(st.integers(3, 258), min_size=1, max_size=30))
def test_tokens_that_make_no_characters_are_read_to_the_end(tmp_path_factory, tokens):
    """Not with byte fallback: there one bad byte spoils good ones before it, which were said."""
    path = tmp_path_factory.getbasetemp() / "byte_level.json"
    if not path.exists():
        byte_level().save(str(path))
    tokenizer, whole = Tokenizer(path), tokenizers.Tokenizer.from_file(str(path))
    pieces = in_pieces(tokenizer.reader([]), tokens, [1] * len(tokens))
    assert "".join(pieces) == whole.decode(tokens)


def test_no_piece_ends_in_half_a_character(path):
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode("日本語 テスト 🙂")
    reader = tokenizer.reader([])
    pieces = [reader.read([token]) for token in tokens]
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 5


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
def test_a_prompt_gets_what_comes_first_and_not_what_would_end_it(single, begin, tmp_path):
    """Nor twice what it spells out itself, as the templates of chats do, of Llama 3 and Mistral."""
    special = [("<s>", 0), ("</s>", 1), ("<unk>", 2)]
    made = byte_level()
    made.post_processor = tokenizers.processors.TemplateProcessing(single, special_tokens=special)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    the = Tokenizer(tmp_path / "tokenizer.json", begin=False).encode("the")
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
