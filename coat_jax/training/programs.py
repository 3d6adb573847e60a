"""The compiled steps of a run: one for its first steps in BF16, if any, and one for the others."""

import time
from typing import TYPE_CHECKING, Any

from coat_jax.training.cluster.mesh import batch_parts
from coat_jax.training.preparation import TrainSetup, prepare
from coat_jax.training.report import accounting

if TYPE_CHECKING:
    from rich.console import Console


class Programs:
    """Compiles the programs that a run still needs, and returns the one for each step."""

    def __init__(
        self, prepared: TrainSetup, console: "Console", *, example: Any = None, done: int = 0
    ) -> None:
        """Compiles, and prints how long that took and how much memory each program needs.

        Args:
            prepared: the run.
            console: where to print.
            example: a row of a batch; by default the family's.
            done: how many steps the run has taken before.
        """
        self._first = prepared.config.steps_in_bf16
        self._program: Any = None
        self._start: Any = None
        if max(done, self._first) < prepared.config.total_steps:
            self._program = _compile(prepared, console, "the step", example)
        if done < self._first:
            start = prepare(prepared.config.bf16_phase, prepared.mesh, optimizer=prepared.optimizer)
            what = f"the first {self._first:,} steps, in BF16,"
            self._start = _compile(start, console, what, example)

    def for_step(self, done: int) -> Any:
        """The program of the next step; frees the BF16 program after its last step."""
        if done < self._first:
            return self._start
        self._start = None
        return self._program


def _compile(prepared: TrainSetup, console: "Console", what: str, example: Any) -> Any:
    begin = time.perf_counter()
    config, mesh = prepared.config, prepared.mesh
    program = prepared.lower(example).compile()
    seconds = time.perf_counter() - begin
    parts = batch_parts(mesh)
    memory = accounting.account(
        config, prepared.abstract, program, batch_parts=parts, device=mesh.local_devices[0]
    )
    console.print(accounting.table(memory))
    console.print(f"Compiled {what} in {seconds:.1f} s.", highlight=False)
    if not memory.fits:
        advice = accounting.advice(config, batch_parts=parts)
        console.print(f"It will not fit the device. {advice}", style="bold red", highlight=False)
    return program
