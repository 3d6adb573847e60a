"""Which runs of the loss study can be compared: those of the same conditions."""

import json
from collections import defaultdict
from typing import Any

from coat_jax.errors import UserError
from experiments.loss_study.arm import Arm
from experiments.row_files import Row
from experiments.study.description import described

# Raise it when a change of the code changes what a run computes: runs are made again, and those of
# earlier versions become arms of their own, as "coat@5".
VERSION = 6
EXACT_ATTENTION = 7  # of arms that save attention's operands in FP8: before, it computed with them
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
# Fields that arms had once, with the values of those that did without.
GONE = {"shaken": 0, "accurate": []}


def version_of(arm: Arm) -> int:
    """The version of an arm's runs."""
    precision = arm.precision
    saves = precision.attention_block is not None and precision.exact_forward
    return EXACT_ATTENTION if saves else VERSION


def of_today(row: Row) -> Row:
    """A row that names its version, with the definition that its arm has today."""
    version = row.get("version", VERSIONS.get(row["code"], 6))
    return row | {"version": version, "definition": completed(row["definition"])}


def completed(definition: dict[str, Any]) -> dict[str, Any]:
    """What defines an arm, with all fields of today."""
    usual: dict[str, Any] = described(Arm())
    whole = usual | {name: v for name, v in definition.items() if GONE.get(name, ...) != v}
    whole["precision"] = usual["precision"] | whole["precision"]
    return whole


def conditions_of(rows: list[Row]) -> dict[str, list[Row]]:
    """Runs of the same model, settings, text, optimizer and optimizer settings, by what these are.

    An arm that was measured in several versions is several arms: the latest keeps the name, and the
    version is added to that of others.
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
    newest: dict[str, int] = {}
    definitions: dict[tuple[str, int], Any] = {}
    for row in rows:
        arm, version = row["arm"], row["version"]
        newest[arm] = max(newest.get(arm, 0), version)
        if definitions.setdefault((arm, version), row["definition"]) != row["definition"]:
            raise UserError(f"The arm {arm} was defined in two ways: give one another name.")
    return [
        row
        if row["version"] == newest[row["arm"]]
        else row | {"arm": f"{row['arm']}@{row['version']}"}
        for row in rows
    ]
