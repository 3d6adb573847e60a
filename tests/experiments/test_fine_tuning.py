"""The study of networks that are tuned on other text: its rows of prose, and one run of it."""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_study import After, job

from coat_jax.errors import UserError
from coat_jax.kernels import gemm
from experiments.fine_tuning import parts, prose, run, show, ways
from experiments.loss_study import arms, operands
from experiments.loss_study import run as study
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Settings, Size
from experiments.loss_study.rows import row_order

SEEDS = (0, 1, 2)
COSTS = {"coat": (0.001, 0.002, 0.003), "moments": (0.0, 0.0, 0.0)}


# --- Prose -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of which every fourth document is prose, in bytes."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    for number in range(200):
        letters = rng.integers(97, 123, size=800).astype(np.uint8)
        if number % 4:
            letters[::2] = rng.choice(list(b" \n  .;"), size=400)
        (folder / f"{number}.md").write_bytes(bytes(letters))
    made = folder / "made"
    texts.prepare(made, texts.BYTES, places=[folder], limit=10**9)
    return made


def test_rows_of_prose_have_the_most_words_and_were_not_read(mixed: Path):
    settings = Settings(
        steps=20, batch=8, sequence=100, accumulation=1, learning_rate=1e-3, held_out=1000
    )
    tokens = texts.load(mixed, "train", texts.BYTES)
    rows = prose.rows_of(mixed, texts.BYTES, settings, seed=1, steps=5)
    assert len(rows.tune) == 5 * 8
    assert len(set(rows.tune.tolist())) == 5 * 8
    assert not set(rows.tune.tolist()) & set(row_order(tokens, settings, 1).tolist())
    shares = prose.shares_of_words(tokens, prose.words_of(mixed, texts.BYTES), 100)
    assert np.min(shares[rows.tune]) > 0.7 > np.median(shares)
    others = texts.load(mixed, "held_out", texts.BYTES)
    held_out = prose.shares_of_words(others, prose.words_of(mixed, texts.BYTES), 100)
    assert np.min(held_out[rows.held_out]) > 0.7
    assert len(rows.held_out) == np.count_nonzero(held_out > 0.7)


def test_words_of_a_tokenizer_are_its_letters(tmp_path: Path):
    for number in range(12):
        (tmp_path / f"{number}.md").write_text(f"A sentence, the {number}th; x = y + 1.\n" * 30)
    made = tmp_path / "made"
    texts.prepare(made, 300, places=[tmp_path], limit=10**9)
    words = prose.words_of(made, 300)
    tokenizer = json.loads((made / "tokenizer_300.json").read_text())["model"]["vocab"]
    assert all(words[tokenizer[piece]] for piece in ("Ġsentence", "x"))
    assert not any(words[tokenizer[piece]] for piece in (";", "Ġ=", "1", "Ġ"))


# --- What follows from runs ------------------------------------------------------------------


def row(seed: int) -> dict:
    size = arms.SIZES["tiny"]
    made = run.row_of("bf16", arms.ARMS["bf16"], "tiny", size, seed, size.settings, "a text")

    def tuned(factor: float) -> dict:
        losses = {name: [factor * (2.0 + 0.1 * seed)] for name in ("own", "bf16", "coat")}
        return {"losses": [factor * 2.5] * ways.STEPS, "skipped": 0, "held_out": losses}

    costs = {name: of_seeds[seed] for name, of_seeds in COSTS.items()}
    found = {"bf16": tuned(1.0), "bf16_microbatches": tuned(1.0001)}
    found |= {name: tuned(math.exp(cost)) for name, cost in costs.items()}
    before = {"bf16": [math.exp(0.05) * (2.0 + 0.1 * seed)]}
    parents = {"date": "2026-01-01"}
    return made | {"losses": [3.0] * 20, "before": before, "tuned": found, "parents": parents}


ROWS = [row(seed) for seed in SEEDS]


