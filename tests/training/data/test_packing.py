"""Laws of packing: nothing is lost, nothing is split, nothing depends on who plans."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_jax.training.data.packing import Documents, Packed, plan
from coat_jax.training.data.rows import IGNORED

SEQUENCE = 8
lengths = st.lists(st.integers(1, SEQUENCE), min_size=1, max_size=40)


def documents_of(lengths):
    """Documents whose tokens are all different; the even ones are learned."""
    total = sum(lengths)
    tokens = np.arange(total, dtype=np.uint16)
    return Documents(tokens, tokens % 2 == 0, np.cumsum(lengths))


def rows_of(packed):
    return [packed[row] for row in range(len(packed))]


@given(lengths, st.integers(0, 9))
def test_no_document_is_missing_no_row_too_full_and_no_two_would_fit_in_one(lengths, seed):
    """A document opens a row only where it fits in no other. The plan is that of the seed."""
    rows = plan(np.array(lengths), SEQUENCE, seed)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[number] for number in row) for row in rows)
    assert filled[-1] <= SEQUENCE
    assert len(filled) < 2 or filled[0] + filled[1] > SEQUENCE
    assert plan(np.array(lengths), SEQUENCE, seed) == rows


@given(lengths)
def test_every_token_is_in_one_place_and_learned_ones_are_labels_one_place_ahead(lengths):
    documents = documents_of(lengths)
    packed = Packed(documents, sequence=SEQUENCE, seed=0, end_of_text=0)
    starts = (documents.ends - lengths).tolist()
    whole = [list(range(s, e)) for s, e in zip(starts, documents.ends.tolist(), strict=True)]
    found, labels = {}, []
    for row in rows_of(packed):
        for segment in range(1, row.segments.max() + 1):
            tokens = row.tokens[row.segments == segment].tolist()
            assert row.positions[row.segments == segment].tolist() == list(range(len(tokens)))
            found[tokens[0]] = tokens
        counted = row.labels != IGNORED
        assert (row.labels[counted] == row.tokens[counted] + 1).all()
        labels += row.labels[counted].tolist()
    assert [found[start] for start in starts] == whole
    assert len(found) == len(lengths)
    learned = {token for token in documents.tokens.tolist() if token % 2 == 0}
    assert sorted(labels) == sorted(learned - set(starts))


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=8), st.integers(0, 9))
def test_with_a_limit_of_pictures_each_document_goes_where_it_leaves_the_least_room(
    documents, seed
):
    """Among equals, where fewest pictures fit. It opens a row only where it fits in no other."""
    most = 3
    lengths, pictures = map(np.array, zip(*documents, strict=True))
    rows = plan(lengths, SEQUENCE, seed, pictures, most)
    row_of = {number: row for row, numbers in enumerate(rows) for number in numbers}
    room: dict[int, tuple[int, int]] = {}  # for tokens and for pictures
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    assert sorted(row_of) == sorted(order)
    for number in order:
        length, taken = min(lengths[number], SEQUENCE), pictures[number]
        fitting = [free for free in room.values() if free[0] >= length and free[1] >= taken]
        free = room.get(row_of[number], (SEQUENCE, most))
        assert free == min(fitting, default=(SEQUENCE, most))
        assert (row_of[number] in room) == bool(fitting)
        room[row_of[number]] = (free[0] - length, free[1] - taken)
    assert sum(map(len, rows)) == len(documents)


@given(lengths, st.integers(0, 9))
def test_a_limit_of_pictures_that_no_document_has_changes_nothing(lengths, seed):
    lengths = np.array(lengths)
    with_limit = plan(lengths, SEQUENCE, seed, np.zeros_like(lengths), 3)
    assert with_limit == plan(lengths, SEQUENCE, seed)


def test_documents_that_are_too_long_are_truncated_and_counted():
    packed = Packed(documents_of([11, 3, 20, SEQUENCE]), sequence=SEQUENCE, seed=0, end_of_text=0)
    assert packed.description.endswith("truncated to that length: 2 documents")  # the last fits
    rows = {row.tokens[0]: row for row in rows_of(packed)}
    assert rows[0].tokens.tolist() == list(range(8))
    # The token after the cut is still predicted.
    assert rows[0].labels.tolist() == [IGNORED, 2, IGNORED, 4, IGNORED, 6, IGNORED, 8]


def test_packing_is_nearly_full():
    lengths = np.random.default_rng(0).integers(1, 600, 3000)
    rows = plan(lengths, 2048, 0)
    assert rows != plan(lengths, 2048, 1)
    assert lengths.sum() / (len(rows) * 2048) > 0.99


def test_other_documents_or_another_plan_have_another_digest():
    cases = ([3, 4, 2], 8, 0), ([4, 3, 2], 8, 0), ([3, 4, 2], 7, 0), ([3, 4, 2], 8, 1)
    digests = {
        Packed(documents_of(lengths), sequence=sequence, seed=seed, end_of_text=0).digest
        for lengths, sequence, seed in cases
    }
    assert len(digests) == 4


def test_a_part_is_the_same_documents():
    documents = documents_of([2, 3, 4])
    middle = documents.part(range(1, 2))
    assert middle.tokens.tolist() == [2, 3, 4]
    assert middle.ends.tolist() == [3]
    assert documents.part(range(3)).ends.tolist() == documents.ends.tolist()
