"""Laws of sources: what a config names is what is read, and what is held out is not trained on."""

import hashlib

import numpy as np
import pytest
from data_cases import write_lines, write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.errors import UserError
from coat_jax.training.data import DataConfig, corpus, load
from coat_jax.training.data.tokenizer import Tokenizer
from coat_jax.training.data.tokenizing import write

END = 999


def opened(config, split="train", **changes):
    settings = {"batch": 1, "sequence": 8, "vocab": 1000, "epochs": 1}
    return load(config, split=split, **settings | changes)


def tokens_of(loader):
    """What the loader reads in an epoch, as a set: the tests' tokens are all different."""
    return {int(t) for batch in loader for t in batch.tokens[batch.segments > 0]}


def test_the_corpus_is_the_standard_library(tmp_path):
    for number in range(40):
        (tmp_path / f"{number:02}.py").write_text(f"x = {number}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("y")
    found = corpus.load(root=tmp_path)
    assert bytes(found.held_out) == b"x = 19\nx = 39\n"
    assert bytes(found.train).count(b"x = ") == 38
    assert b"y" not in bytes(found.train)
    both = bytes(found.train) + bytes(found.held_out)
    assert found.digest == hashlib.sha256(both).hexdigest()[:16]
    with pytest.raises(FileNotFoundError, match="needs 20"):
        corpus.load(root=tmp_path / "test")


def test_the_corpus_is_there_without_a_word():
    train, held_out = (opened(DataConfig(), split, sequence=256) for split in ("train", "held_out"))
    assert train.tokens > held_out.tokens > 10_000
    assert not train.packed
    assert next(train).tokens.max() < 256


@given(st.integers(100, 900), st.floats(0.05, 0.5), st.lists(st.integers(0, 899), max_size=30))
def test_what_is_held_out_is_the_end_and_is_not_trained_on(tmp_path_factory, size, part, ends):
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(size, dtype=np.uint16)
    tokens[[end for end in ends if end < size]] = END
    for number, shard in enumerate(np.array_split(tokens, 3)):
        np.save(folder / f"{number}.npy", shard)
    for end_of_text in (None, END):
        config = DataConfig(
            train=(str(folder / "*.npy"),), held_out_part=part, end_of_text=end_of_text
        )
        cut = size - round(part * size)
        if end_of_text is not None:
            ends = np.flatnonzero(tokens[cut:-1] == END)
            cut += ends[0] + 1 if len(ends) else 0
        train = opened(config)
        assert train.tokens == cut
        assert tokens_of(train) == set(tokens[: cut - 1].tolist())
        if size - cut > 8:
            held_out = opened(config, "held_out")
            assert tokens_of(held_out) == set(tokens[cut:-1].tolist())


def test_held_out_paths_leave_the_training_data_whole(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    np.save(tmp_path / "b.npy", np.arange(100, 150, dtype=np.uint16))
    config = DataConfig(train=(str(tmp_path / "a.npy"),), held_out=(str(tmp_path / "b.npy"),))
    assert tokens_of(opened(config)) == set(range(99))
    assert tokens_of(opened(config, "held_out")) == set(range(100, 149))


def test_a_file_cannot_be_trained_on_and_held_out(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint16))
    config = DataConfig(train=(str(tmp_path / "*.npy"),), held_out=(str(tmp_path / "a.npy"),))
    with pytest.raises(ValueError, match=r"a.npy is named in data.train and in data.held_out"):
        opened(config)


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name * 4)
    config = DataConfig(train=(str(tmp_path / "**" / "*.txt"),), held_out_part=0.05)
    batch = next(opened(config, sequence=13, vocab=256))
    assert bytes(batch.tokens[0].tolist()) == b"aaaa\0bbbb\0ccc"


def test_text_and_its_token_files_are_the_same_rows(tmp_path):
    texts = [{"text": f"the thing number {number}"} for number in range(40)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    write([path], tmp_path / "out", Tokenizer(tokenizer))
    direct = DataConfig(train=(str(path),), tokenizer=tokenizer, held_out_part=0.1)
    made = DataConfig(train=(str(tmp_path / "out" / "*.npy"),), held_out_part=0.1)
    for split in ("train", "held_out"):
        one, other = opened(direct, split, vocab=300), opened(made, split, vocab=300)
        assert one.digest == other.digest
        assert one.packed
        for a, b in zip(one, other, strict=True):
            assert all(map(np.array_equal, a, b))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": "the thing"}] * 9)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json has a vocabulary of \d+, .* one of 256"):
        opened(DataConfig(train=(str(path),), tokenizer=tokenizer), vocab=256)
    write([path], tmp_path / "out", Tokenizer(tokenizer))
    with pytest.raises(ValueError, match=r"out has a vocabulary of \d+, .* one of 256"):
        opened(DataConfig(train=(str(tmp_path / "out" / "*.npy"),)), vocab=256)
    with pytest.raises(ValueError, match="Text as bytes has a vocabulary of 256"):
        opened(DataConfig(train=(str(path),)), vocab=255)


@pytest.mark.parametrize(
    ("train", "error", "named"),
    [
        (("none.npy",), FileNotFoundError, "There is no file .*none.npy"),
        (("*.none",), FileNotFoundError, r"No file matches .*\*\.none"),
        (("folder",), UserError, r"Name its files by a pattern, as in '.*folder/\*.npy'"),
        (("a.npy", "a.txt"), ValueError, "a.npy holds tokens, and .*a.txt text"),
    ],
)
def test_paths_that_name_no_data_are_refused(train, error, named, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.txt").write_text("text")
    np.save(tmp_path / "a.npy", np.arange(9, dtype=np.uint16))
    with pytest.raises(error, match=named):
        opened(DataConfig(train=tuple(str(tmp_path / name) for name in train)))


def test_the_corpus_does_not_mix(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="mixes the built-in corpus with files"):
        opened(DataConfig(train=("corpus", str(tmp_path / "a.txt"))))


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"train": ()}, "names no data"),
        ({"train": "corpus"}, r"data.train='corpus' must be a tuple of texts, as in \('a', 'b'\)"),
        ({"held_out": ("",)}, "data.held_out has an empty path"),
        ({"kind": "image"}, "kind='image' must be 'text' or 'chat'"),
        ({"dtype": "int64"}, "dtype='int64' must be 'uint16' or 'uint32' or None"),
        ({"held_out_part": 1.0}, "held_out_part=1.0 must be"),
        ({"end_of_text": -1}, "end_of_text=-1 must be"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(field, named):
    with pytest.raises(ValueError, match=named):
        DataConfig(**field)
