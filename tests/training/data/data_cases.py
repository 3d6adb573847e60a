"""Small data for the tests: rows and files."""

import json

import numpy as np

from coat_jax.training.data import DataConfig, Loader, rows_of
from coat_jax.training.data.rows import IGNORED, Stream, Windows

END = 0  # ends documents throughout


def windows_of(tokens, sequence, end_of_text=None, kind=Windows):
    stream = Stream({"numbers": np.asarray(tokens, np.uint16)}, 1 << 16)
    return kind(stream, range(len(tokens)), sequence=sequence, end_of_text=end_of_text)


def counting_rows(rows, sequence=4, **kind):
    """Rows of a stream in which the tokens are 0, 1, 2, ...: row r begins with r * sequence."""
    return windows_of(range(rows * sequence + 1), sequence, **kind)


def numbers_of(batch, sequence=4):
    """The numbers of a batch's rows, without padding."""
    real = batch.labels[:, 0] != IGNORED
    return (batch.tokens[real, 0] // sequence).tolist()


def config_of(*paths, **changes):
    return DataConfig(train=tuple(map(str, paths)), **changes)


def loader_of(config, split="train", *, batch=1, sequence=8, vocab=1000):
    rows = rows_of(config, split=split, sequence=sequence, vocab=vocab)
    return Loader(rows, batch=batch, seed=0, epochs=1)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path
