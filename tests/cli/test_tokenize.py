"""`coat tokenize`: text becomes files that training reads."""

import errno
import json
import os
from unittest import mock

import numpy as np
import pytest

from coat_jax.cli import main
from coat_jax.training.data import DataConfig, rows_of, tokenizing


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "more of it"}) + "\n")
    return [str(tmp_path / "*.txt"), str(tmp_path / "b.jsonl")]


def test_its_files_can_be_trained_on(texts, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["tokenize", *texts, "--out", str(out), "--end-of-text", "3"]) == 0
    said = capsys.readouterr().out
    assert "212 tokens of 2 documents as uint16 in 1 file," in said
    assert f"--data.train '{out}/*.npy'" in said
    assert np.load(out / "00000.npy")[-1] == 3
    config = DataConfig(train=(f"{out}/*.npy",))
    row = rows_of(config, split="train", sequence=16, vocab=256)[0]
    assert row.tokens.shape == row.segments.shape == (16,)


@pytest.mark.parametrize(
    ("inputs", "options", "named"),
    [
        ([""], [], ". is a folder: name the file itself"),
        (["*.none"], [], "No file matches"),
        (["tokens.npy"], [], "holds tokens already"),
        (["bad.jsonl"], [], "bad.jsonl:1 is not JSON"),
        (["a.txt"], ["--tokenizer", "none.json"], "no tokenizer file"),
        (["a.txt"], ["--end-of-text", "256"], "end_of_text=256 must be"),
    ],
)
def test_bad_input_ends_in_one_line_and_code_2(inputs, options, named, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "bad.jsonl").write_text("{")
    np.save(tmp_path / "tokens.npy", np.arange(9, dtype=np.uint16))
    inputs = [name and str(tmp_path / name) for name in inputs]
    assert main(["tokenize", *inputs, "--out", str(tmp_path / "out"), *options]) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("step", "number", "code", "named"),
    [
        ("_write_header", errno.ENOSPC, 3, "out does not fit in {}"),
        ("_document", errno.EIO, 2, "{}/a.txt cannot be read: Input/output error."),
    ],
)
def test_a_failing_disk_is_named_and_leaves_nothing(
    step, number, code, named, texts, tmp_path, capsys, monkeypatch
):
    failing = mock.Mock(side_effect=OSError(number, os.strerror(number)))
    monkeypatch.setattr(tokenizing, step, failing)
    assert main(["tokenize", *texts, "--out", str(tmp_path / "out")]) == code
    assert named.format(tmp_path) in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
