"""Laws of rows that are cut from a stream."""

import itertools

import numpy as np
import pytest
from data_cases import END, windows_of
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.training.data.rows import IGNORED
from coat_jax.training.data.stream import SAMPLE, Stream, TokensInMemory

streams = st.tuples(
    st.lists(st.integers(0, 5), min_size=9, max_size=60), st.integers(1, 8)
)  # many documents, since END is one of six tokens; and a sequence length


def all_rows(tokens, sequence, end_of_text=END):
    rows = windows_of(tokens, sequence, end_of_text)
    assert all(len(array) == sequence for row in range(len(rows)) for array in rows[row])
    each = (rows[row] for row in range(len(rows)))
    return [np.concatenate(arrays) for arrays in zip(*each, strict=True)]


@given(streams)
def test_every_token_is_read_once_and_in_order(case):
    tokens, sequence = case
    inputs, _, _, segments = all_rows(tokens, sequence)
    assert inputs[segments > 0].tolist() == tokens[:-1]


@given(streams)
def test_labels_are_the_next_tokens_within_a_document(case):
    tokens, sequence = case
    _, labels, _, segments = all_rows(tokens, sequence)
    expected = [
        IGNORED if now == END else following for now, following in itertools.pairwise(tokens)
    ]
    assert labels[segments > 0].tolist() == expected


@given(streams)
def test_positions_and_segments_begin_again_in_each_document(case):
    tokens, sequence = case
    rows = windows_of(tokens, sequence, END)
    for number in range(len(rows)):
        row = rows[number]
        position, segment = 0, 1
        for place in np.flatnonzero(row.segments):
            assert (row.positions[place], row.segments[place]) == (position, segment)
            ends = row.tokens[place] == END
            position, segment = (0, segment + 1) if ends else (position + 1, segment)


@given(streams)
def test_padding_is_at_the_end_and_not_predicted(case):
    tokens, sequence = case
    _, labels, _, segments = all_rows(tokens, sequence)
    missing = -(len(tokens) - 1) % sequence
    assert np.count_nonzero(segments == 0) == missing
    assert not missing or (segments[-missing:] == 0).all()
    assert (labels[segments == 0] == IGNORED).all()


def test_without_an_end_of_text_a_row_is_one_document():
    _, labels, positions, segments = all_rows([0, 1, 0, 2, 3], 4, end_of_text=None)
    assert labels.tolist() == [1, 0, 2, 3]
    assert positions.tolist() == [0, 1, 2, 3]
    assert segments.tolist() == [1, 1, 1, 1]


def test_arrays_are_int32():
    assert {array.dtype for array in windows_of(range(9), 4, END)[1]} == {np.dtype(np.int32)}


def test_other_data_or_rows_of_another_length_have_another_digest():
    numbers = list(range(9))
    rows = [
        windows_of(numbers, 4),
        windows_of(numbers, 2),
        windows_of(numbers, 4, END),
        windows_of([*numbers[:-1], 9], 4),
    ]
    assert windows_of(numbers, 4).digest == rows[0].digest
    assert len({row.digest for row in rows}) == len(rows)


def test_too_few_tokens_for_a_row_are_refused():
    assert len(windows_of(range(5), 4)) == 1
    with pytest.raises(ValueError, match=r"4 tokens are too few for a sequence of 4 .*_length\.$"):
        windows_of(range(4), 4)


def test_an_end_of_text_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"end_of_text=300 .* vocabulary of 256"):
        windows_of(range(9), 4, end_of_text=300, vocab=256)


def test_the_end_of_a_text_is_in_the_vocabulary():
    windows_of(range(9), 4, end_of_text=255, vocab=256)
    with pytest.raises(ValueError, match=r"end_of_text=256 .* vocabulary of 256"):
        windows_of(range(9), 4, end_of_text=256, vocab=256)


def test_the_digest_of_a_long_stream_is_of_samples_from_all_of_it():
    found = set()
    for place in (0, 1, SAMPLE, 3 * SAMPLE - 1):
        tokens = np.zeros(3 * SAMPLE, np.uint16)
        tokens[place] = 1
        stream = Stream([TokensInMemory("tokens", tokens)])
        found.add(stream.digest(range(len(tokens)), vocab=2))
    assert len(found) == 4
