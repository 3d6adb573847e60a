"""Files of results that accumulate: one row for each measurement, on a line of JSON.

    {"runs": [
    {"key": ..., ...},
    ...
    ]}

A row is named by its key, a digest of everything that decides the measurement, so files can be
merged, and what has a row is not measured again. The code that measured it is not part of the key.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coat_jax import writing
from experiments import records

Row = dict[str, Any]


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of some files, each key once: the first one counts. Missing files have none."""
    rows: dict[str, Row] = {}
    for path in paths:
        if path.exists():
            for row in json.loads(path.read_text("utf-8"))["runs"]:
                rows.setdefault(row["key"], row)
    return list(rows.values())


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows, one on each line; the file is there whole or as it was."""
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    writing.replace(path, f'{{"runs": [\n{lines}\n]}}\n')


def rounded(value: float) -> float:
    """A measured number as rows have it, with six digits."""
    return float(f"{value:.6g}")


def parents() -> dict[str, Any]:
    """Where a row that this process measures comes from."""
    found = records.parents()
    return {
        "commit": found["commit"],
        "dirty": found["dirty"],
        "device": found["hardware"]["device"],
        "versions": found["versions"],
        "date": found["date"],
    }


def digest(content: Any) -> str:
    """A short hash of JSON."""
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
