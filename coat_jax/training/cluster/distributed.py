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
# By JAX's names: the number of processes and that of this one; of those on this node, or of nodes;
# and the rank on the node. Of SLURM they are there within srun only, not in its batch script.
# mpirun starts its daemons with srun, so it comes first.
LAUNCHERS = {
    "deactivate": (COUNT, INDEX),
    "ompi": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID"),
}


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
    coordinator = variables.get(ADDRESS)
    launcher = next((name for name, names in LAUNCHERS.items() if names[0] in variables), None)
    if launcher is None:
        if coordinator or INDEX in variables:
            raise UserError(f"Set {ADDRESS}, {COUNT} and {INDEX} together, or none of them.")
        return None
    for name in LAUNCHERS[launcher]:
        if not (text := variables.get(name, "")).isdecimal():
            raise UserError(
                f"{name} is {text!r}, not a whole number: set it, if the launcher does not."
            )
    processes, process, *node = (int(variables[name]) for name in LAUNCHERS[launcher])
    if process >= processes:
        raise UserError(
            f"The last of {processes} processes is number {processes - 1}, not {process}."
        )
    # Whether JAX can ask the launcher for the host of process 0: Open MPI 5 does not know it.
    known = launcher == "slurm" or (launcher == "ompi" and "OMPI_MCA_orte_hnp_uri" in variables)
    if coordinator and not coordinator.rpartition(":")[2].isdecimal():
        raise UserError(f"{ADDRESS}={coordinator!r} has no port: write HOST:PORT.")
    if processes > 1 and not coordinator and not known:
        raise UserError(
            f"{processes} processes, but no {ADDRESS}: set it to HOST:PORT of process 0."
        )
    shared = node and (node[0] > 1 if launcher == "ompi" else processes > node[0])
    return ProcessPlace(launcher, coordinator, processes, process, node[1] if shared else None)


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
