"""Laws of tokenizing: what is written does not depend on how the work is divided."""

import codecs
import json

import numpy as np
import pytest
from data_cases import write_lines
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import SPACED, write_spaced_tokenizer, write_tokenizer

from coat_jax.errors import UserError
from coat_jax.tokenizers import Bytes, Tokenizer
from coat_jax.training.data import tokenizing
from coat_jax.training.data.tokenizing import in_memory, pieces, write

TEXT = "".join(f"line {number} of the thing\n" for number in range(400))


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text("")
    records = [{"text": TEXT[: number * 37]} for number in range(50)]  # the first one is empty
    return [
        tmp_path / "a.txt",
        tmp_path / "empty.txt",
        write_lines(tmp_path / "b.jsonl", records),
    ]


@pytest.mark.parametrize("piece", [100, 1 << 20])
def test_documents_follow_each_other_each_with_its_end(paths, piece, monkeypatch):
    monkeypatch.setattr(tokenizing, "PIECE", piece)
    expected = [TEXT, *(TEXT[: number * 37] for number in range(1, 50))]
    assert bytes(in_memory(paths, Bytes()).tolist()).decode() == "".join(t + "\0" for t in expected)


@given(
    st.text(alphabet="ab\n\r", max_size=60), st.integers(1, 9), st.sampled_from(["txt", "jsonl"])
)
def test_pieces_join_to_the_text(tmp_path_factory, text, size, kind):
    path = tmp_path_factory.mktemp("pieces") / f"a.{kind}"
    path.write_bytes(text.encode() if kind == "txt" else json.dumps({"text": text}).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizing, "PIECE", size)
        found = list(pieces([path]))
    assert "".join(piece.text for piece in found) == text
    assert [piece.last for piece in found] == [False] * (len(found) - 1) + [True] * bool(found)
    assert sum(piece.size for piece in found) == (path.stat().st_size if text else 0)


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name, content in (("a.txt", "a\ufeffb"), ("a.jsonl", json.dumps({"text": "a\ufeffb"}))):
        (tmp_path / name).write_bytes(codecs.BOM_UTF8 + content.encode())
        assert [piece.text for piece in pieces([tmp_path / name])] == ["a\ufeffb"]


@pytest.mark.parametrize("kind", SPACED)
def test_a_long_text_gets_no_space_between_its_pieces(kind, paths, tmp_path, monkeypatch):
    import tokenizers

    file = write_spaced_tokenizer(tmp_path / "tokenizer.json", kind)
    monkeypatch.setattr(tokenizing, "PIECE", 100)
    found = in_memory(paths[:1], Tokenizer(file)).tolist()
    parts = list(pieces(paths[:1]))
    assert len(parts) > 50
    assert all(part.text.endswith("\n") for part in parts)
    library = tokenizers.Tokenizer.from_file(str(file))
    assert library.decode(found, skip_special_tokens=False) == TEXT + "</s>"


def test_the_files_hold_what_is_in_memory_however_the_work_is_divided(paths, tmp_path, monkeypatch):
    encoder = Tokenizer(write_tokenizer(tmp_path / "tokenizer.json"))
    expected = in_memory(paths, encoder)
    monkeypatch.setattr(tokenizing, "PIECE", 100)
    monkeypatch.setattr(tokenizing, "SHARD", 1000)
    for together, ahead in [(1, 1), (1000, 3), (1 << 20, 2)]:
        monkeypatch.setattr(tokenizing, "TOGETHER", together)
        monkeypatch.setattr(tokenizing, "AHEAD", ahead)
        out = tmp_path / f"out_{together}"
        write(paths, out, encoder)
        found = [np.load(path) for path in sorted(out.glob("*.npy"))]
        assert np.array_equal(np.concatenate(found), expected)
        assert all(part[-1] == encoder.end_of_text for part in found)
    assert len(list((tmp_path / "out_1").glob("*.npy"))) > 5


def test_notes_say_what_was_written(paths, tmp_path):
    """A large vocabulary takes uint32."""
    path = write_tokenizer(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far"] = 1 << 16
    path.write_text(json.dumps(content))
    large = {"vocab": (1 << 16) + 1, "dtype": "uint32", "tokenizer": Tokenizer(path).digest}
    small = {"vocab": 256, "dtype": "uint16", "tokenizer": "bytes"}
    for name, tokenizer, of_tokenizer in (("a", Bytes(), small), ("b", Tokenizer(path), large)):
        notes = write(paths, tmp_path / name, tokenizer)
        assert json.loads((tmp_path / name / "tokens.json").read_text()) == notes
        tokens = np.load(tmp_path / name / "00000.npy")
        assert tokens.dtype == of_tokenizer["dtype"]
        counts = {"documents": 50, "tokens": len(tokens), "files": [len(tokens)]}
        assert notes == of_tokenizer | counts | {"end_of_text": 0}


def test_nothing_is_left_of_a_run_that_fails_and_nothing_is_overwritten(paths, tmp_path):
    def stop(part):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(paths, tmp_path / "out", Bytes(), progress=stop)
    assert not list(tmp_path.glob("out*"))
    write(paths, tmp_path / "out", Bytes())
    with pytest.raises(UserError, match="out exists already"):
        write(paths, tmp_path / "out", Bytes())
    (tmp_path / "new.unfinished").mkdir()
    with pytest.raises(UserError, match="another `coat tokenize` is writing it"):
        write(paths, tmp_path / "new", Bytes())


def test_no_text_and_too_much_text_are_refused(paths, tmp_path, monkeypatch):
    other = tmp_path / "other.txt"
    other.touch()
    for empty, named in ((paths[1:2], r"empty\.txt\."), ([paths[1], other], "and 1 other file")):
        with pytest.raises(ValueError, match=f"There is no text in .*{named}"):
            write(empty, tmp_path / "out", Bytes())
    assert not list(tmp_path.glob("out*"))
    monkeypatch.setattr(tokenizing, "IN_MEMORY", 1 << 10)
    message = r"a.txt and 2 other files have 0 MiB, .* up to 0 when it begins. Run `coat tokenize`"
    with pytest.raises(ValueError, match=message):
        in_memory(paths, Bytes())


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b'{"text": ', "is not JSON: Expecting value: line 1 column 9"),
        (b'"text"', "is not a JSON object, but str"),
        (b'{"content": "x"}', r'has no "text" that is a string; its keys are \[\'content\'\]'),
        (b'{"messages": []}', 'has no "text" .* For conversations, set --data.kind chat'),
        (b'{"text": "a\\u0000b"}', r"A text has the character NUL.*'a\\x00b'"),
        (rb'{"text": "\ud83d"}', r"is not JSON: .*'\\ud83d'.*surrogates not allowed"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(line, named, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"a.jsonl:3:? {named}"):
        in_memory([tmp_path / "a.jsonl"], Bytes())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (b"caf\xe9", r"b.txt:401 is not text in UTF-8: unexpected end of data"),
        (b"caf\0", r"b.txt: A text has the character NUL.*'.*caf\\x00'"),
    ],
)
def test_a_text_that_is_none_is_refused_with_its_place_among_many(wrong, named, paths, monkeypatch):
    monkeypatch.setattr(tokenizing, "PIECE", 100)
    (paths[0].parent / "b.txt").write_bytes(TEXT.encode() + wrong)
    with pytest.raises(UserError, match=named):
        in_memory([*paths, paths[0].parent / "b.txt"], Bytes())