def test_tables_and_picture_show_every_way(capsys: pytest.CaptureFixture, tmp_path: Path):
    pytest.importorskip("matplotlib")
    show.show(ROWS, tmp_path)
    printed = capsys.readouterr().out
    for words in (
        "tiny: tuning in BF16 lowers the held-out loss of prose by 5.00 %",
        f"{ways.STEPS} steps of 8 x 64",
        "learning rate 0.0003",
        "+0.195 % ± 0.248",  # of coat: 0.1, 0.2 and 0.3 %, less half of 0.01 %
        "bf16_microbatches (baseline)",
    ):
        assert words in printed
    assert len(list(tmp_path.glob("fine_tuning_tiny_*.png"))) == 1
    show.show([], tmp_path)
    assert "no results yet" in capsys.readouterr().out


def test_runs_after_another_training_are_not_compared(capsys: pytest.CaptureFixture, tmp_path):
    pytest.importorskip("matplotlib")
    longer = [one | {"settings": one["settings"] | {"steps": 40}} for one in ROWS]
    show.show(ROWS + longer, tmp_path)
    assert len(list(tmp_path.glob("fine_tuning_tiny_*.png"))) == 2
    assert capsys.readouterr().out.count(f"{ways.STEPS} steps of 8 x 64") == 2


def test_operands_have_a_table_of_their_own(capsys: pytest.CaptureFixture, tmp_path: Path):
    pytest.importorskip("matplotlib")
    show.show(ROWS, tmp_path)
    assert "rounded" not in capsys.readouterr().out

    def of_seed(seed: int) -> dict:
        losses = {
            place: [math.exp(0.05 + cost * (1 + seed)) * (2.0 + 0.1 * seed)]
            for place, cost in zip(parts.PLACES, (0.001, 0.0, 0.0005, -0.001), strict=True)
        }
        return ROWS[seed] | {"forward": {"inputs": losses, "weights": losses}}

    show.show([ROWS[0], of_seed(1), of_seed(2)], tmp_path)
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 seeds" in printed
    # 0.2 and 0.3 % more: Student's quantile of one degree of freedom times 0.05 %.
    assert "│ all │ +0.250 % ± 0.635 │ +0.250 % ± 0.635 │" in printed
    assert "│ attention │ +0.000 % ± 0.000 │" in printed
    assert "│ down │ -0.250 % ± 0.635 │" in printed


def test_ways_are_part_of_a_result_s_key(monkeypatch: pytest.MonkeyPatch):
    before = row(0)["key"]
    monkeypatch.setattr(ways, "RATE", 0.2)
    assert row(0)["key"] != before


def test_parts_have_keys_and_costs_of_their_own():
    size = arms.SIZES["tiny"]
    of_run = "bf16", arms.ARMS["bf16"], "tiny", size, 0, size.settings, "a text"
    assert parts.row_of(*of_run)["key"] != run.row_of(*of_run)["key"]
    longer = dataclasses.replace(size.settings, steps=size.settings.steps + 1)
    for kind in (run, parts):
        more = kind.cost_of(longer) - kind.cost_of(size.settings)
        assert more == size.settings.batch * size.settings.sequence


# --- Running ---------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ways and two steps."""
    monkeypatch.setattr(run, "WAYS", {name: ways.WAYS[name] for name in ("bf16", "coat")})
    monkeypatch.setattr(ways, "STEPS", 2)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Size], Path]:
    """The folder of a run of the loss study in BF16, which is trained once."""

    @functools.cache
    def folder(size: Size) -> Path:
        one = job(size, "bf16", corpus, tmp_path_factory.mktemp("trained"))
        found = study.train(one, [], keep=True)
        assert found is not None
        (Path(one.folder) / "held_out.json").write_text(json.dumps(found.held_out()))
        return Path(one.folder)

    return folder


