"""The study of networks that are tuned on other text: its rows of prose, and one run of it."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from coat_jax.errors import UserError
from experiments.fine_tuning import prose, study, tuning, ways
from experiments.fine_tuning.study import STUDY
from experiments.loss_study import arms
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Settings
from experiments.loss_study.rows import row_order
from experiments.row_files import Row
from experiments.study.study import Stopped

COSTS = {"coat": (0.001, 0.002, 0.003), "moments": (0.0, 0.0, 0.0)}


def test_rows_of_prose_have_the_most_words_and_were_not_read(work: Path):
    text = work / "text"
    settings = Settings(
        steps=20, batch=8, sequence=100, accumulation=1, learning_rate=1e-3, held_out=1000
    )
    tokens = texts.load(text, "train", texts.BYTES)
    tune, others = prose.rows_of(text, texts.BYTES, settings, seed=1, steps=5)
    assert len(set(tune.tolist())) == 5 * 8
    assert not set(tune.tolist()) & set(row_order(tokens, settings, 1).tolist())
    words = prose.words_of(text, texts.BYTES)
    shares = prose.shares_of_words(tokens, words, 100)
    assert np.min(shares[tune]) > 0.7 > np.median(shares)
    held_out = prose.shares_of_words(texts.load(text, "held_out", texts.BYTES), words, 100)
    assert np.min(held_out[others]) > 0.7
    assert len(others) == np.count_nonzero(held_out > 0.7)


def test_words_of_a_tokenizer_are_its_letters(tmp_path: Path):
    pytest.importorskip("tokenizers")
    for number in range(12):
        (tmp_path / f"{number}.md").write_text(f"A sentence, the {number}th; x = y + 1.\n" * 30)
    made = tmp_path / "made"
    texts.prepare(made, 300, places=[tmp_path], limit=10**9)
    words = prose.words_of(made, 300)
    tokenizer = json.loads((made / "tokenizer_300.json").read_text())["model"]["vocab"]
    assert all(words[tokenizer[piece]] for piece in ("Ġsentence", "x"))
    assert not any(words[tokenizer[piece]] for piece in (";", "Ġ=", "1", "Ġ"))


@pytest.fixture
def rows(call_of) -> list[Row]:
    """Runs of three seeds, whose ways cost what `COSTS` says."""
    call = call_of(STUDY, "--size", "tiny", "--ways", "bf16", "bf16_microbatches", *COSTS)

    def tuned(factor: float, seed: int) -> Row:
        losses = {name: [factor * (2.0 + 0.1 * seed)] for name in ("own", "bf16", "coat")}
        return {"losses": [factor * 2.5] * ways.STEPS, "skipped": 0, "held_out": losses}

    def row(seed: int) -> Row:
        (named,) = study.rows_of(call, "bf16", [seed], "a text")
        costs = {"bf16": 0.0, "bf16_microbatches": 1e-4}
        costs |= {name: of_seeds[seed] for name, of_seeds in COSTS.items()}
        found = {name: tuned(math.exp(cost), seed) for name, cost in costs.items()}
        return named | {"tuned": found, "parents": {"date": "2026-01-01"}}

    return [row(seed) for seed in range(3)]


def test_the_table_shows_every_way_by_what_was_trained_before(rows, capsys):
    longer = [row | {"settings": row["settings"] | {"steps": 40}} for row in rows]
    STUDY.show(rows + longer, None)
    printed = capsys.readouterr().out
    # Of coat: 0.1, 0.2 and 0.3 %, less half of 0.01 %.
    for words in (f"{ways.STEPS} steps of 8 x 64", "learning rate 0.0003", "+0.195 % ± 0.248"):
        assert printed.count(words) >= 2
    assert "bf16_microbatches (baseline)" in printed


def test_ways_decide_a_result_and_rows_of_earlier_code_are_those_of_today(rows):
    (row, *_) = rows
    assert STUDY.of_today(row) == row
    definition = row["definition"] | {"forward": "4567"}
    tuned = definition["tuned"] | {"code": "0123"}
    older = row | {"definition": definition | {"tuned": tuned}}
    assert STUDY.of_today(older) == row


@pytest.mark.usefixtures("small")
def test_a_run_that_was_stopped_goes_on_where_it_was(job_of, after, tmp_path, monkeypatch):
    monkeypatch.setattr(ways, "STEPS", 2)
    of_ways = ["--ways", "bf16", "coat", "weights_rounded"]
    with pytest.raises(Stopped):  # after four steps and one way
        tuning.measure(job_of(STUDY, "bf16", *of_ways, asked=after(4 + 1)))
    measured = json.loads((tmp_path / "run" / "measured.json").read_text())
    assert list(measured) == ["bf16"]
    (whole,) = tuning.measure(job_of(STUDY, "bf16", *of_ways))
    assert STUDY.of_today(whole) == whole
    before = np.mean(whole["before"]["bf16"])
    for tuned in whole["tuned"].values():
        assert len(tuned["losses"]) == 2
        # Two steps at a tenth of the learning rate change the network, a little.
        assert np.mean(tuned["held_out"]["bf16"]) != before
        assert np.mean(tuned["held_out"]["bf16"]) == pytest.approx(before, rel=0.01)
    in_bf16, in_coat, rounded = whole["tuned"].values()
    assert in_bf16 == measured["bf16"]
    assert in_coat["held_out"]["own"] != in_coat["held_out"]["bf16"]
    assert rounded["held_out"]["own"] == rounded["held_out"]["bf16"]
    for other in (in_coat, rounded):
        assert other["losses"] != in_bf16["losses"]
        assert other["losses"] == pytest.approx(in_bf16["losses"], rel=0.01)


def test_a_text_that_is_too_short_is_refused_before_training(small, job_of, monkeypatch):
    monkeypatch.setattr(tuning, "train", pytest.fail)
    monkeypatch.setattr(ways, "STEPS", 100_000)
    with pytest.raises(UserError, match=r"Tuning needs 400,000 rows of prose, and of the [\d,]+"):
        tuning.measure(job_of(STUDY, "bf16"))
    longer = dataclasses.replace(small.settings, steps=200_000)
    monkeypatch.setitem(arms.SIZES, "small", dataclasses.replace(small, settings=longer))
    with pytest.raises(UserError, match="No run reads any of it twice"):
        tuning.measure(job_of(STUDY, "bf16"))
