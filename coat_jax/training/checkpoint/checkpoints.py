"""Checkpoints of a run: written in the background, complete or absent, checked before use.

    checkpoints/100/
        state/           orbax: every process writes the shards it holds
        record.json      step, held-out loss, and `extra`: what else the caller wants to keep
        manifest.json    size and checksum of all these files

`save` returns when the state has been copied to the host, so the next step may overwrite (donate)
its arrays. A checkpoint stays while it is among the newest `keep` or the `keep_best` of lowest
loss. When a run that went back to step 50 saves step 60, that of step 100 is removed.

Several processes share the folder, and all of them call each method, in the same order; the first
one decides and the others follow.
"""

import contextlib
import json
import logging
import math
import shutil
import traceback
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax

from coat_jax import writing
from coat_jax.errors import UserError
from coat_jax.files import expand_user
from coat_jax.manifest import DamagedCheckpoint
from coat_jax.multihost import run_on_main
from coat_jax.optax.states.checkpoint import (
    LiteralPath,
    read_state,
    require_storable,
    require_stored_like,
    storable,
    stored_metadata,
)
from coat_jax.training.checkpoint.step_folders import RECORD, StepFolders
from coat_jax.validation import Count, CountOrZero, require
from coat_jax.writing import require_space, write_failures

STATE = "state"


