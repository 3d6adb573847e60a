"""Which code a measurement ran, and whether it is still the same.

A measurement depends on the modules of this repository that its processes imported, less the
functions that did not run: a change of the command line outdates no measurement of a kernel.
Top-level statements, classes and functions that ran count, by their `essence`. So do functions with
other decorators than those of `WRAPPERS`: Triton compiles a kernel from its source.

    noted()     {"coat_jax/optax/fused.py": "4f1d2c7b9e03 fused_fp8_adamw _leaves", ...}

a hash for each file, and the functions that it covers. `changed` lists the files whose hash differs
today. Importing `experiments` starts to note what runs; a function is noted once, so that timings
do not change. Python before 3.12 cannot note this: there all functions of an imported module count,
and files that are run without being imported, such as configs, do not.

What writes results and starts processes (`APPARATUS`) does not count.
"""

import ast
import atexit
import functools
import hashlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

from experiments import compilation
from experiments.essence import ROOT, parts

FOLDERS = ("coat_jax", "examples", "experiments")
APPARATUS = {
    "coat_jax/training/report/chart.py",
    *(
        f"experiments/{name}.py"
        for name in (
            "__init__",
            "command",
            "compilation",
            "essence",
            "machine",
            "measured_cases",
            "measured_code",
            "records",
            "row_files",
            "workers",
        )
    ),
}
# A function that these decorate runs when it is called, or traced.
WRAPPERS = {"functools.cache", "functools.lru_cache", "contextlib.contextmanager", "jax.jit"}
ALL = "*"  # instead of the names of functions
# The environment variable with the file in which a worker reports what it ran and compiled.
REPORT = "MEASURED_CODE"
TOOL = 3  # of `sys.monitoring`: one that debuggers, coverage and profilers do not use

Ran = dict[str, set[str]]  # functions by file

_ran: Ran = {}


def begin() -> None:
    """Notes from now on which functions run; at its end, a worker reports them."""
    if _can_tell() and sys.monitoring.get_tool(TOOL) is None:
        start = sys.monitoring.events.PY_START
        sys.monitoring.use_tool_id(TOOL, __name__)
        sys.monitoring.register_callback(TOOL, start, _note)
        sys.monitoring.set_events(TOOL, start)
        # Functions that run while Python shuts down must not be noted: its modules are gone then.
        atexit.register(sys.monitoring.set_events, TOOL, sys.monitoring.events.NO_EVENTS)
    if path := os.environ.pop(REPORT, None):  # not for processes that the worker starts
        atexit.register(_report, Path(path))


def _can_tell() -> bool:
    return sys.version_info >= (3, 12)


def _note(code: CodeType, _: int) -> object:
    if file := _within(code.co_filename):
        names = _ran.setdefault(file, set())  # also a config, which is run and not imported
        name = code.co_qualname.partition(".<locals>")[0]
        # Methods have a dot: classes count as a whole. The code of a class has its name.
        if code.co_flags & inspect.CO_OPTIMIZED and name.isidentifier():
            names.add(name)
    return sys.monitoring.DISABLE


@functools.cache
def _within(filename: str) -> str | None:
    """A file of the repository that counts, as a path within it."""
    path = Path(filename)
    if not path.is_absolute() or not path.is_relative_to(ROOT):
        return None
    name = path.relative_to(ROOT).as_posix()
    return name if name.startswith(tuple(f"{folder}/" for folder in FOLDERS)) else None


def ran() -> Ran:
    """What ran until now, in this process and in those passed to `add`."""
    modules = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    imported = {file for module in modules if module and (file := _within(module))}
    found = {file: set(_ran.get(file, ())) for file in imported | _ran.keys()}
    if not _can_tell():
        for file in imported:
            found[file].add(ALL)
    return {file: names for file, names in found.items() if file not in APPARATUS}


def add(other: Mapping[str, Iterable[str]]) -> None:
    """Counts what ran in another process as if it had run in this one."""
    for file, names in other.items():
        _ran.setdefault(file, set()).update(names)


def add_all_of(filename: str) -> None:
    """Counts a whole file, which runs in processes that report nothing."""
    if file := _within(filename):
        add({file: [ALL]})


def _report(path: Path) -> None:
    functions_of = {file: sorted(names) for file, names in ran().items()}
    path.write_text(json.dumps({"ran": functions_of, "compilation": compilation.seconds()}))


def noted(found: Mapping[str, Iterable[str]] | None = None) -> dict[str, str]:
    """What ran, by default up to now, with the hash of each file."""
    notes = {}
    for file, names in sorted((ran() if found is None else found).items()):
        digest = _digest(file, frozenset(names))
        if digest is not None:
            notes[file] = " ".join([digest, *sorted(names)])
    return notes


def functions(notes: Mapping[str, str]) -> dict[str, list[str]]:
    """The functions of notes, which `add` takes."""
    return {file: note.split()[1:] for file, note in notes.items()}


def are_notes(found: Any) -> bool:
    """Whether this is what `noted` returns: it may come from a damaged file."""
    return isinstance(found, dict) and all(
        isinstance(note, str) and note.split() for note in found.values()
    )


def changed(notes: Mapping[str, str], commit: str | None = None) -> list[str]:
    """The files that do something else today than when these notes were made.

    With the commit of the notes, the source of then decides where a hash differs: the hashes of
    earlier versions of this module covered other statements.
    """
    files = []
    for file, note in notes.items():
        digest, *names = note.split()
        today = _digest(file, frozenset(names))
        then = _source_at(commit, file) if commit and today != digest else None
        if today != (digest if then is None else _digest_of(then, frozenset(names))):
            files.append(file)
    return files


@functools.cache
def _source_at(commit: str, file: str) -> str | None:
    """A file of a commit; None if Git does not have it here."""
    if shutil.which("git") is None:
        return None
    command = ["git", "show", f"{commit}:{file}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return None if shown.returncode else shown.stdout


def _digest(file: str, names: frozenset[str]) -> str | None:
    path = ROOT / file
    return _digest_of(path.read_text("utf-8"), names) if path.exists() else None


def _digest_of(source: str, names: frozenset[str]) -> str | None:
    """A hash of what counts of a file, if these functions ran; None if nothing does."""
    counting = [
        what for name, what in _statements(source) if not name or name in names or ALL in names
    ]
    if not counting:
        return None
    return hashlib.sha256("\n".join(counting).encode()).hexdigest()[:12]


@functools.cache
def _statements(source: str) -> list[tuple[str | None, str]]:
    """The essence of each statement at the top level, and the function that must run for it."""
    found: list[tuple[str | None, str]] = []
    for statement, what in parts(source):
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _runs_if_called(statement):
                found.append((statement.name, what))
            case ast.Assign(targets=[ast.Name(id="__all__" | "__version__")]):
                pass
            case _:
                found.append((None, what))
    return found


def _runs_if_called(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether nothing but calls of a function uses it."""
    return all(ast.unparse(_wrapper(one)) in WRAPPERS for one in function.decorator_list)


def _wrapper(decorator: ast.expr) -> ast.expr:
    """jax.jit of @jax.jit, and of @functools.partial(jax.jit, ...); lru_cache of @lru_cache(8)."""
    match decorator:
        case ast.Call(func, [wrapped, *_]) if ast.unparse(func) in ("functools.partial", "partial"):
            return wrapped
        case ast.Call(func):
            return func
    return decorator
