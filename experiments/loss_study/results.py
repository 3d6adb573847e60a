"""The results of `loss_study`: one row for each run, in a file that grows and merges.

A row is named by its key, a hash of everything that decides the result: the arm field by field,
the size, the seed, the settings, the text, and the version of the study. A run that has a row is
not measured again. A row also has the hash of the code that made it, which decides nothing.
"""

import dataclasses
import functools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coat_jax.limits import added_since
from experiments import row_files
from experiments.loss_study.arm import Arm, Settings, Size, described, is_described
from experiments.loss_study.arms import ARMS
from experiments.records import code_hash
from experiments.row_files import Row, digest

FILE = "loss_study.json"
# Raise it when a change of the code changes what a run computes: runs are made again, and those of
# earlier versions become arms of their own, as "coat@5".
VERSION = 6
# The versions of runs that do not name theirs, by their code; those of all other code are of 6.
VERSIONS = {
    "11b8d044c883": 1,
    "7996c24b9b0c": 2,
    "7dfaabb77905": 3,
    "281cc02d7210": 4,
    "26e42a267c58": 5,
    "c51e2fefd59a": 5,
    "68cd819d6469": 5,
}
# The field of a definition that has what `after_training` does after a run, as a digest. The first
# digests, which covered the code too, are of what has the last one.
AFTER_TRAINING = "after training"
FIRST_RECIPES = "c8a43cb91722", "6795ca705e05", "4b35a942f1ec", "3b7eb997d493"
RECIPES = "f49dee1d708d"
# The version of the code in which every precision did what `stochastic_backward` does today.
STOCHASTIC_BACKWARD = "83eda50b8686"


def row_of(
    name: str, arm: Arm, size_name: str, size: Size, seed: int, settings: Settings, text: str
) -> Row:
    """A row before it is measured: what names it, and its key."""
    row: Row = {
        "arm": name,
        "size": size_name,
        "seed": seed,
        "settings": dataclasses.asdict(settings),
        "text": text,
        "definition": described(arm),
        "model": model_of(size),
        "version": VERSION,
        "code": code_hash(),
    }
    return {"key": key_of(row)} | row


def key_of(row: Row) -> str:
    """The hash of what decides a result; an arm's name is not part of it."""
    fields = ("definition", "model", "seed", "settings", "text")
    return digest({field: row[field] for field in fields} | {"version": version_of(row)})


def version_of(row: Row) -> int:
    """The version of the study that a run was made with."""
    return int(row.get("version", VERSIONS.get(row["code"], 6)))


def model_of(size: Size) -> str:
    """The model of a size, without what an arm decides."""
    model = dataclasses.asdict(size.model)
    # A field that the first runs did not have is left out where its value is what they did.
    before = added_since(size.model)
    kept = (n for n in model if n != "precision" and (n not in before or model[n] != before[n]))
    return digest({name: str(model[name]) for name in kept})


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of some files, each key once, in the order of `_place`."""
    rows = (
        row | {"definition": completed(row["definition"], row["code"])}
        for row in row_files.read(paths)
    )
    return sorted(map(_named_today, rows), key=_place)


def write(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows in the order of `_place`."""
    row_files.write(path, sorted(rows, key=_place))


def completed(definition: Mapping[str, Any], code: str) -> dict[str, Any]:
    """What defines an arm, with fields that did not exist in the version `code` of the code.

    All saved values were rounded to nearest then.
    """
    whole: dict[str, Any] = {"shaken": 0, "rounded": [], "accurate": [], **definition}
    if whole.get(AFTER_TRAINING) in FIRST_RECIPES:
        whole[AFTER_TRAINING] = RECIPES
    if "tuned" in whole:  # once with hashes of the code
        whole["tuned"] = {name: of for name, of in whole["tuned"].items() if name != "code"}
        whole.pop("forward", None)
    for name in ("precision", "start"):
        precision = whole.get(name)
        if not isinstance(precision, dict):
            continue
        if "stochastic" not in precision:
            saves = precision["block"] is not None or precision["attention_block"] is not None
            precision = precision | {"stochastic": not saves}
        if "stochastic_backward" not in precision:
            precision = precision | {"stochastic_backward": code == STOCHASTIC_BACKWARD}
        precision = {"int8_forward": False} | precision
        # An option that was tried, and is gone.
        off = ("center_inputs", False)
        whole[name] = dict(entry for entry in precision.items() if entry != off)
    return whole


def _named_today(row: Row) -> Row:
    """The row with the name that its arm has today; arms are renamed, their definitions stay."""
    name = _name_of(json.dumps(row["definition"]))
    return row if name is None else row | {"arm": name}


@functools.cache  # many rows are of one arm
def _name_of(definition: str) -> str | None:
    """The name of the arm that is defined so, if there is one today."""
    by = json.loads(definition)
    return next((name for name, arm in ARMS.items() if is_described(arm, by)), None)


def merge(into: Path, others: Iterable[Path]) -> list[Row]:
    """Adds the rows of other files to a file, and returns all."""
    rows = read([into, *others])
    write(into, rows)
    return rows


def conditions_of(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs that can be compared: the same model, settings, text, optimizer and optimizer settings.

    An arm that was measured in several versions, or defined in several ways, is several arms: the
    latest keeps the name, and the version is added to that of others. Of one version, the latest
    date counts, and of one day, the definition with the most runs.
    """
    groups = defaultdict(list)
    for row in rows:
        optimizer = row["definition"]["optimizer"], trains_by_muon(row)
        shared = (row["model"], row["settings"], row["text"], optimizer)
        groups[json.dumps(shared, sort_keys=True)].append(row)
    named: dict[str, list[Row]] = {}
    for group in groups.values():
        first, settings = group[0], group[0]["settings"]
        tokens = settings["batch"] * settings["sequence"]
        name = (
            f"{first['size']}, {settings['steps']} steps of {settings['batch']} x "
            f"{settings['sequence']} = {settings['steps'] * tokens / 1e6:.1f} M tokens, learning "
            f"rate {settings['learning_rate']:g}"
        )
        if first["definition"]["optimizer"]:
            name += f", {first['definition']['optimizer']}"
        if trains_by_muon(first):
            name += ", Muon"
        while name in named:
            name += f", text {first['text']}"
        named[name] = _named_by_version(group)
    return named


def trains_by_muon(row: Row) -> bool:
    """Whether a run's optimizer is Muon; it is AdamW otherwise."""
    return (row["definition"]["moments"] or {}).get("is") == "Muon"


def baselines_of(rows: list[Row]) -> set[str]:
    """The arms that differ by rounding only, of whatever version."""
    return {row["arm"] for row in rows if row["definition"]["baseline"]}


def _named_by_version(rows: list[Row]) -> list[Row]:
    runs = Counter(map(_variant, rows))

    def age(row: Row) -> tuple[Any, ...]:
        return version_of(row), row["parents"]["date"], runs[_variant(row)]

    newest = {row["arm"]: _variant(row) for row in sorted(rows, key=age)}
    return [
        row
        if newest[row["arm"]] == _variant(row)
        else row | {"arm": f"{row['arm']}@{version_of(row)}"}
        for row in rows
    ]


def _variant(row: Row) -> str:
    return digest([row["arm"], row["definition"], version_of(row)])


def _place(row: Row) -> tuple[Any, ...]:
    return row["size"], digest([row["settings"], row["text"]]), row["seed"], row["arm"], row["key"]