class Restored(NamedTuple):
    """A checkpoint that was restored: its step, the arrays, and what was saved beside them."""

    step: int
    state: Any
    extra: dict[str, Any]


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """The checkpoints in a folder.

    Args:
        folder: holds a folder for each; made when the first is saved.
        keep: how many of the newest stay.
        keep_best: how many of those with the lowest loss stay; they may be among the newest.
        note: called on the first process with what is damaged or cannot be removed.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 2,
        keep_best: int = 1,
        note: Callable[[str], object] = warnings.warn,
    ):
        require("keep", keep, Count)
        require("keep_best", keep_best, CountOrZero)
        self.folder = expand_user(folder).absolute()
        self._folders = StepFolders(self.folder)
        self._keep, self._keep_best, self._note = keep, keep_best, note
        self._orbax: Any = None
        self._background = ThreadPoolExecutor(1, "checkpoint")
        self._writing: tuple[int, Future[None]] | None = None
        self._checked: int | None = None  # the step that `require_like` chose
        self._current: int | None = None  # the step saved or restored last

    def save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any],
        *,
        loss: float | None = None,
        wait: bool = False,
    ) -> None:
        """Saves a state in the background; waits first for the save before, if that is unfinished.

        Does nothing if this step was saved or restored last.

        Args:
            step: after how many steps; not less than the step that was saved or restored last.
            state: a pytree of arrays. They may be donated as soon as this returns.
            extra: whatever JSON can hold.
            loss: on held-out data, if it is known: decides which checkpoints are best.
            wait: whether to return only when the checkpoint is complete.

        Raises:
            DiskFull: if there is no room for the state, or was none for the state before.
            UserError: if the folder holds checkpoints, and none of them, or a later one than this
                step, was restored.
        """
        self.wait()
        if step != self._current:
            record = json.dumps({"step": step, "loss": loss, "extra": extra})
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
            if self._orbax is None:
                import orbax.checkpoint as ocp

                for name in ("absl", "asyncio"):
                    logging.getLogger(name).addFilter(_is_no_error_of_orbax)
                self._orbax = ocp.StandardCheckpointer()
            with write_failures(self.folder, _name(step), size):
                run_on_main(lambda: self._prepare(step, size))
                # In the background, while steps go on and overwrite what is in host memory.
                folder = LiteralPath(self._folders.temporary(step) / STATE)
                self._orbax.save(folder, storable(state))
            self._writing = step, self._background.submit(self._complete, step, record, size)
        if wait:
            self.wait()

    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Reads a checkpoint back, after checking every byte of it.

        Args:
            like: the state expected, as arrays or `jax.ShapeDtypeStruct`s with shardings. The
                mesh may be another one than the state was saved from.
            step: which one; by default the newest intact one. `note` is called with
                those that are skipped.

        Raises:
            DamagedCheckpoint: if the requested checkpoint is damaged, or all are.
            ValueError: if there is no checkpoint, or it holds other arrays than `like`.
        """
        self.wait()
        chosen, self._checked = self._checked, None
        if step is not None or chosen is None:
            chosen = run_on_main(lambda: self._folders.intact(step, self._note))
        state = read_state(self._folders.folder(chosen) / STATE, like)
        self._current = chosen
        return Restored(chosen, state, run_on_main(lambda: self._folders.record(chosen)["extra"]))

    def require_like(self, like: Any) -> int | None:
        """Returns the step to resume from, if any; raises UserError if it does not match `like`.

        Called before the step is compiled, so that a run is refused early, also one whose state
        cannot be saved. Every byte is checked; `restore` does not check it again.
        """
        try:
            require_storable(like)
        except (TypeError, ValueError) as error:
            raise UserError(f"The state of this run cannot be saved. {error}") from error
        if self.steps():
            self._checked = run_on_main(lambda: self._folders.intact(None, self._note))
            require_stored_like(self._folders.folder(self._checked) / STATE, like)
        return self._checked

    def steps(self) -> list[int]:
        """Returns the steps that were saved completely, oldest first; does not check for damage."""
        self.wait()
        return run_on_main(self._folders.steps)

    def wait(self) -> None:
        """Returns when the last save is complete; raises what went wrong in it."""
        if self._writing is not None:
            (step, written), self._writing = self._writing, None
            written.result()
            self._current = step

    def __exit__(self, *error: object) -> None:
        try:
            self.wait()
        finally:
            self._background.shutdown()
            if self._orbax is not None:
                self._orbax.close()

    def _prepare(self, step: int, size: int) -> None:
        """On the first process: makes the folder to write in; raises if nothing may be saved."""
        present = self._folders.steps()
        if present and (self._current is None or step < self._current):
            raise UserError(
                f"Step {step} cannot be saved: {self.folder} holds checkpoints of the steps "
                f"{present}. Restore the one to continue from first, or choose another folder."
            )
        if self._current is not None:
            self._prune(self._current)  # a killed run may have left too many
        self._folders.clear()
        require_space(self.folder, _name(step), size)
        self._folders.temporary(step).mkdir()

    def _complete(self, step: int, record: str, size: int) -> None:
        """In the background: waits for the arrays, then completes the checkpoint."""
        folder, is_main = self._folders.temporary(step), jax.process_index() == 0
        with write_failures(self.folder, _name(step), size):
            try:
                self._orbax.wait_until_finished()  # for all processes
                if not is_main:
                    return
                stored_metadata(folder / STATE)
                writing.replace(folder / RECORD, record)
                self._folders.finish(step)
            except BaseException:
                # Orbax may write on for a moment: the next save clears that away.
                if is_main:
                    shutil.rmtree(folder, ignore_errors=True)
                raise
        self._prune(step)

    def _prune(self, newest: int) -> None:
        """On the first process: removes what is not worth keeping up to this step.

        Later ones are damaged or of an abandoned branch, and must not displace intact ones.
        """
        losses: dict[int, float | None] = {s: None for s in self._folders.steps() if s <= newest}
        for step in losses if self._keep_best else ():  # a damaged one is never one of the best
            with contextlib.suppress(DamagedCheckpoint):
                losses[step] = self._folders.record(step).get("loss")
        for step in losses.keys() - steps_to_keep(losses, self._keep, self._keep_best):
            try:
                self._folders.remove(step)
            except OSError as error:
                self._note(f"{_name(step)} could not be removed: {error}")


def steps_to_keep(losses: Mapping[int, float | None], keep: int, keep_best: int) -> set[int]:
    """Returns the newest `keep` steps, and the `keep_best` of lowest loss (in a tie, the newer)."""
    known = [(loss, -step) for step, loss in losses.items() if loss is not None]
    best = sorted(pair for pair in known if math.isfinite(pair[0]))[:keep_best]
    return {*sorted(losses)[-keep:], *(-negated for _, negated in best)}


def _is_no_error_of_orbax(record: logging.LogRecord) -> bool:
    """A filter: orbax, and asyncio for its tasks, log with tracebacks what orbax also raises."""
    if record.levelno < logging.ERROR:
        return True
    error = record.exc_info[2] if record.exc_info else None
    files = [record.pathname, *(frame.filename for frame in traceback.extract_tb(error))]
    return not any("orbax" in Path(file).parts for file in files)


def _name(step: int) -> str:
    return f"The checkpoint of step {step}"
