"""The results of `stability`: one row for each arm, learning rate and group of seeds.

    final, outcome, onset, spikes, skipped    of each seed, from its loss at every step
    curves                                    every n-th step of loss, gradient norm and sharpness

A row is named by its key, a hash of everything that decides the result: the arm field by field, the
model, learning rate, seeds, settings, the text and the version of the study. A run that has a row
is not measured again. A row also has the hash of the code that made it, which decides nothing.

Curves are the base64 of zlib of float16 [3, seeds, points], so that thousands of them fit a file of
a megabyte: the error is at most 0.05 %, and numbers above 65504 become infinite.
"""

import base64
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from experiments import row_files
from experiments.records import code_hash
from experiments.row_files import Row, digest
from experiments.stability.arm import Arm, Settings, Size, described
from experiments.stability.events import Events, Spike
from experiments.stability.train import Signals

FILE = "stability.json"
# Raise it when a change of the code changes what a run computes: runs are then made again.
VERSION = 1  # which rows that name none have, too
DIGITS = 4


class Sample(NamedTuple):
    """All runs of an arm at one learning rate.

    Attributes:
        seeds: of the runs.
        events: what happened in each.
        skipped: steps of each that were not finite.
        signals: of every n-th step, [runs, points].
    """

    seeds: tuple[int, ...]
    events: tuple[Events, ...]
    skipped: tuple[int, ...]
    signals: Signals


class Conditions(NamedTuple):
    """Runs that can be compared, and under which conditions they were made.

    Attributes:
        name: for files; no other conditions have it.
        size: of the model.
        settings: of the runs.
        ceiling: the loss without learning; see `events`.
        device: that they were made on; several are joined.
        commits: that they were made at, shortened and joined.
        arms: samples by arm and learning rate.
    """

    name: str
    size: str
    settings: Settings
    ceiling: float
    device: str
    commits: str
    arms: dict[str, dict[float, Sample]]


def row_of(
    name: str,
    arm: Arm,
    size_name: str,
    size: Size,
    settings: Settings,
    learning_rate: float,
    seeds: Sequence[int],
    text: str,
) -> Row:
    """A row before it is measured: what names it, and its key."""
    model = described(size.model)
    del model["precision"]  # the arm decides it
    decides = {
        "definition": described(arm),
        "model": digest(model),
        "settings": described(settings),
        "learning_rate": learning_rate,
        "seeds": list(seeds),
        "text": text,
        "version": VERSION,
    }
    names = {"key": key_of(decides), "arm": name, "size": size_name}
    return names | decides | {"code": code_hash()}


def key_of(row: Row) -> str:
    """The hash of what decides a result; the names of arm and size are not part of it."""
    fields = ("definition", "model", "settings", "learning_rate", "seeds", "text")
    return digest([row.get("version", 1), *(row[field] for field in fields)])


def measured(
    row: Row,
    events: Sequence[Events],
    signals: Signals,
    skipped: Sequence[int],
    ceiling: float,
    seconds: float,
) -> Row:
    """A row with what was measured.

    Args:
        row: from `row_of`.
        events: of each run.
        signals: of every step, [runs, steps].
        skipped: steps of each run that were not finite.
        ceiling: the loss without learning.
        seconds: that a run of the grid took, as its share of the program's time.
    """
    every = row["settings"]["every"]
    thinned = Signals(*(np.asarray(signal)[:, ::every] for signal in signals))
    return row | {
        "ceiling": _rounded(ceiling),
        "final": [_rounded(one.final) for one in events],
        "outcome": [one.outcome for one in events],
        "onset": [one.onset for one in events],
        "spikes": [[list(spike) for spike in one.spikes] for one in events],
        "skipped": [int(steps) for steps in skipped],
        "curves": packed(np.stack(thinned)),
        "seconds": round(seconds, 2),
        "parents": row_files.parents(),
    }


