"""Laws of drawings: each follows from its number, and its answers are right."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from picture_cases import MODEL, TINY, answers_of, text_of
from PIL import Image, ImageDraw, ImageFont

from coat_jax.errors import UserError
from coat_jax.training.data import PicturesConfig
from coat_jax.training.data.drawings import COUNTS, SIDE, draw
from coat_jax.training.data.picture_rows import rows_of
from coat_jax.training.families import FAMILIES

HALF = SIDE // 2
CORNERS = [np.s_[top : top + HALF, left : left + HALF] for top in (0, HALF) for left in (0, HALF)]
PLACES = ["top left?", "top right?", "bottom left?", "bottom right?"]
CONFIG = PicturesConfig(template="{role}: {content}{end}", picture_before="[", picture_after="]")


def open_rows(split="train", *, model=TINY, sequence=128, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    return rows_of(config, model, split=split, sequence=sequence)


def inked(drawing):
    """The quarters of the picture with something darker than any paper in them."""
    gray = drawing.pixels[..., 0]
    return [number for number, part in enumerate(CORNERS) if (gray[part] < 130).sum() > 9]


def answers_to(drawing):
    return {kind: answer for kind, (_, answer) in drawing.questions.items()}


def digits_of(drawing):
    """By their corners: the digits that the answer to "read" has."""
    upper, lower = answers_to(drawing)["read"].split("-")
    corners = inked(drawing)
    assert sum(corner < 2 for corner in corners) == len(upper)
    return dict(zip(corners, upper + lower, strict=True))


@pytest.fixture(scope="module")
def drawings():
    return [draw("train", number) for number in range(400)]


@pytest.mark.parametrize("split", COUNTS)
def test_a_drawing_follows_from_its_split_and_number(split, drawings):
    for number in (0, 1, 399, COUNTS[split] - 1):
        one, same = draw(split, number), draw(split, number)
        assert np.array_equal(one.pixels, same.pixels)
        assert list(one.questions.items()) == list(same.questions.items())
    others = [draw("held_out", number) for number in range(400)]
    different = {drawing.pixels.tobytes() for drawing in drawings + others}
    assert len(different) == 800
    alike = sum(a.questions == b.questions for a, b in zip(drawings, others, strict=True))
    assert alike < 20


def test_answers_agree_with_the_ink_in_the_corners(drawings):
    for drawing in drawings:
        digits = digits_of(drawing)
        assert len(set(digits.values())) == len(digits)
        assert answers_to(drawing)["count"] == str(len(digits))
        place, answer = drawing.questions["place"]
        assert answer == digits.get(PLACES.index(place), "none")
        assert drawing.questions["read"][0] == "read"
        assert drawing.questions["count"][0] == "how many?"


def centered(ink):
    """Moves the center of mass to the middle."""
    shift = HALF / 2 - np.argwhere(ink).mean(axis=0)
    return np.roll(ink, np.rint(shift).astype(int), axis=(0, 1))


def printed(digit):
    image = Image.new("L", (HALF, HALF))
    ImageDraw.Draw(image).text((8, 0), digit, fill=255, font=ImageFont.load_default(23))
    return centered(np.asarray(image) > 127)


def test_digits_look_like_those_that_the_answers_name(drawings):
    """Most resemble this printed digit more than any other, though they have another size."""
    digits = "".join(map(str, range(10)))
    known = np.stack([printed(digit) for digit in digits])
    right = []
    for drawing in drawings:
        for corner, digit in digits_of(drawing).items():
            ink = centered(drawing.pixels[CORNERS[corner]][..., 0] < 130)
            right.append(digits[(known != ink).sum(axis=(1, 2)).argmin()] == digit)
    assert np.mean(right) > 0.8


def test_no_answer_or_order_of_questions_is_much_more_frequent_than_others(drawings):
    """Otherwise a model could guess."""
    counted = [answers_to(drawing)["count"] for drawing in drawings]
    asked = [drawing.questions["place"][0] for drawing in drawings]
    for found, choices in ((counted, 3), (asked, 4)):
        counts = np.unique(found, return_counts=True)[1] / len(drawings)
        assert len(counts) == choices
        assert counts.max() < 1.3 / choices
    assert len({tuple(drawing.questions) for drawing in drawings}) == 6


@pytest.mark.parametrize("split", COUNTS)
def test_a_row_is_a_drawing_with_all_its_questions(split):
    rows = open_rows(split)
    assert len(rows) == COUNTS[split]
    assert rows.description == f"{COUNTS[split]:,} drawings, one in each row of 128"
    run = SimpleNamespace(model=TINY, data=CONFIG, sequence_length=128)
    example = jax.tree.map(lambda a: (a.shape, a.dtype), FAMILIES["vision_language"].example(run))
    for number in (0, 5, len(rows) - 1):
        row, drawing = rows[number], draw(split, number)
        asked = [f"user: {q}¶assistant: {a}¶" for q, a in drawing.questions.values()]
        shown = asked[0].replace("user: ", f"user: [{'#' * TINY.features}]")
        written = "".join([shown, *asked[1:]])
        # The last token is only predicted.
        assert text_of(row.tokens[row.segments > 0]) + "¶" == written
        assert answers_of(row._replace(tokens=np.append(row.tokens, 0))) == "".join(
            f"{answer}¶" for _, answer in drawing.questions.values()
        )
        assert np.array_equal(row.images, drawing.pixels[None])
        for given in (row, rows.padding):
            assert jax.tree.map(lambda a: (a.shape, a.dtype), given) == example
    assert not rows.has_labels(rows.padding)


def test_a_row_that_is_too_short_is_the_beginning_of_a_longer_one():
    short, long = (open_rows(sequence=sequence)[0] for sequence in (60, 128))
    for name in ("tokens", "labels", "positions", "segments"):
        assert np.array_equal(getattr(short, name), getattr(long, name)[:60])


def test_splits_templates_and_lengths_have_digests_of_their_own():
    cases = {}, {"split": "held_out"}, {"sequence": 112}, {"template": "[{role}]{content}{end}"}
    digests = [open_rows(**case).digest for case in (*cases, {"picture_before": ""})]
    assert len(set(digests)) == 5
    assert open_rows().digest == digests[0]


@pytest.mark.parametrize(
    "model", [MODEL, dataclasses.replace(TINY, image_token=254)], ids=["size", "image_token"]
)
def test_a_model_for_other_pictures_is_refused(model):
    has = rf"images of {model.tower.images.size} pixels and image_token={model.image_token}: train "
    with pytest.raises(UserError, match=f"are pictures of 56 x 56 pixels .* 255 .*{has}vlm_tiny"):
        open_rows(model=model)


@pytest.mark.parametrize(
    "changes",
    [
        {"train": ("drawings", "a.jsonl")},
        {"held_out": ("a.jsonl",)},
        {"tokenizer": "tokenizer.json"},
        {"pictures_per_row": 2},
    ],
)
def test_settings_that_drawings_would_ignore_are_refused(changes):
    with pytest.raises(UserError, match=r'^data.train="drawings" takes neither .* leave these out'):
        open_rows(**changes)
