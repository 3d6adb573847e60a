"""Near-duplicates among documents, by the windows of text that they share.

    fingerprint    hashes of all windows of 32 characters, of which 1 in 16 is kept by its value
    new            at most half of the fingerprint was seen in earlier documents

White space does not count. Keeping hashes by their value (Manber 1994) finds the same windows
wherever they stand, so that copies, other versions of a file and parts of larger files are all
recognized. What was seen is one bit for each of 2^28 hashes; 300 MB of text set 7 % of them, far
from the half that matters.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from jaxtyping import Bool, UInt32

WINDOW, SAMPLE, BITS = 32, 16, 28
SEEN_BEFORE = 0.5
TOGETHER = 4_000_000  # bytes that are hashed at once


def distinct(texts: list[bytes]) -> list[bool]:
    """For each document, whether it is new: at most half of its fingerprint was seen before."""
    seen: Bool[np.ndarray, " N"] = np.zeros(1 << BITS, bool)
    new = []
    for fingerprint in _fingerprints(texts):
        is_new = len(fingerprint) > 0 and float(seen[fingerprint].mean()) <= SEEN_BEFORE
        if is_new:
            seen[fingerprint] = True
        new.append(is_new)
    return new


def _fingerprints(texts: list[bytes]) -> Iterator[UInt32[np.ndarray, " N"]]:
    """The fingerprint of each document; NumPy hashes several batches at a time."""
    batches: list[list[bytes]] = [[]]
    size = 0
    for text in texts:
        if size > TOGETHER:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for fingerprints in pool.map(_of_batch, batches):
            yield from fingerprints


def _of_batch(texts: list[bytes]) -> list[UInt32[np.ndarray, " N"]]:
    """The fingerprints of some documents, hashed as one array."""
    bare = [text.translate(None, b" \t\r\n") for text in texts]
    ends = np.cumsum([len(text) for text in bare])
    hashes = np.frombuffer(b"".join(bare), np.uint8).astype(np.uint64) + np.uint64(1)
    width, factor = 1, 0x9E3779B97F4A7C15
    while width < WINDOW:  # the hash of a window from those of its halves
        hashes = hashes[:-width] * np.uint64(factor) + hashes[width:]
        factor = factor * factor % 2**64
        width *= 2
    hashes ^= hashes >> np.uint64(33)
    hashes *= np.uint64(0xFF51AFD7ED558CCD)
    at = np.flatnonzero(hashes >> np.uint64(BITS) & np.uint64(SAMPLE - 1) == 0)
    codes = (hashes[at] & np.uint64((1 << BITS) - 1)).astype(np.uint32)
    fingerprints = []
    for begin, end in zip((0, *ends[:-1]), ends, strict=True):
        first, last = np.searchsorted(at, (begin, max(end - WINDOW + 1, begin)))
        fingerprints.append(np.unique(codes[first:last]))
    return fingerprints
