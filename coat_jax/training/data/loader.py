"""The loader: which rows a batch has, read ahead by threads.

    order    epoch e is the permutation number (seed, e) of all rows; epochs follow each other
    batch i  rows i B .. (i + 1) B - 1 of that order
    process  p of P has the p-th of P equal parts of each batch

A batch is therefore a pure function of data, seed and i: the number of processes or threads does
not matter, nor whether the run was interrupted. The state is one number. Shuffling is grain's: a
permutation that is computed, not stored.
"""

from typing import Any

import numpy as np

from coat_jax.errors import UserError
from coat_jax.printable import counted
from coat_jax.training.data.rows import IGNORED, Batch, Rows, padded

THREADS, BATCHES_AHEAD = 4, 8


class Loader:
    """An iterator over one process's parts of the batches.

    Attributes:
        tokens: the number of tokens in an epoch.
        rows: the number of rows in an epoch.
        batches: the number of batches in all epochs; None without end.
        packed: whether a row may hold several documents. If not, positions and segments are those
            that a model assumes without them.
        digest: names the data and how it is split into rows.
        end_of_text: the token that ends a document, if one is known.
        description: of the data, for the terminal.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
        epochs: int | None = None,
    ):
        """See `load`."""
        if batch < 1 or batch % processes:
            raise UserError(
                f"batch={batch} cannot be divided among {processes} processes: make it a multiple "
                f"of {processes}."
            )
        self.tokens, self.rows = rows.tokens, len(rows)
        self.batches = None if epochs is None else -(-len(rows) * epochs // batch)
        self.packed, self.digest = rows.packed, rows.digest
        self.end_of_text = rows.end_of_text
        self.description = f"{rows.tokens:,} tokens in {len(rows):,} rows of {rows.sequence:,}"
        if rows.truncated:
            self.description += f"; truncated to that length: {counted(rows.truncated, 'document')}"
        if epochs is None and batch > len(rows):
            self.description += f"; each batch has {batch:,} rows, so it repeats some of them"
        self._batch, self._seed, self._next = batch, seed, 0
        self._ordered = _ordered(rows, batch, seed, epochs)
        parts = self._ordered.batch(batch // processes, drop_remainder=True)
        self._parts = parts[process::processes]
        self._reader: Any = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._reader is None:
            self._reader = _reader(self._parts[self._next :])
        batch = next(self._reader)
        self._next += 1
        return batch

    def has_labels(self, batches: int) -> bool:
        """Whether any token is to be predicted in the first `batches` batches."""
        rows = range(min(batches * self._batch, len(self._ordered)))
        return any(np.any(self._ordered[row].labels != IGNORED) for row in rows)

    def state(self) -> dict[str, Any]:
        """The position of the iterator, for JSON: the same in every process."""
        return {"data": self.digest, "seed": self._seed, "rows": self._next * self._batch}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves to where a loader of the same data stood; raises if the data differs."""
        for name, own in (("data", self.digest), ("seed", self._seed)):
            if state[name] != own:
                raise UserError(
                    f"The run to resume read {name}={state[name]!r}, and this one would read "
                    f"{name}={own!r}. Resume with the data, the sequence length and the seed that "
                    "it began with, or start a new run."
                )
        if state["rows"] % self._batch:
            raise UserError(
                f"The run to resume has read {state['rows']:,} rows, no multiple of "
                f"batch={self._batch}. Resume with a batch that divides them."
            )
        self.close()
        self._next = state["rows"] // self._batch

    def close(self) -> None:
        """Stops reading ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _ordered(rows: Rows, batch: int, seed: int, epochs: int | None) -> Any:
    """The rows of all batches, by number."""
    import grain

    # grain shuffles epoch e with seed + e: neighbouring seeds would share epochs.
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    ordered = grain.MapDataset.source(rows).shuffle(spread).repeat(epochs)
    missing = -len(ordered) % batch
    if epochs is not None and missing:
        nothing = padded(Batch(*np.zeros((4, 0), np.int32)), rows.sequence)
        filling = grain.MapDataset.source([nothing]).repeat(missing)
        ordered = grain.MapDataset.concatenate([ordered, filling])
    return ordered


def _reader(parts: Any) -> Any:
    import grain

    return iter(parts.to_iter_dataset(grain.ReadOptions(THREADS, BATCHES_AHEAD)))
