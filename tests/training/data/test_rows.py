"""Laws of rows that are cut from a stream."""

import itertools

import numpy as np
import pytest
from data_cases import END, windows_of
from hypothesis import given
from hypothesis import strategies as st

from coat_jax.training.data.rows import IGNORED, SAMPLE, Stream

# Many documents, since END is one of six tokens.
streams = st.lists(st.integers(0, 5), min_size=9, max_size=60)


@given(streams, st.integers(1, 8))
def test_rows_are_the_stream_and_documents_begin_anew(tokens, sequence):
    """Each token is read once, and labelled with the next one unless it ends a document."""
    rows = windows_of(tokens, sequence, END)
    inputs, labels = [], []
    for row in (rows[number] for number in range(len(rows))):
        assert all(array.shape == (sequence,) and array.dtype == np.int32 for array in row)
        real = np.count_nonzero(row.segments)
        assert (row.segments[real:] == 0).all()  # padding is at the end, and not predicted
        assert (row.labels[real:] == IGNORED).all()
        inputs += row.tokens[:real].tolist()
        labels += row.labels[:real].tolist()
        position, segment = 0, 1
        for place in range(real):
            assert (row.positions[place], row.segments[place]) == (position, segment)
            ends = row.tokens[place] == END
            position, segment = (0, segment + 1) if ends else (position + 1, segment)
    assert inputs == tokens[:-1]
    assert labels == [IGNORED if now == END else new for now, new in itertools.pairwise(tokens)]


def test_without_an_end_of_text_a_row_is_one_document():
    row = windows_of([0, 1, 0, 2, 3], 4)[0]
    assert row.labels.tolist() == [1, 0, 2, 3]
    assert (row.positions, row.segments) == (None, None)


def test_other_data_or_rows_of_another_length_have_another_digest():
    """Of a long stream, the digest is of samples from all of it."""
    numbers = list(range(9))
    cases = (numbers, 4), (numbers, 2), (numbers, 4, END), ([*numbers[:-1], 9], 4)
    digests = [windows_of(*case).digest for case in cases]
    assert windows_of(numbers, 4).digest == digests[0]
    assert len(set(digests)) == len(digests)
    found = set()
    for place in (0, 1, SAMPLE, 3 * SAMPLE - 1):
        tokens = np.zeros(3 * SAMPLE, np.uint16)
        tokens[place] = 1
        found.add(Stream({"tokens": tokens}, 2).digest(range(len(tokens))))
    assert len(found) == 4


def test_too_few_tokens_for_a_row_are_refused():
    assert len(windows_of(range(5), 4)) == 1
    with pytest.raises(ValueError, match=r"4 of its 4 tokens are too few for a sequence of 4 "):
        windows_of(range(4), 4)
