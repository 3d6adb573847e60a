"""Training and held-out data are made by one tokenizer; test_sources.py has their files."""

import numpy as np
import pytest
from data_cases import opened, write_lines, write_tokenizer

from coat_jax.errors import UserError
from coat_jax.tokenizers import Tokenizer
from coat_jax.training.data import DataConfig
from coat_jax.training.data.tokenizing import write


@pytest.fixture(scope="module")
def two_tokenizers(tmp_path_factory):
    """Token files and a text, each by two tokenizers: the folder, and the first one's file."""
    folder = tmp_path_factory.mktemp("splits")
    path = write_lines(folder / "a.jsonl", [{"text": "the thing that they thought"}] * 40)
    (folder / "held.txt").write_text("another thing that they thought " * 9)
    for name, vocab in (("one", 280), ("other", 270)):
        tokenizer = Tokenizer(write_tokenizer(folder / f"{name}.json", vocab=vocab))
        write([path], folder / name, tokenizer)
        write([path], folder / f"{name}_held", tokenizer)
    np.save(folder / "raw.npy", np.arange(200, dtype=np.uint16))
    return folder, str(folder / "one.json")


@pytest.mark.parametrize(
    ("train", "held_out", "named", "message"),
    [
        ("one/*.npy", ("other_held/*.npy",), False, "several tokenizers: data"),
        ("one/*.npy", ("held.txt",), False, "several tokenizers: .* data.held_out bytes"),
        ("raw.npy", ("held.txt",), False, "data.train unknown, data.held_out bytes"),
        ("other/*.npy", ("held.txt",), True, "several tokenizers: data.tokenizer"),
        ("other/*.npy", (), True, "several tokenizers: data.tokenizer"),
        ("raw.npy", ("corpus",), True, "several tokenizers: data"),
        ("one/*.npy", ("one_held/*.npy",), False, None),
        ("one/*.npy", ("held.txt",), True, None),
        ("raw.npy", ("held.txt",), True, None),
    ],
)
def test_all_data_have_one_tokenizer(train, held_out, named, message, two_tokenizers):
    folder, tokenizer = two_tokenizers
    config = DataConfig(
        train=(f"{folder}/{train}",),
        held_out=tuple(f"{folder}/{name}" if "." in name else name for name in held_out),
        tokenizer=tokenizer if named else None,
    )
    for split in ("train", "held_out"):
        if message is None:
            assert opened(config, split).rows
        else:
            with pytest.raises(UserError, match=message):
                opened(config, split)