def _rounded(value: float) -> float | None:
    """A number with few digits; None for infinity, which JSON does not have."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None


def packed(curves: Float[np.ndarray, "3 runs points"]) -> dict[str, Any]:
    """Curves as JSON."""
    with np.errstate(over="ignore"):
        halves = curves.astype("<f2")
    return {
        "shape": list(halves.shape),
        "float16": base64.b64encode(zlib.compress(halves.tobytes(), 9)).decode(),
    }


def unpacked(stored: dict[str, Any]) -> Float[np.ndarray, "3 runs points"]:
    """Curves from JSON, in FP32."""
    raw = zlib.decompress(base64.b64decode(stored["float16"]))
    return np.frombuffer(raw, "<f2").reshape(stored["shape"]).astype(np.float32)


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of some files, each key once, in the order of `_place`."""
    return sorted(row_files.read(paths), key=_place)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows in the order of `_place`."""
    row_files.write(path, sorted(rows, key=_place))


def keep(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Adds rows to a file at once, and returns all that it has."""
    known = read([path])
    keys = {row["key"] for row in known}
    write(path, [*known, *(row for row in rows if row["key"] not in keys)])
    return read([path])


def _place(row: Row) -> tuple[Any, ...]:
    order = digest([row["settings"], row["text"]])
    return row["size"], order, row["arm"], row["learning_rate"], row["seeds"][0], row["key"]


# --- Comparing -------------------------------------------------------------------------------


def conditions_of(rows: list[Row]) -> list[Conditions]:
    """Groups of runs of the same model, settings and text.

    Of an arm that was defined in several ways, the newest definition counts. Of a seed that was
    measured with several versions of the code, the newest version counts: that of the latest day,
    and of one day, the one with the most runs of the arm. So seeds and learning rates may be added
    with newer code.
    """
    groups = defaultdict(list)
    for row in rows:
        groups[json.dumps([row["model"], row["settings"], row["text"]])].append(row)
    return [_conditions(group) for group in groups.values()]


def _conditions(rows: list[Row]) -> Conditions:
    by_arm: dict[str, dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    newest = _newest(rows)
    for row in newest:
        by_arm[row["arm"]][row["learning_rate"]].append(row)
    arms = {
        arm: {rate: _sample(group) for rate, group in sorted(of_arm.items())}
        for arm, of_arm in by_arm.items()
    }
    first = newest[0]
    which = digest([first["model"], first["settings"], first["text"]])
    return Conditions(
        f"{first['size'].lower().replace('.', '_')}_{which[:4]}",
        first["size"],
        Settings(**first["settings"]),
        first["ceiling"],
        ", ".join(sorted({row["parents"]["device"] for row in newest})),
        ", ".join(sorted({str(row["parents"]["commit"])[:9] for row in newest})),
        arms,
    )


def _newest(rows: list[Row]) -> list[Row]:
    """Each arm's rows of its newest definition, those of the newest code first."""
    runs: Counter[str] = Counter()
    latest: dict[str, str] = {}
    for row in rows:
        version = _version(row)
        runs[version] += len(row["seeds"])
        latest[version] = max(latest.get(version, ""), row["parents"]["date"])

    def age(row: Row) -> tuple[str, int, str]:
        version = _version(row)
        return latest[version], runs[version], version

    ranked = sorted(rows, key=age, reverse=True)
    definitions: dict[str, Any] = {}
    for row in ranked:
        definitions.setdefault(row["arm"], row["definition"])
    return [row for row in ranked if row["definition"] == definitions[row["arm"]]]


def _version(row: Row) -> str:
    return digest([row["arm"], row["definition"], row["code"]])


def _sample(rows: list[Row]) -> Sample:
    """The runs of several rows, each seed from the first row that has it."""
    seeds: list[int] = []
    events: list[Events] = []
    skipped: list[int] = []
    curves = []
    for row in rows:
        new = [i for i, seed in enumerate(row["seeds"]) if seed not in seeds]
        seeds += [row["seeds"][i] for i in new]
        events += [_events(row, i) for i in new]
        skipped += [row["skipped"][i] for i in new]
        curves.append(unpacked(row["curves"])[:, new])
    signals = Signals(*np.concatenate(curves, axis=1))
    return Sample(tuple(seeds), tuple(events), tuple(skipped), signals)


def _events(row: Row, i: int) -> Events:
    final = row["final"][i]
    return Events(
        row["outcome"][i],
        np.inf if final is None else final,
        row["onset"][i],
        tuple(Spike(*spike) for spike in row["spikes"][i]),
    )
