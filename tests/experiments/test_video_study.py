"""The study of models of videos: what is drawn, one run, and how arms are compared."""

import base64
import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from experiments import drawn_videos
from experiments.drawn_videos import COLORS, DIRECTIONS, SHAPES, TIMES, WORDS
from experiments.study.study import Job
from experiments.video_study import show, training
from experiments.video_study.arms import ARMS, SIZES
from experiments.video_study.study import STUDY


@pytest.mark.parametrize("number", range(12))
def test_a_shape_has_the_color_and_the_direction_of_its_text(number):
    latents, (text,) = drawn_videos.video(number, 4, 32)
    shape, color, direction = (WORDS[i] for i in np.flatnonzero(text))
    assert (shape in SHAPES, color in COLORS, direction in DIRECTIONS) == (True, True, True)
    ink = (latents + 1).sum(-1)
    assert np.allclose(latents.reshape(-1, 3)[ink.argmax()], COLORS[color], atol=1e-6)
    # The center of the ink moves along one axis, and not across it.
    rows, columns = np.mgrid[:32, :32]
    first, last = (
        [(place * frame).sum() / frame.sum() for place in (rows, columns)]
        for frame in (ink[0], ink[-1])
    )
    moved = np.subtract(last, first)
    assert np.allclose(moved, 32 * drawn_videos.WAY * np.array(DIRECTIONS[direction]), atol=0.5)


def test_later_shapes_cover_earlier_ones():
    one, text = drawn_videos.video(3, 2, 16, shapes=1)
    two, texts = drawn_videos.video(3, 2, 16, shapes=2)
    assert (texts[0] == text[0]).all()
    second = COLORS[WORDS[np.flatnonzero(texts[1])[1]]]
    changed = np.abs(two - one).max(-1) > 1e-3
    assert np.allclose(two[changed].reshape(-1, 3).max(0), np.maximum(second, -1), atol=0.1)


def test_a_sheet_has_the_frames_of_all_ways_in_a_row():
    videos = np.arange(2 * 3 * 8, dtype=np.uint8).reshape(2, 3, 8, 1, 1, 1).repeat(3, -1)
    sheet = drawn_videos.contact_sheet(videos)
    assert sheet[..., 0].tolist() == [
        [of_way[frame] for of_way in pair for frame in (0, 2, 4, 6)]
        for pair in zip(*videos[..., 0, 0, 0].tolist(), strict=True)
    ]
    assert drawn_videos.frames_of_all(videos).shape == (8, 2, 3, 3)
    pixels = drawn_videos.to_pixels(np.ones((2, 4, 4, 3)), enlarged=2, gap=1)
    assert pixels.shape == (2, 10, 10, 3)
    assert (pixels[:, 1:-1, 1:-1] == 255).all()


@pytest.mark.costly
@pytest.mark.parametrize("arm", ["both_coarse_early", "bf16"])
def test_a_run_measures_losses_by_time_and_makes_videos(arm, monkeypatch, call_of, tmp_path):
    monkeypatch.setattr(training, "AFTERWARDS", {"both": ARMS["both"]})
    call = call_of(STUDY, "--size", "tiny", "--steps", "2", "--held-out", "3", "--batch", "2")
    (row,) = training.measure(Job(STUDY.rows_of(call, arm, [0], "videos"), tmp_path, tmp_path))
    assert STUDY.measures <= row.keys()
    assert len(row["losses"]) == 2
    ways = {"own"} if arm != "bf16" else {"own", "both"}
    assert row["held_out"].keys() == row["samples"].keys() == ways
    for losses in row["held_out"].values():
        assert len(losses) == len(TIMES)
        assert np.isfinite(losses).all()
    sheet = Image.open(io.BytesIO(base64.b64decode(row["samples"]["own"])))
    assert sheet.size == (4 * 18, 3 * 18)


def test_schedules_compute_as_much_as_the_window():
    """At the times of training, of which half are above `SWITCH`."""
    size = SIZES["35M"]

    def density(arm):
        model = size.model_of(ARMS[arm])
        return float(np.mean(model.tiles.window(*model.attention.windows).density))

    assert density("both") == 18 / 64
    assert density("both_coarse_early") == density("both_coarse_late") == 17.5 / 64


def test_an_arm_changes_only_what_it_says():
    size = SIZES["tiny"]
    plain, both = (size.model_of(ARMS[arm]) for arm in ("bf16", "both"))
    assert plain.attention is None
    changes = {"precision": plain.precision, "attention": None}
    assert dataclasses.replace(both, **changes) == plain


def test_networks_are_compared_with_what_they_are_after_training():
    def row(arm, seed, **held_out):
        return {"arm": arm, "seed": seed, "held_out": {k: [v] * 5 for k, v in held_out.items()}}

    rows = [row("bf16", s, own=1.0, both=1.5 + 0.1 * s, fp8=1.0) for s in range(2)]
    rows += [row("both", s, own=1.01) for s in range(2)]
    effects = show.costs(rows)["all times"].effects
    assert effects["bf16, then both"].mean == pytest.approx(np.log([1.5, 1.6]).mean())
    assert effects["bf16, then fp8"].mean == 0
    assert effects["both"].mean == pytest.approx(np.log(1.01))
