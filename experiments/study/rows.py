"""Rows of a study: what names one, and files of them that grow and merge.

A row is named by its key, a digest of all that decides the run: the arm field by field, the model,
the seed, the settings, the text, and the version of the study. It also has the hash of the code
that measured it, which decides nothing.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments import row_files
from experiments.records import code_hash
from experiments.row_files import Row, digest
from experiments.study.description import described

DECIDES = (
    *("definition", "model", "settings", "seed", "seeds", "learning_rate"),
    *("text", "version"),
)
OTHERS = {"key", "arm", "size", "code", "seconds", "parents"}
GONE = {"forward", "spikes"}  # which earlier versions measured


def named(row: Row) -> Row:
    """A row before it is measured, with its key and the hash of the code."""
    return {"key": key_of(row)} | row | {"code": code_hash()}


def new_rows(
    call: Any, name: str, seeds: Sequence[int], arm: Any, model: Any, **more: Any
) -> list[Row]:
    """The rows of an arm before they are measured, one for each seed.

    Args:
        call: see `experiments.study.study.Call`.
        name: of the arm.
        seeds: of the arm.
        arm: what its dataclass says.
        model: all that decides the model besides, as JSON.
        more: entries of each row.
    """
    shared = {
        "arm": name,
        "size": call.size,
        "settings": dataclasses.asdict(call.settings),
        "definition": described(arm),
        "model": digest(model),
        **more,
    }
    return [named({**shared, "seed": seed}) for seed in seeds]


def key_of(row: Row) -> str:
    """The digest of all that decides a run; the names of arm and size are not part of it."""
    return digest({name: row[name] for name in DECIDES if name in row})


def keep(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Adds the rows that a file does not have, at its end, and returns all."""
    known = row_files.read([path])
    keys = {row["key"] for row in known}
    new = {row["key"]: row for row in rows if row["key"] not in keys}
    whole = [*known, *new.values()]
    row_files.write(path, whole)
    return whole


def measured_of(row: Row) -> set[str]:
    """The fields that tell of which study a measured row is."""
    return row.keys() - OTHERS - GONE - set(DECIDES)
