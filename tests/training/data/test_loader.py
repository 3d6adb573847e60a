"""Laws of the loader: a batch depends on data, seed and its number, and on nothing else."""

import itertools
import json

import numpy as np
import pytest
from data_cases import counting_rows, numbers_of, same
from hypothesis import given, settings
from hypothesis import strategies as st

from coat_jax.training.data import Loader
from coat_jax.training.data.rows import IGNORED, Windows

sizes = st.integers(1, 17)


def take(loader, count):
    batches = list(itertools.islice(loader, count))
    loader.close()
    return batches


def order_of(seed, epochs=1, rows=64, batch=64):
    loader = Loader(counting_rows(rows), batch=batch, seed=seed, epochs=epochs)
    return [tuple(numbers_of(part)) for part in loader]


@settings(max_examples=10)
@given(sizes, sizes, st.integers(1, 3), st.integers(0, 2**64))
def test_every_row_is_read_once_in_each_epoch(rows, batch, epochs, seed):
    order = [number for part in order_of(seed, epochs, rows, batch) for number in part]
    for epoch in range(epochs):
        assert sorted(order[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert len(order) == rows * epochs


@settings(max_examples=10)
@given(sizes, st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([None, 1, 2]))
def test_batches_do_not_depend_on_the_number_of_processes(rows, per_process, processes, epochs):
    shared = {"batch": per_process * processes, "seed": 1, "epochs": epochs}
    alone = Loader(counting_rows(rows), **shared)
    parts = [
        Loader(counting_rows(rows), process=process, processes=processes, **shared)
        for process in range(processes)
    ]
    joined = [
        [np.concatenate(arrays) for arrays in zip(*(part[:2] for part in of_each), strict=True)]
        for of_each in zip(*(take(part, 6) for part in parts), strict=True)
    ]
    whole = take(alone, 6)
    assert [part.state() for part in parts] == [alone.state()] * processes
    assert len(whole) == len(joined)
    assert all(same(part[:2], other) for part, other in zip(whole, joined, strict=True))


@settings(max_examples=6)
@given(sizes, st.integers(1, 5), st.integers(0, 12), st.sampled_from([None, 3]))
def test_a_restored_loader_continues_with_the_same_rows(rows, batch, done, epochs):
    shared = {"batch": batch, "seed": 5, "epochs": epochs}
    first, second = Loader(counting_rows(rows), **shared), Loader(counting_rows(rows), **shared)
    list(itertools.islice(first, done))
    list(itertools.islice(second, 2))  # where it stood itself does not matter
    second.restore(json.loads(json.dumps(first.state())))
    assert second.state() == first.state()
    following = take(first, 4)
    left = 4 if epochs is None else max(-(-rows * epochs // batch) - done, 0)
    assert len(following) == min(4, left)
    assert all(itertools.starmap(same, zip(following, take(second, 4), strict=True)))


def test_a_resumed_run_may_have_another_batch():
    expected = [
        n for b in take(Loader(counting_rows(8), batch=1, seed=0), 10) for n in numbers_of(b)
    ]
    for batch in (2, 3):
        first, second = (Loader(counting_rows(8), batch=size, seed=0) for size in (4, batch))
        take(first, 1)
        second.restore(first.state())
        assert [n for b in take(second, 2) for n in numbers_of(b)] == expected[4 : 4 + 2 * batch]


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [order for seed in range(4) for order in order_of(seed, epochs=4)]
    assert len(set(orders)) == len(orders)
    assert tuple(range(64)) not in orders
    assert order_of(3) == order_of(3)


def test_the_last_batch_is_filled_with_padding_and_without_epochs_there_is_none():
    *_, last = batches = list(Loader(counting_rows(5), batch=4, seed=0, epochs=1))
    assert len(batches) == 2
    assert (last.labels < 0).all(axis=1).sum() == 3
    assert last.tokens.shape == last.labels.shape == (4, 4)
    assert len(take(Loader(counting_rows(3), batch=2, seed=0), 12)) == 12


def test_it_says_what_there_is():
    loader = Loader(counting_rows(3), batch=2, seed=0)
    assert loader.description == "13 tokens in 3 rows of 4"
    large = Loader(counting_rows(3), batch=4, seed=0).description
    assert large == f"{loader.description}; each batch has 4 rows, so it repeats some of them"
    assert Loader(counting_rows(3), batch=4, seed=0, epochs=1).description == loader.description


class LabelsInTheLastRow(Windows):
    """Of all others, no token is to be predicted."""

    def __getitem__(self, row):
        found = super().__getitem__(row)
        last = row == len(self) - 1
        return found if last else found._replace(labels=np.full_like(found.labels, IGNORED))


def test_labels_are_found_in_every_row_of_the_first_batches():
    rows = counting_rows(6, kind=LabelsInTheLastRow)
    for seed in range(4):
        first, second = (Loader(rows, batch=2, seed=seed, epochs=1) for _ in range(2))
        with_labels = [bool((batch.labels >= 0).any()) for batch in first]
        assert sum(with_labels) == 1
        place = with_labels.index(True)
        assert [second.has_labels(count) for count in (1, 2, 3)] == [n >= place for n in range(3)]


def test_impossible_batches_and_states_of_other_runs_are_refused():
    for how, message in (
        ({"batch": 3, "processes": 2}, "batch=3 cannot be divided among 2"),
        ({"batch": 0}, "batch=0"),
    ):
        with pytest.raises(ValueError, match=message):
            Loader(counting_rows(8), seed=0, **how)
    loader = Loader(counting_rows(8), batch=2, seed=0)
    for state, message in (
        ({"data": "0" * 16}, "data="),
        ({"seed": 8}, "seed=8"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.restore(loader.state() | state)
