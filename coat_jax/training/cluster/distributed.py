"""Several processes, one run: how they find each other.

    start()      before JAX initializes its devices

The launcher's environment variables give a process its rank; without them it runs alone.

    JAX_PROCESS_COUNT, JAX_PROCESS_ID and JAX_COORDINATOR_ADDRESS    ssh, Kubernetes, anything
    mpirun                                                           Open MPI's own variables
    srun                                                             SLURM's

One process on a node uses all of its GPUs, several use one each. JAX_LOCAL_DEVICE_IDS=0,1 chooses
others for one of several processes; a process that trains alone is told by CUDA_VISIBLE_DEVICES.
Losing a process ends the others, within JAX's 100 seconds: start the run again.
"""

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax

from coat_jax.errors import UserError

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT, INDEX = "JAX_PROCESS_COUNT", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"


class ProcessPlace(NamedTuple):
    """The place of a process in the run that it belongs to."""

    launcher: str  # JAX's name; "deactivate" if the variables above say everything
    coordinator: str | None  # HOST:PORT of process 0; None where JAX can ask the launcher
    processes: int
    process: int
    rank_on_node: int | None  # None if it is the only process of its node


def start(*, timeout: int = 300) -> None:
    """Joins the processes of the run, waiting `timeout` seconds for them, if there are several.

    Raises:
        UserError: if the launcher's variables are incomplete, or nobody answers at the
            coordinator's address, or GPUs are chosen in a way that JAX ignores.
    """
    place = find_place(os.environ)
    if place is None or place.processes == 1:
        if DEVICES in os.environ:  # JAX would use all
            raise UserError(
                f"{DEVICES} is set, and JAX reads it only where several processes train together. "
                "For one process set CUDA_VISIBLE_DEVICES instead."
            )
        return
    # JAX aborts a process if the others do not join: this line then explains why.
    print(
        f"process {place.process} of {place.processes}: waits up to {timeout} s for all to join "
        f"at {place.coordinator or 'the address of the launcher'}",
        file=sys.stderr,
        flush=True,
    )
    if place.coordinator and place.process > 0:
        _require_answer(place.coordinator, timeout)
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        local_device_ids=_local_devices(place, os.environ),
        cluster_detection_method=place.launcher,
        initialization_timeout=timeout,
    )


def find_place(variables: Mapping[str, str]) -> ProcessPlace | None:
    """Reads the launcher's variables; None where nothing launched this process.

    Raises:
        UserError: if some are missing.
    """

    def number(name: str) -> int:
        text = variables.get(name, "")
        if not text.isdecimal():
            raise UserError(
                f"{name} is {text!r}, not a whole number: set it, if the launcher does not."
            )
        return int(text)

    coordinator, rank = variables.get(ADDRESS), None
    knows_host = False  # whether JAX can ask the launcher for the host of process 0
    if COUNT in variables or INDEX in variables:
        launcher, processes, process = "deactivate", number(COUNT), number(INDEX)
    elif "OMPI_COMM_WORLD_SIZE" in variables:
        launcher = "ompi"
        processes, process = number("OMPI_COMM_WORLD_SIZE"), number("OMPI_COMM_WORLD_RANK")
        if number("OMPI_COMM_WORLD_LOCAL_SIZE") > 1:
            rank = number("OMPI_COMM_WORLD_LOCAL_RANK")
        knows_host = "OMPI_MCA_orte_hnp_uri" in variables  # of Open MPI 4; 5 has none
    elif "SLURM_STEP_NUM_TASKS" in variables:  # within srun; a batch script alone has no step
        launcher, knows_host = "slurm", True
        processes, process = number("SLURM_STEP_NUM_TASKS"), number("SLURM_PROCID")
        if processes > number("SLURM_STEP_NUM_NODES"):
            rank = number("SLURM_LOCALID")
    elif coordinator:
        raise UserError(f"{ADDRESS} is set, but not {COUNT} and {INDEX}: set all three, or none.")
    else:
        return None
    if process >= processes:
        raise UserError(
            f"The last of {processes} processes is number {processes - 1}, not {process}."
        )
    if not coordinator and processes > 1 and not knows_host:
        raise UserError(
            f"{processes} processes, but no {ADDRESS}: set it to HOST:PORT of process 0."
        )
    if coordinator and not coordinator.rpartition(":")[2].isdecimal():
        raise UserError(f"{ADDRESS}={coordinator!r} has no port: write HOST:PORT.")
    return ProcessPlace(launcher, coordinator, processes, process, rank)


def _local_devices(place: ProcessPlace, variables: Mapping[str, str]) -> list[int] | None:
    """Returns the GPUs that a process takes, as indices of those it sees; [] means all."""
    if DEVICES in variables:
        return None  # JAX reads it
    sees_one = "," not in variables.get("CUDA_VISIBLE_DEVICES", ",")  # srun --gpus-per-task=1
    return [] if place.rank_on_node is None or sees_one else [place.rank_on_node]


def _require_answer(address: str, timeout: int) -> None:
    """Returns once somebody listens at the address: JAX would abort with a stack trace."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        time.sleep(0.5)
    raise UserError(
        f"Nobody answers at {ADDRESS}={address} after {timeout} s: is process 0 running there, and "
        "its port open?"
    )
