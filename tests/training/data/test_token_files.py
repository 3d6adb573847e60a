"""Laws of token files: every layout holds the same tokens, and what is not tokens is refused."""

import itertools

import numpy as np
import pytest
from data_cases import config_of, loader_of
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.errors import UserError
from coat_jax.manifest import DamagedCheckpoint
from coat_jax.tokenizers import Bytes
from coat_jax.training.data import rows, token_files, tokenizing
from coat_jax.training.data.rows import Stream
from coat_jax.training.data.token_files import open_files, read_notes

TOKENS = np.arange(5000) * 7 % 4999


def npy(path, dtype):
    np.save(path.with_suffix(".npy"), TOKENS.astype(dtype))
    return path.with_suffix(".npy")


def npy_without_header(path, dtype):
    TOKENS.astype(dtype).tofile(path.with_suffix(".npy"))
    return path.with_suffix(".npy")


def raw(path, dtype):
    TOKENS.astype(dtype).tofile(path.with_suffix(".bin"))
    return path.with_suffix(".bin")


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("layout", [npy, npy_without_header, raw])
def test_every_layout_holds_the_same_tokens(layout, dtype, tmp_path):
    asked = None if layout is npy else dtype
    (file,) = open_files([layout(tmp_path / "tokens", dtype)], dtype=asked).values()
    assert len(file) == len(TOKENS)
    read = file[10:4000]
    assert read.dtype == dtype
    assert np.array_equal(read, TOKENS[10:4000])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.data())
def test_parts_are_read_as_one(lengths, data):
    edges = np.cumsum([0, *lengths]).tolist()
    parts = [TOKENS[start:stop].astype(np.uint16) for start, stop in itertools.pairwise(edges)]
    start = data.draw(st.integers(0, edges[-1] - 1))
    stop = data.draw(st.integers(start + 1, edges[-1]))
    read = Stream(dict(enumerate(parts)), 5000).read(start, stop)
    assert np.array_equal(read, TOKENS[start:stop])


def test_a_file_is_not_loaded(tmp_path):
    """A row of a file that is larger than any memory (and empty on disk)."""
    with (tmp_path / "large.bin").open("wb") as file:
        file.truncate(1 << 36)
    loader = loader_of(config_of(tmp_path / "large.bin"), vocab=1)
    assert len(loader.rows) > 1 << 31
    assert next(loader).tokens.tolist() == [[0] * 8]
    loader.close()


def test_a_token_outside_the_vocabulary_is_named(tmp_path, monkeypatch):
    """When the data are loader_of; or in a batch, if no sample had it."""
    for number, bad in enumerate([99, 100]):
        np.save(tmp_path / f"{number}.npy", np.array([*range(50), bad, 1, 2], np.uint16))
    with pytest.raises(ValueError, match=r"1.npy: token 50 is 100, .* vocabulary of 100"):
        loader_of(config_of(tmp_path / "*.npy"), vocab=100)
    monkeypatch.setattr(rows, "SAMPLES", 1)
    monkeypatch.setattr(rows, "SAMPLE", 8)
    np.save(tmp_path / "a.npy", np.array([1] * 60 + [300] + [1] * 39, np.uint16))
    loader = loader_of(config_of(tmp_path / "a.npy", held_out_part=0.2), batch=10, vocab=256)
    with pytest.raises(ValueError, match=r"a.npy: token 60 is 300"):
        next(loader)
    loader.close()


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.ones(9, np.float32), r"float32\[9\]"),
        (np.ones(9, np.int64), r"int64\[9\]"),
        (np.ones(9, ">u2"), "uint16 or uint32 of this machine's byte order"),
        (np.ones((3, 3), np.uint16), r"uint16\[3, 3\]"),
        (np.array([{}]), "Python objects"),
    ],
)
def test_an_array_that_is_not_tokens_is_refused(array, named, tmp_path):
    np.save(tmp_path / "wrong.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"wrong.npy.* {named}"):
        open_files([tmp_path / "wrong.npy"], dtype=None)


@pytest.mark.parametrize("shape", ["(4611686018427387904,)", "(-1,)", "(9,)", "(" * 99])
def test_a_header_that_is_not_true_is_refused(shape, tmp_path):
    """NumPy parses it as Python, and believes it."""
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    (tmp_path / "wrong.npy").write_bytes(start + bytes(16))
    with pytest.raises(UserError, match=r"wrong.npy is not a complete .npy file of tokens"):
        open_files([tmp_path / "wrong.npy"], dtype=None)


def test_files_that_are_not_what_they_should_be_are_refused(tmp_path):
    """Not copied whole, half a token, of another dtype than is said."""
    cut = npy(tmp_path / "cut", "uint16")
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut.npy is not a complete"):
        open_files([cut], dtype=None)
    for name, size in (("odd.bin", 3), ("empty.bin", 0)):
        (tmp_path / name).write_bytes(b"1" * size)
        with pytest.raises(UserError, match=f"{name} has {size} bytes, not uint16 tokens"):
            open_files([tmp_path / name], dtype=None)
    with pytest.raises(ValueError, match=r"does not look like uint16.* Set data.dtype to uint32"):
        open_files([raw(tmp_path / "a", "uint32")], dtype=None)
    with pytest.raises(ValueError, match=r"token 0 is [\d,]+, .* of another dtype"):
        loader_of(config_of(raw(tmp_path / "a", "uint16"), dtype="uint32"), vocab=50304)


def folder_with(folder, notes):
    folder.mkdir()
    (folder / "tokens.json").write_text(notes)
    return npy(folder / "a", "uint16")


NOTES = '{"vocab": 9, "end_of_text": 3, "tokenizer": "x"}'


def test_notes_beside_files_are_read_and_must_name_one_tokenizer(tmp_path):
    one = folder_with(tmp_path / "a", NOTES)
    assert read_notes([one]) == {"vocab": 9, "end_of_text": 3, "tokenizer": "x"}
    other = folder_with(tmp_path / "b", NOTES.replace('"x"', '"y"'))
    with pytest.raises(ValueError, match="different tokenizers"):
        read_notes([one, other])


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ("{", "is not JSON"),
        ('{"vocab": 9}', "end_of_text=None must be a whole number from 0"),
        (NOTES.replace("9", "1e999"), "vocab=inf must be a whole number from 1"),
    ],
)
def test_damaged_notes_are_refused(notes, message, tmp_path):
    with pytest.raises(UserError, match=rf"tokens.json:? {message}"):
        read_notes([folder_with(tmp_path / "a", notes)])


@pytest.mark.parametrize("name", ["00000.npy", "tokens.json"])
def test_a_flipped_bit_in_files_of_ours_is_found(name, tmp_path, monkeypatch):
    """Of many files, which would take minutes, only the header and the size are checked."""
    (tmp_path / "a.txt").write_text("the thing\n" * 50)
    tokenizing.write([tmp_path / "a.txt"], tmp_path / "out", Bytes())
    content = bytearray((tmp_path / "out" / name).read_bytes())
    content[content.index(b"2") if name == "tokens.json" else -3] ^= 1
    (tmp_path / "out" / name).write_bytes(content)
    files = config_of(tmp_path / "out" / "*.npy")
    with pytest.raises(DamagedCheckpoint, match=rf"out is damaged: .* {name} is wrong\. .* delete"):
        loader_of(files)
    if name != "tokens.json":
        monkeypatch.setattr(token_files, "CHECKED", 100)
        loader_of(files)
    (tmp_path / "out" / "manifest.json").unlink()
    loader_of(files)
