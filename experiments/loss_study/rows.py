"""The rows of text that a run of `loss_study` reads, as batches on its device."""

from pathlib import Path

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32, UInt16

from coat_jax.training.cluster.mesh import place
from coat_jax.training.data import Batch
from experiments.loss_study import text as texts
from experiments.loss_study.arm import Settings


def row_order(
    tokens: UInt16[np.ndarray, " N"], settings: Settings, seed: int
) -> Int32[np.ndarray, " R"]:
    """The rows of a run in the order of its steps, each at most once."""
    texts.require_rows(len(tokens), settings.rows, settings.sequence)
    rows = (len(tokens) - 1) // settings.sequence
    return np.random.default_rng(seed).permutation(rows)[: settings.rows].astype(np.int32)


def placed_rows(
    tokens: UInt16[np.ndarray, " N"],
    rows: Int32[np.ndarray, " B"],
    sequence: int,
    parts: int,
    mesh: Mesh,
) -> Batch:
    """These rows as a batch on the device; a row's last label is the next row's first token."""
    at = rows[:, None].astype(np.int64) * sequence + np.arange(sequence + 1)
    whole = tokens[at].astype(np.int32)
    placed: Batch = place(Batch(whole[:, :-1], whole[:, 1:]), mesh, microbatches=parts)
    return placed


def held_out_batches(text: Path, vocab: int, settings: Settings, mesh: Mesh) -> list[Batch]:
    """The held-out rows of a run, on its device."""
    tokens = texts.load(text, "held_out", vocab)
    available = (len(tokens) - 1) // settings.sequence
    size = settings.batch // settings.accumulation
    batches = min(settings.held_out, available) // size
    if batches == 0:
        raise ValueError(f"The held-out text has {available} rows, too few for a batch of {size}.")
    rows = np.arange(batches * size, dtype=np.int32).reshape(batches, size)
    return [placed_rows(tokens, part, settings.sequence, 1, mesh) for part in rows]
