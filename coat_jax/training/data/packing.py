"""Packing: short documents share a row, each with its own segment, and none is split.

Documents are taken in a random order and put where they leave the least room (best fit). The plan
depends on their lengths alone, so every process makes the same one. A document that is longer than
a row has a row to itself and is truncated. Rows may also have a limit of pictures.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int64, UInt

from coat_jax.models.batches import IGNORED
from coat_jax.printable import amount
from coat_jax.tokenizers import digest_of
from coat_jax.training.data.rows import TextRows, documents_of, pad


class Documents(NamedTuple):
    """Documents one after another, as tokens."""

    tokens: UInt[np.ndarray, " N"]
    learned: Bool[np.ndarray, " N"]  # whether the token is to be predicted
    ends: Int64[np.ndarray, " D"]  # where each ends

    def part(self, numbers: range) -> "Documents":
        """Returns the documents of a range of indices."""
        edges = np.concatenate([[0], self.ends])[numbers.start : numbers.stop + 1]
        within = slice(edges[0], edges[-1])
        return Documents(self.tokens[within], self.learned[within], edges[1:] - edges[0])


def plan(
    lengths: Int[np.ndarray, " D"],
    sequence: int,
    seed: int,
    pictures: Int[np.ndarray, " D"] | None = None,
    most_pictures: int = 0,
) -> list[list[int]]:
    """Returns the indices of the documents in each row.

    Args:
        lengths: tokens of the documents.
        sequence: tokens of a row.
        seed: of the order of the documents.
        pictures: how many each document has; none by default.
        most_pictures: how many fit in a row.
    """
    rows: list[list[int]] = []
    # By how many more pictures a row can take, and by its room for tokens.
    by_room: list[dict[int, list[int]]] = [{} for _ in range(most_pictures + 1)]
    rooms = [0] * (most_pictures + 1)  # bit r: a row has room for r tokens
    seen = np.zeros_like(lengths) if pictures is None else pictures
    for number in np.random.default_rng(seed).permutation(len(lengths)).tolist():
        length, taken = min(int(lengths[number]), sequence), int(seen[number])
        # The best fit is the lowest bit; among equals, the row that can take fewest pictures.
        fitting = [
            (length + ((bits := rooms[more] >> length) & -bits).bit_length() - 1, more)
            for more in range(taken, most_pictures + 1)
            if rooms[more] >> length
        ]
        if fitting:
            room, more = min(fitting)
            row = by_room[more][room].pop()
            if not by_room[more][room]:
                rooms[more] ^= 1 << room
        else:
            room, more, row = sequence, most_pictures, len(rows)
            rows.append([])
        rows[row].append(number)
        if room > length:
            by_room[more - taken].setdefault(room - length, []).append(row)
            rooms[more - taken] |= 1 << (room - length)
    return rows


class Packed(TextRows):
    """Documents that share rows."""

    def __init__(
        self,
        documents: Documents,
        *,
        sequence: int,
        seed: int,
        end_of_text: int | None,
        pictures: Int[np.ndarray, " D"] | None = None,
        most_pictures: int = 0,
    ):
        lengths = np.diff(documents.ends, prepend=0)
        self._documents, self._starts = documents, documents.ends - lengths
        self._plan = plan(lengths, sequence, seed, pictures, most_pictures)
        arrays = tuple(hashlib.sha256(array.data).hexdigest() for array in documents)
        digested = digest_of(repr(arrays).encode()), self._plan, sequence
        super().__init__(sequence, len(documents.tokens), end_of_text, digested)
        if truncated := int(np.sum(lengths > sequence)):
            self.description += f"; truncated to that length: {amount(truncated, 'document')}"

    def __len__(self) -> int:
        return len(self._plan)

    def __getitem__(self, row: int) -> Any:
        tokens, learned, ends = self._documents
        places = np.concatenate(
            [np.arange(self._starts[d], ends[d])[: self.sequence] for d in self._plan[row]]
        )
        following = np.minimum(places + 1, len(tokens) - 1)
        # In the tokens' own dtype, IGNORED would be a token.
        labels = np.where(learned[following], tokens[following].astype(np.int32), IGNORED)
        is_last = np.isin(places + 1, ends[self._plan[row]])
        return pad(documents_of(tokens[places].astype(np.int32), labels, is_last), self.sequence)
