"""The study of models that see, and the demo: their questions, one run, and how both compare."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from coat_jax.training.data.drawings import draw
from coat_jax.training.loop import Outcome
from experiments import demo, vision_demo
from experiments.study.study import Job
from experiments.vision_study import icons, show, training
from experiments.vision_study.arms import ARMS, SIZES
from experiments.vision_study.icons import COLORS, KINDS, PLACES, SPLITS, is_kept_back, scene_of
from experiments.vision_study.study import STUDY


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_splits_differ_in_what_they_say(split):
    for number in range(40):
        scene = scene_of(split, number)
        assert scene == scene_of(split, number)
        assert len({icon.name for icon in scene.icons}) == len(PLACES) == len(scene.icons)
        assert {is_kept_back(icon.name, icon.color) for icon in scene.icons} == {
            split == "combinations"
        }
        assert all((icon.style == "-fill") == (split == "style") for icon in scene.icons)
        at = dict(zip(PLACES, scene.icons, strict=True))
        of = {icon.name: icon for icon in scene.icons}
        asked, answer = scene.questions["name"]
        icon = at[asked.removeprefix("what is in the ").removesuffix("?")]
        assert answer == f"{icon.color} {icon.name}"
        asked, answer = scene.questions["color"]
        assert answer == of[asked.split()[-1].removesuffix("?")].color
        asked, answer = scene.questions["place"]
        assert at[answer] == of[asked.split()[-1].removesuffix("?")]
        asked, answer = scene.questions["count"]
        color = asked.split()[-1].removesuffix("?")
        assert answer == str([icon.color for icon in scene.icons].count(color))
        asked, answer = scene.questions["yes"]
        color, name = asked.removesuffix("?").split()[-2:]
        assert (answer == "yes") == (of[name].color == color)
    assert scene_of(split, 0) != scene_of(split, 1)


@pytest.fixture
def squares(monkeypatch):
    """Icons that need no font."""
    icons._drawn.cache_clear()
    monkeypatch.setattr(icons, "_ink", lambda name: np.ones((icons.CELL, icons.CELL), np.float32))
    yield
    icons._drawn.cache_clear()


def test_a_scene_is_drawn_in_its_colors(squares):
    scene = scene_of("train", 3)
    picture = icons.draw(scene)
    for place, icon in enumerate(scene.icons):
        row, column = (icons.CELL * at for at in divmod(place, 3))
        assert tuple(picture[row, column]) == COLORS[icon.color]


@pytest.mark.costly
def test_a_run_measures_losses_and_answers_of_every_kind(squares, monkeypatch, call_of, tmp_path):
    monkeypatch.setattr(training, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))
    monkeypatch.setattr(training, "HELD_OUT", ("held_out",))
    call = call_of(STUDY, "--size", "tiny", "--steps", "2", "--held-out", "4", "--batch", "2")
    rows = STUDY.rows_of(call, "coat", [1], "questions")
    (row,) = training.measure(Job(rows, tmp_path, tmp_path))
    assert STUDY.measures <= row.keys()
    assert len(row["losses"]) == 2
    assert np.isfinite([*row["losses"], *row["held_out"]["held_out"]]).all()
    assert {kind: len(right) for kind, right in row["right"]["held_out"].items()} == dict.fromkeys(
        KINDS, 4
    )


def test_a_row_has_the_questions_in_turn_and_learns_their_answers(squares):
    size = SIZES["tiny"]
    config = training.config_of(ARMS["coat"], size, size.settings, 0)
    scene = scene_of("train", 5)
    row = training.row_of(config, scene)
    learned = bytes(row.labels[row.labels >= 0].tolist()).split(b"\0")
    assert learned == [answer.encode() for _, answer in scene.questions.values()] + [b""]
    assert (row.tokens == config.model.image_token).sum() == config.model.features
    assert row.images.shape == (1, icons.SIDE, icons.SIDE, 3)


def test_arms_are_compared_question_by_question():
    def row(arm, seed, right):
        return {"arm": arm, "seed": seed, "right": {"held_out": {"name": right}}}

    rows = [row("bf16", 0, "1100"), row("coat", 0, "1010"), row("bf16", 1, "1111")]
    rows.append(row("coat", 1, "1100"))
    found = show.exact(rows, "coat", "held_out", ("name",))
    assert found == (0.5, 8, 1, 3)
    assert found.p == stats.binomtest(1, 4).pvalue
    assert show.exact(rows, "bf16", "held_out", ("name",)).p == 1


def test_the_demo_counts_right_answers(tmp_path):
    drawings = [draw("held_out", number) for number in range(4)]
    right = {kind: [d.questions[kind][1] for d in drawings] for kind in vision_demo.KINDS}
    wrong = right | {"read": ["?", *right["read"][1:]]}
    found = vision_demo.compare("read", drawings, right, wrong)
    assert found == ("read", 4, 4, 3, 1.0)
    assert "75.0 %" in "".join(vision_demo.table([found]).columns[2].cells)
    vision_demo.draw_answers(tmp_path / "a.png", drawings, {"BF16": right, "COAT": wrong})
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_demo_that_is_stopped_compares_nothing(monkeypatch):
    outcome = Outcome(3, 1.0, None, stopped=True)
    monkeypatch.setattr(demo, "train", lambda config, console: outcome)
    with pytest.raises(SystemExit, match="Stopped at step 3"):
        demo.train_whole(None, None)


def test_an_arm_decides_the_precision_of_the_parts():
    size = SIZES["tiny"]
    model = training.config_of(ARMS["decoder_alone"], size, size.settings, 0).model
    assert model.decoder.precision.fp8_linear
    assert not model.tower.precision.fp8_linear
    assert dataclasses.replace(model, precision="bf16").decoder.precision == model.tower.precision
