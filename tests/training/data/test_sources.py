"""Laws of sources: what a config names is what is read; what is held out is not trained on."""

import os

import numpy as np
import pytest
from data_cases import config_of, loader_of, same, write_lines
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_cases import write_tokenizer

from coat_jax.errors import UserError
from coat_jax.tokenizers import Tokenizer
from coat_jax.training.data import DataConfig, corpus, rows_of
from coat_jax.training.data.tokenizing import write

END = 999


def tokens_of(loader):
    """What the loader reads in an epoch, as a set: the tests' tokens are all different."""
    found = set()
    for batch in loader:
        real = batch.labels >= 0 if batch.segments is None else batch.segments > 0
        found |= set(batch.tokens[real].tolist())
    return found


def count_of(config, split="train"):
    """The number of tokens in a split."""
    return rows_of(config, split=split, sequence=8, vocab=1000).tokens


def test_the_corpus_is_the_standard_library(tmp_path, monkeypatch):
    for number in range(40):
        (tmp_path / f"{number:02}.py").write_text(f"x = {number}\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "left_out.py").write_text("y")
    monkeypatch.setattr("sysconfig.get_path", lambda _: tmp_path)
    found = corpus.load.__wrapped__()
    assert bytes(found.held_out) == b"x = 19\nx = 39\n"
    assert bytes(found.train).count(b"x = ") == 38
    assert b"y" not in bytes(found.train)


@given(st.integers(100, 900), st.floats(0.05, 0.5), st.lists(st.integers(0, 899), max_size=30))
def test_held_out_tokens_are_the_last_and_are_not_trained_on(tmp_path_factory, size, part, ends):
    folder = tmp_path_factory.mktemp("shards")
    tokens = np.arange(size, dtype=np.uint16)
    tokens[[end for end in ends if end < size]] = END
    for number, shard in enumerate(np.array_split(tokens, 3)):
        np.save(folder / f"{number}.npy", shard)
    for end_of_text in (None, END):
        config = config_of(folder / "*.npy", held_out_part=part, end_of_text=end_of_text)
        cut = size - round(part * size)
        if end_of_text is not None:
            begins = np.flatnonzero(tokens[:-1] == END) + 1
            later, last = begins[begins > cut], begins[-1:]
            if len(later):
                cut = later[0]
            elif len(last) and last[0] > size - size // 10:
                cut = last[0]
        assert count_of(config) == cut
        assert tokens_of(loader_of(config)) == set(tokens[: cut - 1].tolist())
        if size - cut > 8:
            held_out = loader_of(config, "held_out")
            assert tokens_of(held_out) == set(tokens[cut:-1].tolist())


def test_a_last_document_is_held_out_whole_unless_it_is_long(tmp_path):
    """The loss of its end would be of a text whose beginning was trained on."""
    for length, held_out in ((30, 30), (60, 10)):
        path = tmp_path / f"{length}.npy"
        tokens = np.arange(1, 401, dtype=np.uint16)
        tokens[-length - 1] = END
        np.save(path, tokens)
        config = config_of(path, held_out_part=0.025, end_of_text=END)
        assert count_of(config) == 400 - held_out
        assert tokens_of(loader_of(config, "held_out")) == set(range(401 - held_out, 400))


def shards(folder):
    """Token files, no token of which is in another."""
    folder.mkdir()
    for number, tokens in enumerate(np.split(np.arange(300, dtype=np.uint16), 3)):
        np.save(folder / f"{number}.npy", tokens)
    return folder


def assert_nothing_is_in_both(*patterns):
    config = config_of(*patterns, held_out_part=0.2)
    assert count_of(config) + count_of(config, "held_out") == 300
    train, held_out = (tokens_of(loader_of(config, split)) for split in ("train", "held_out"))
    assert train.isdisjoint(held_out)


def test_a_file_is_read_once_whatever_leads_to_it(tmp_path):
    """Twice in a stream, what is held out of it would be trained on as well."""
    folder = shards(tmp_path / "a")
    (tmp_path / "link").symlink_to(folder)
    (folder / "again.npy").symlink_to("2.npy")
    (folder / "hard.npy").hardlink_to(folder / "2.npy")
    assert_nothing_is_in_both(folder / "*.npy")
    assert_nothing_is_in_both(folder / "*.npy", folder / "2.npy", tmp_path / "link" / "2.npy")
    assert_nothing_is_in_both(tmp_path / "**" / "*.npy", folder / ".." / "a" / "2.npy")


def test_held_out_files_leave_the_training_data_whole_and_are_not_trained_on(tmp_path):
    """Whatever the name of a file that is in both; those of the corpus neither."""
    folder = shards(tmp_path / "a")
    config = config_of(folder / "[01].npy", held_out=(str(folder / "2.npy"),))
    assert tokens_of(loader_of(config)) == set(range(199))
    assert tokens_of(loader_of(config, "held_out")) == set(range(200, 299))
    (tmp_path / "soft.npy").symlink_to(folder / "2.npy")
    (tmp_path / "hard.npy").hardlink_to(folder / "2.npy")
    names = folder / "2.npy", tmp_path / "soft.npy", tmp_path / "hard.npy"
    train, held_out = corpus.files_of()
    for config in (
        *(config_of(folder / "*.npy", held_out=(str(path),)) for path in names),
        config_of(held_out[0], held_out=("corpus",)),
        config_of("corpus", held_out=(str(train[0]),)),
    ):
        with pytest.raises(UserError, match=r"is named in data.train and in data.held_out"):
            loader_of(config)


def test_pipes_devices_and_links_to_nothing_are_refused(tmp_path):
    for name in ("pipe.text", "pipe.npy"):
        os.mkfifo(tmp_path / name)
        for path in (tmp_path / name, tmp_path / "pipe.*", "/dev/zero"):
            with pytest.raises(UserError, match="is a pipe or a device: a file must be a regular"):
                loader_of(config_of(path))
    (tmp_path / "b.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"b.txt is a link to nowhere"):
        loader_of(config_of(tmp_path / "*.txt"))


def test_suffixes_are_read_in_any_case(tmp_path):
    tokens = np.arange(200, dtype=np.uint16)
    with (tmp_path / "a.NPY").open("wb") as file:
        np.save(file, tokens)
    tokens.tofile(tmp_path / "a.Bin")
    for name in ("a.NPY", "a.Bin"):
        assert tokens_of(loader_of(config_of(tmp_path / name))) == set(range(197))
    path = write_lines(tmp_path / "a.JSONL", [{"text": "the thing"}] * 20)
    train = loader_of(config_of(path, held_out_part=0.3), vocab=256)
    assert tokens_of(train) == set(b"the thing\0")


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_text(name * 4)
    config = config_of(tmp_path / "**" / "*.txt", held_out_part=0.05)
    batch = next(loader_of(config, sequence=13, vocab=256))
    assert bytes(batch.tokens[0].tolist()) == b"aaaa\0bbbb\0ccc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Token files and texts, by two tokenizers and by an unknown one."""
    folder = tmp_path_factory.mktemp("splits")
    texts = [{"text": f"the thing that they thought {number}"} for number in range(40)]
    path = write_lines(folder / "a.jsonl", texts)
    (folder / "held.txt").write_text("another thing that they thought " * 9)
    for name, vocab in (("one", 280), ("other", 270)):
        tokenizer = Tokenizer(write_tokenizer(folder / f"{name}.json", vocab=vocab))
        write([path], folder / name, tokenizer)
        write([path], folder / f"{name}_held", tokenizer)
    np.save(folder / "raw.npy", np.arange(500, dtype=np.uint16))
    np.save(folder / "unlabelled.npy", np.full(100, END, np.uint16))
    return folder


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_text_and_its_token_files_are_the_same_rows(split, folder):
    text = config_of(folder / "a.jsonl", tokenizer=f"{folder}/one.json", held_out_part=0.1)
    made = config_of(folder / "one" / "*.npy", held_out_part=0.1)
    one, other = (loader_of(config, split, vocab=300) for config in (text, made))
    assert one.rows.digest == other.rows.digest
    assert all(same(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("train", "held_out", "tokenizer", "message"),
    [
        ("one/*.npy", "other_held/*.npy", None, "several tokenizers: data"),
        ("one/*.npy", "held.txt", None, "several tokenizers: .* data.held_out bytes"),
        ("raw.npy", "held.txt", None, "data.train unknown, data.held_out bytes"),
        ("raw.npy", "one_held/*.npy", None, "data.train unknown, data.held_out"),
        ("other/*.npy", "held.txt", "one.json", "several tokenizers: data.tokenizer"),
        ("other/*.npy", None, "one.json", "several tokenizers: data.tokenizer"),
        ("raw.npy", "corpus", "one.json", "no data.tokenizer"),
        ("one/*.npy", "one_held/*.npy", None, None),
        ("one/*.npy", "held.txt", "one.json", None),
        ("raw.npy", "held.txt", "one.json", None),
    ],
)
def test_all_data_have_one_tokenizer(train, held_out, tokenizer, message, folder):
    held_out = [held_out if held_out == "corpus" else f"{folder}/{held_out}"] if held_out else []
    tokenizer = tokenizer and f"{folder}/{tokenizer}"
    config = config_of(folder / train, held_out=tuple(held_out), tokenizer=tokenizer)
    for split in ("train", "held_out"):
        if message is None:
            assert loader_of(config, split).rows
        else:
            with pytest.raises(UserError, match=message):
                loader_of(config, split)


@pytest.mark.parametrize(
    ("train", "changes", "message"),
    [
        ("none.npy", {}, "There is no file .*none.npy"),
        ("*.none", {}, r"No file matches .*\*\.none"),
        ("one", {}, "one is a folder: name the file itself"),
        ("raw.npy held.txt", {}, "held.txt holds text, and other files"),
        ("raw.npy corpus", {}, "it takes no other files"),
        ("corpus", {"kind": "chat"}, "no data.kind 'chat'"),
        ("corpus", {"tokenizer": "one.json"}, "no data.tokenizer"),
        ("one/*.npy", {"vocab": 256}, r"one needs a vocab\w+ of (\d+), .* --model.vocab \1\."),
        ("a.jsonl", {"vocab": 256, "tokenizer": "one.json"}, r"one.json needs .*has one of 256"),
        ("a.jsonl", {"vocab": 255}, "Text as bytes needs a vocabulary of 256"),
        ("raw.npy", {"end_of_text": 1000}, "end_of_text=1000 needs .* has one of 1,000"),
        ("raw.npy", {"split": "held_out"}, "5 of its 500 tokens are too few .*held_out_part"),
        ("unlabelled.npy", {"end_of_text": END}, "The train data has no token to predict in its"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(train, changes, message, folder):
    how = {name: changes[name] for name in ("split", "vocab") if name in changes}
    fields = {name: value for name, value in changes.items() if name not in how}
    if "tokenizer" in fields:
        fields["tokenizer"] = f"{folder}/{fields['tokenizer']}"
    paths = (name if name == "corpus" else folder / name for name in train.split())
    with pytest.raises(UserError, match=message):
        loader_of(config_of(*paths, **fields), **how)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"train": ()}, "names no data"),
        ({"train": "corpus"}, r"data.train='corpus' must be a tuple of texts, as in \('a', 'b'\)"),
        ({"held_out_part": 1.0}, "data.held_out_part=1.0 must be"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(field, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**field)