@pytest.mark.usefixtures("few")
def test_a_run_that_was_stopped_goes_on_where_it_was(
    small: Size, corpus: Path, tmp_path: Path, trained: Callable[[Size], Path]
):
    one = job(small, "bf16", corpus, tmp_path / "run")
    assert run.run(one, After(2)) is None  # while it trains
    assert run.run(one, After(2 + 1)) is None  # after two more steps and one way
    measured = json.loads((tmp_path / "run" / "measured.json").read_text())
    assert list(measured) == ["bf16"]

    whole = run.run(one, [])
    assert whole is not None
    assert list(whole["tuned"]) == ["bf16", "coat"]
    # The training before is the loss study's, and all rows of this held-out text are prose.
    assert whole["before"] == json.loads((trained(small) / "held_out.json").read_text())
    before = np.mean(whole["before"]["bf16"])
    for tuned in whole["tuned"].values():
        assert len(tuned["losses"]) == 2
        assert set(tuned["held_out"]) == {"own", "bf16"}
        # Two steps at a tenth of the learning rate change the network, a little.
        assert np.mean(tuned["held_out"]["bf16"]) != before
        assert np.mean(tuned["held_out"]["bf16"]) == pytest.approx(before, rel=0.01)
    in_bf16, in_coat = whole["tuned"].values()
    assert in_bf16 == measured["bf16"]
    assert in_bf16["held_out"]["own"] == in_bf16["held_out"]["bf16"]
    assert in_coat["held_out"]["own"] != in_coat["held_out"]["bf16"]
    assert in_coat["losses"] != in_bf16["losses"]
    assert in_coat["losses"] == pytest.approx(in_bf16["losses"], rel=0.01)


@pytest.mark.usefixtures("few")
def test_a_text_that_is_too_short_is_refused_before_training(
    small: Size, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    longer = dataclasses.replace(small.settings, steps=200_000)
    one = job(dataclasses.replace(small, settings=longer), "bf16", corpus, tmp_path / "run")
    with pytest.raises(UserError, match="No run reads any of it twice"):
        run.run(one, [])
    monkeypatch.setattr(ways, "STEPS", 100_000)
    with pytest.raises(UserError, match=r"Tuning needs 400,000 rows of prose, and of the [\d,]+"):
        run.run(job(small, "bf16", corpus, tmp_path / "run"), [])


@pytest.mark.usefixtures("few")
def test_parts_round_single_operands(
    small: Size,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    trained: Callable[[Size], Path],
):
    kept = {name: ways.PARTS[name] for name in ("bf16", "weights_rounded")}
    monkeypatch.setattr(parts, "PARTS", kept)
    monkeypatch.setattr(parts, "OPERANDS", ("weights",))
    shutil.copytree(trained(small), tmp_path / "run")
    one = job(small, "bf16", corpus, tmp_path / "run")
    assert parts.run(one, After(2 + 2)) is None  # after both ways and two evaluations
    whole = parts.run(one, [])
    assert whole is not None
    in_bf16, rounded = whole["tuned"].values()
    assert rounded["losses"] != in_bf16["losses"]
    assert rounded["losses"] == pytest.approx(in_bf16["losses"], rel=0.01)
    assert rounded["held_out"]["own"] == rounded["held_out"]["bf16"]

    before = whole["before"]["bf16"]
    of_weights = whole["forward"]["weights"]
    assert list(of_weights) == list(parts.PLACES)
    for losses in of_weights.values():
        assert losses != before
        assert losses == pytest.approx(before, rel=0.01)
    assert len({tuple(losses) for losses in of_weights.values()}) == len(parts.PLACES)


def test_an_operand_is_rounded_in_the_chosen_products_alone():
    width, ffn = 8, 24
    shapes = {"attention": (width, width), "gate and up": (width, ffn), "down": (ffn, width)}
    rng = np.random.default_rng(0)
    sides = {
        place: tuple(rng.standard_normal(s).astype(jnp.bfloat16) for s in ((3, shape[0]), shape))
        for place, shape in shapes.items()
    }

    def products() -> dict[str, list[float]]:
        def of_all(sides):
            return {
                place: gemm.product(
                    gemm.Operand(left, None, None), gemm.Operand(right, None, None), jnp.float32
                )
                for place, (left, right) in sides.items()
            }

        return jax.tree.map(np.ndarray.tolist, jax.device_get(jax.jit(of_all)(sides)))

    exact = products()
    with operands.rounding(["inputs"]):
        rounded = products()
    for place, chosen in parts.PLACES.items():
        with parts.rounding("inputs", partial(chosen, ffn=ffn)):
            found = products()
        for other in shapes:
            assert found[other] == (rounded if place in ("all", other) else exact)[other]
    assert products() == exact
