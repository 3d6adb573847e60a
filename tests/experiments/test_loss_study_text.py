"""The text of the loss study: each document once, none of it in both parts."""

import json
from pathlib import Path

import numpy as np
import pytest

from coat_jax.errors import UserError
from experiments.loss_study import text as the_text
from experiments.loss_study.duplicates import distinct


def prose(seed: int, words: int = 600) -> bytes:
    random = np.random.default_rng(seed)
    letters = random.integers(97, 123, size=(words, 6)).astype(np.uint8)
    return b" ".join(bytes(word) for word in letters)


def test_copies_versions_and_parts_are_near_duplicates():
    original = prose(0)
    edited = original.replace(b"a", b"A", 20)
    reflowed = original.replace(b" ", b"\n    ")
    part = original[1000:3000]
    mostly = original[:2500] + prose(1)[:1000]
    texts = [original, original, edited, reflowed, part, mostly, prose(2), original + prose(3)]
    new = distinct(texts)
    # The last one is half new, and just that much is allowed to be old.
    assert new[:7] == [True, False, False, False, False, False, True]


def test_a_dropped_document_does_not_count_as_seen():
    original, other = prose(0), prose(1)
    mixed = original + b" " + other[: int(0.58 * len(other))]
    assert distinct([original, mixed, other]) == [True, False, True]


def test_held_out_text_is_like_no_training_text_and_order_does_not_matter():
    texts = [prose(i // 2) for i in range(80)]  # each twice
    train, held_out = the_text.split(texts, limit=10**9)
    assert len(train) + len(held_out) == 40
    assert held_out
    assert not set(held_out) & set(train)
    assert the_text.split(texts[::-1], limit=10**9) == (train, held_out)
    some = the_text.split(texts, limit=50_000)
    assert sum(map(len, (*some[0], *some[1]))) <= 50_000
    assert some[0] == train[: len(some[0])]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of prepared text, in bytes."""
    folder = tmp_path_factory.mktemp("text")
    files = folder / "files"
    files.mkdir()
    for i in range(40):
        (files / f"{i}.md").write_bytes(prose(i // 2))
    (files / "table.txt").write_bytes(b"1234567890 " * 400)
    (files / "binary.py").write_bytes(b"\xff\xfe" * 1000)
    notes = the_text.prepare(folder / "made", the_text.BYTES, places=[files], limit=10**9)
    assert notes["train"]["documents"] + notes["held_out"]["documents"] == 20
    return folder / "made"


def test_text_is_made_once_and_without_tables_and_copies(corpus: Path):
    before = {path: path.stat().st_mtime_ns for path in corpus.iterdir()}
    notes = the_text.prepare(corpus, the_text.BYTES, places=[], limit=10**9)
    assert {path: path.stat().st_mtime_ns for path in corpus.iterdir()} == before
    tokens = the_text.load(corpus, "train", the_text.BYTES)
    assert len(tokens) == notes["train"]["bytes"] + notes["train"]["documents"]
    assert np.count_nonzero(tokens == 0) == notes["train"]["documents"]
    with pytest.raises(UserError, match="limited to"):
        the_text.prepare(corpus, the_text.BYTES, places=[], limit=5)


def test_tokenizer_gives_back_the_text(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    files = tmp_path / "files"
    files.mkdir()
    for i in range(10):
        (files / f"{i}.md").write_bytes(prose(i))
    the_text.prepare(tmp_path / "made", 300, places=[files], limit=10**9)
    tokens = the_text.load(tmp_path / "made", "train", 300)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "made/tokenizer_300.json"))
    documents = [
        json.loads(line) for line in (tmp_path / "made/train.jsonl").read_text().splitlines()
    ]
    ends = np.flatnonzero(tokens == 0)
    assert len(ends) == len(documents)
    assert tokenizer.decode(tokens[: ends[0]].tolist()) == documents[0]
