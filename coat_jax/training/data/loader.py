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
from coat_jax.training.data.rows import Rows

THREADS, BATCHES_AHEAD = 4, 8


class Loader:
    """An iterator over one process's parts of the batches.

    Args:
        rows: those of an epoch.
        batch: rows in a batch, of all processes together.
        seed: of the order of the rows.
        process: the number of this process among those that read different rows.
        processes: how many there are.
        epochs: how often all data is read, with the last batch padded; None continues without end.

    Attributes:
        rows: those of an epoch.
        end_of_text: the token that ends a document, if one is known.
        description: of the data, for the terminal.
        example: a row.
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
        import grain

        if batch < 1 or batch % processes:
            raise UserError(
                f"batch={batch} cannot be divided among {processes} processes: make it a multiple "
                f"of {processes}."
            )
        self.rows, self.example, self.end_of_text = rows, rows[0], rows.end_of_text
        self.description = rows.description
        if epochs is None and batch > len(rows):
            self.description += f"; each batch has {batch:,} rows, so it repeats some of them"
        self._batch, self._seed, self._read = batch, seed, 0
        self._process, self._processes = process, processes
        # grain shuffles epoch e with seed + e: neighbouring seeds would share epochs.
        spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._ordered = grain.MapDataset.source(rows).shuffle(spread).repeat(epochs)
        missing = -len(self._ordered) % batch
        if epochs is not None and missing:
            filling = grain.MapDataset.source([rows.padding]).repeat(missing)
            self._ordered = grain.MapDataset.concatenate([self._ordered, filling])
        self._reader: Any = None

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Any:
        import grain

        if self._reader is None:
            following = self._ordered[self._read :]
            parts = following.batch(self._batch // self._processes, drop_remainder=True)
            options = grain.ReadOptions(THREADS, BATCHES_AHEAD)
            self._reader = iter(parts[self._process :: self._processes].to_iter_dataset(options))
        batch = next(self._reader)
        self._read += self._batch
        return batch

    def has_labels(self, batches: int) -> bool:
        """Returns whether a row of the first `batches` batches adds to the loss."""
        rows = range(min(batches * self._batch, len(self._ordered)))
        return any(self.rows.has_labels(self._ordered[row]) for row in rows)

    def state(self) -> dict[str, Any]:
        """Returns the iterator's position, for JSON: the same in every process."""
        return {"data": self.rows.digest, "seed": self._seed, "rows": self._read}

    def restore(self, state: dict[str, Any]) -> None:
        """Moves to where a loader of the same data stood; raises if the data differs."""
        for name, own in (("data", self.rows.digest), ("seed", self._seed)):
            if state[name] != own:
                raise UserError(
                    f"The run to resume read {name}={state[name]!r}, and this one would read "
                    f"{name}={own!r}. Resume with the data, the sequence length and the seed that "
                    "it began with, or start a new run."
                )
        self._read = state["rows"]
        self.close()

    def close(self) -> None:
        """Stops reading ahead."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
