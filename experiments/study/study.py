"""What is particular to a study, what a call asks of it, and what one run is told."""

import dataclasses
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coat_jax.errors import UserError
from experiments import row_files
from experiments.row_files import Row
from experiments.study.rows import measured_of


def setting(words: str, default: Any = dataclasses.MISSING) -> Any:
    """A field of a study's settings, with what `--help` says of it."""
    return dataclasses.field(default=default, metadata={"help": words})


class Call(NamedTuple):
    """The arguments of a call.

    Attributes:
        arms: names of those to train.
        size: a name in the study's sizes.
        settings: of each run: those of the size, unless the command line says otherwise.
        seeds: of each arm.
        work: the folder for text, compiled programs and runs that were stopped.
        known: the file of results that are not measured again.
        out: the file for new results; what it has is not measured again either.
        side_by_side: runs on each GPU.
        seconds: for all of it.
        options: the whole command line, for arguments of the study's own.
    """

    arms: Sequence[str]
    size: str
    settings: Any
    seeds: Sequence[int]
    work: Path
    known: Path
    out: Path
    side_by_side: int
    seconds: float
    options: Namespace


@dataclasses.dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        name: of its package, and of its results file.
        arms: dataclasses by name; the defaults of their fields are the usual baseline.
        usual: names of the arms that are trained by default.
        sizes: by name, each with a `model` and the `settings` to train it with.
        measures: the fields that a run adds to its rows, except for `seconds` and `parents`.
        module: has `measure(job)`, which makes a run in its own process and returns its rows.
        rows_of: the rows of a run before it is measured, from the call, the name of an arm, seeds,
            and the digest of the text.
        prepare: makes the text, and returns its digest; if the call only plans, guesses it from
            rows that are there.
        show: prints tables of rows; draws pictures into a folder, unless it is None.
        of_today: a row as it would be written today, if the study has changed since.
        declare: adds arguments of the study's own.
        together: how many seeds one run trains.
        side_by_side: how many runs share a GPU, unless the command line says otherwise.
        seconds_of: how long a run takes alone on an H200, for estimates.
    """

    name: str
    arms: Mapping[str, Any]
    usual: Sequence[str]
    sizes: Mapping[str, Any]
    measures: set[str]
    module: str
    rows_of: Callable[[Call, str, Sequence[int], str], list[Row]]
    prepare: Callable[[Call, list[Row], bool], str]
    show: Callable[[list[Row], Path | None], None]
    of_today: Callable[[Row], Row] = dict
    declare: Callable[[ArgumentParser], object] = lambda parser: None
    together: Callable[[Call], int] = lambda call: 1
    side_by_side: int = 4
    seconds_of: Callable[[Call], float] | None = None

    def read(self, paths: Iterable[Path]) -> list[Row]:
        """The rows of some files, each once; refuses those of other studies."""
        rows: dict[str, Row] = {}
        for path in paths:
            for row in row_files.read([path]):
                self._require_own(row, path)
                rows.setdefault(row["key"], self.of_today(row))
        return list(rows.values())

    def _require_own(self, row: Row, path: Path) -> None:
        found = measured_of(row)
        if found != self.measures:
            raise UserError(
                f"{path} has rows of another study than {self.name}: they measured "
                f"{', '.join(sorted(found))}, not {', '.join(sorted(self.measures))}."
            )


class Stopped(Exception):
    """A run was asked to stop, and has saved what it needs to continue."""


class Job(NamedTuple):
    """What one run is told.

    Attributes:
        rows: what it measures.
        folder: of the run.
        work: of the call; the text is in its folder `text`.
        asked: becomes true when the run is asked to stop.
    """

    rows: list[Row]
    folder: Path
    work: Path
    asked: Sequence[int] = ()

    def stop_if_asked(self) -> None:
        """Raises `Stopped` if somebody has asked."""
        if self.asked:
            raise Stopped
