"""The results of `loss_study`: one row for each run, in a file that grows and merges.

A row is named by its key, a hash of everything that decides the result: the arm field by field,
the size, the seed, the settings, the text, and the code. A run that has a row, of this version of
the code or of one that trains alike, is not measured again.

The code counts without comments, docstrings, imports and layout, wherever its files are, and only
where it takes part: the layers of coat_jax below the trainer, the trainer's step, and the files of
the study that train.
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
from experiments.essence import ROOT, essence
from experiments.loss_study.arm import Arm, Settings, Size, described, is_described
from experiments.loss_study.arms import ARMS
from experiments.row_files import Row, digest

FILE = "loss_study.json"
# Folders of coat_jax that a run does not use, and the files of its trainer that it does.
ASIDE = ("cli", "evaluation", "generation", "quantization", "training")
STEP = ("batches", "optimizer", "preparation", "schedule", "state", "step")
STUDY = ("arm", "duplicates", "moments", "muon", "operands", "rows", "run", "sums", "text")
# Versions of the code that train alike: for two seeds at size tiny on a CPU, arms bf16, saved, coat
# and coat_lean have the same losses to the last bit; in the newest versions also coat_int8, muon
# and fp8_muon. Runs of older versions count as runs of the newest. One exception: between dcf1 and
# 6f3d the arms in FP8 differ by rounding on a CPU, where XLA compiles the clipping of gradients
# anew. Compiled for a GPU, where all published runs were trained, the steps differ in scalars only.
ALIKE = dict.fromkeys(["26e42a267c58", "c51e2fefd59a"], "68cd819d6469")
ALIKE |= dict.fromkeys(
    [
        "b527525b170b",
        "f96f7c82d1a3",
        "84e44c584418",
        "4e983c634bd8",
        "62e41be4734e",
        "74688ba67a0b",
        "dbe08430395e",
        "96155505574d",
        "a886b5704773",
        "080d48cf1676",
        "9c31ea7db368",
        "27681d5c5b65",
        "1da934aa5344",
        "9225742fee02",
        "5daa94711bf6",
        "57d47e05521c",
        "1f81ec309039",
        "99a3f2204927",
        "51d0928375ca",
        "9cf4506976c5",
        "1c3ee2c5c376",
        "636383f27cec",
        "ef6cd5aba019",
        "56de2f54dd47",
        "ef06edf1ad27",
        "85c7941f85f3",
        "bdcc7eadac72",
        "b5a26f641f5d",
        "7cbb009651c6",
        "0207d4c12c5b",
        "0ba4e6f90255",
        "279599c96f9f",
        "f06f3dd4baea",
        "9e08882c4bd1",
        "43db340c730b",
        "368bc301db61",
        "14f4b9d62c85",
        "66d6aa0c00ee",
        "92bd7d173112",
        "1c0f09c88e31",
        "dcf123bef71b",
    ],
    "6f3d35ed8fcb",
)
# The field of a definition that has the version of what `after_training` does after a run. The
# results of these versions, at size tiny with COAT and all recipes, are the same to the last bit.
AFTER_TRAINING = "after training"
ALIKE |= dict.fromkeys(["c8a43cb91722", "6795ca705e05", "4b35a942f1ec"], "3b7eb997d493")
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
        "code": code_digest(),
    }
    return {"key": key_of(row)} | row


def key_of(row: Row) -> str:
    """The hash of what decides a result; an arm's name is not part of it."""
    fields = ("definition", "model", "seed", "settings", "text", "code")
    return digest({field: row[field] for field in fields})


def run_of(row: Row) -> str:
    """As `key_of`, but the same for all versions of the code that train alike."""
    return digest([_version(row), *(row[name] for name in ("model", "seed", "settings", "text"))])


def model_of(size: Size) -> str:
    """The model of a size, without what an arm decides."""
    model = dataclasses.asdict(size.model)
    # A field that the first runs did not have is left out where its value is what they did.
    before = added_since(size.model)
    kept = (n for n in model if n != "precision" and (n not in before or model[n] != before[n]))
    return digest({name: str(model[name]) for name in kept})


@functools.cache
def code_digest() -> str:
    """The hash of the code that decides a result."""
    package, study = ROOT / "coat_jax", ROOT / "experiments" / "loss_study"
    files = [p for p in package.rglob("*.py") if p.relative_to(package).parts[0] not in ASIDE]
    files += [p for p in (package / "training").rglob("*.py") if p.stem in STEP]
    files += [study / f"{name}.py" for name in STUDY]
    return digest(sorted(essence(file.read_text("utf-8")) for file in files))


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

    An arm that was measured with several versions of the code is several arms: the version of
    this checkout, or else the latest, keeps the name, and others are named by their code. Of
    versions that were measured on one day, the one with the most runs counts as the latest.
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
    now = code_digest()

    runs = Counter((row["arm"], _version(row)) for row in rows)

    def rank(row: Row) -> tuple[Any, ...]:
        of_version = runs[row["arm"], _version(row)]
        return _code(row) == now, row["parents"]["date"], of_version, _code(row)

    newest: dict[str, str] = {}
    for row in sorted(rows, key=rank):
        newest[row["arm"]] = _version(row)
    return [
        row
        if newest[row["arm"]] == _version(row)
        else row | {"arm": f"{row['arm']}@{_code(row)[:6]}"}
        for row in rows
    ]


def _version(row: Row) -> str:
    definition = row["definition"]
    if after := definition.get(AFTER_TRAINING):
        definition = definition | {AFTER_TRAINING: ALIKE.get(after, after)}
    return digest([definition, _code(row)])


def _code(row: Row) -> str:
    """The version of the code that trained a run, by the newest one that trains alike."""
    code: str = row["code"]
    return ALIKE.get(code, code)


def _place(row: Row) -> tuple[Any, ...]:
    return row["size"], digest([row["settings"], row["text"]]), row["seed"], row["arm"], row["key"]
