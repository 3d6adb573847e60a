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
    """What a process knows of the run that it belongs to.

    Attributes:
        launcher: JAX's name for the launcher; "deactivate" if the variables above say everything.
        coordinator: HOST:PORT of process 0; None where JAX can ask the launcher.
        processes: how many there are.
        process: the index of this one.
        rank_on_node: its rank among its node's processes; None if it is the only one.
    """

    launcher: str
    coordinator: str | None
    processes: int
    process: int
    rank_on_node: int | None


def start(*, timeout: int = 300) -> None:
    """Joins the processes of the run; does nothing where there is one.

    Args:
        timeout: seconds to wait for the others.

    Raises:
        UserError: if the launcher's variables are incomplete or contradict each other, or nobody
            answers at the coordinator's address, or GPUs are chosen in a way that JAX ignores.
    """
    place = find_place(os.environ)
    if place is None or place.processes == 1:
        if DEVICES in os.environ:  # JAX would use all
            raise UserError(
                f"{DEVICES} is set, and JAX reads it only where several processes train together. "
                "For one process set CUDA_VISIBLE_DEVICES instead."
            )
        return
    where = f" at {place.coordinator}" if place.coordinator else ""
    # JAX aborts a process if the others do not join: this line then explains why.
    print(
        f"process {place.process} of {place.processes}: waits up to {timeout} s for all to join"
        f"{where}",
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
    if jax.process_count() != place.processes:
        raise UserError(
            f"Process {place.process} was told of {place.processes} processes, process 0 of "
            f"{jax.process_count()}: give all the same count ({COUNT})."
        )


def find_place(variables: Mapping[str, str]) -> ProcessPlace | None:
    """Reads the launcher's variables; None where nothing launched this process.

    Raises:
        UserError: if some are missing, or contradict each other.
    """
    coordinator = variables.get(ADDRESS)
    if COUNT in variables or INDEX in variables:
        place = ProcessPlace("deactivate", coordinator, *_position(variables, COUNT, INDEX), None)
    elif "OMPI_COMM_WORLD_SIZE" in variables:
        position = _position(variables, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
        alone = _number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE") == 1
        rank = None if alone else _number(variables, "OMPI_COMM_WORLD_LOCAL_RANK")
        place = ProcessPlace("ompi", coordinator, *position, rank)
    elif "SLURM_STEP_NUM_TASKS" in variables:  # within srun; a batch script alone has no step
        position = _position(variables, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")
        alone = position[0] == _number(variables, "SLURM_STEP_NUM_NODES")
        place = ProcessPlace(
            "slurm", coordinator, *position, None if alone else _number(variables, "SLURM_LOCALID")
        )
    elif coordinator:
        raise UserError(f"{ADDRESS} is set, but not {COUNT} and {INDEX}: set all three, or none.")
    else:
        return None
    # Open MPI 4 has a variable with the host of mpirun, Open MPI 5 has none.
    knows_host = place.launcher == "slurm" or "OMPI_MCA_orte_hnp_uri" in variables
    if not coordinator and place.processes > 1 and not knows_host:
        raise UserError(
            f"{place.processes} processes, but no {ADDRESS}: set it to HOST:PORT of process 0."
        )
    if coordinator and not coordinator.rpartition(":")[2].isdecimal():
        raise UserError(f"{ADDRESS}={coordinator!r} has no port: write HOST:PORT.")
    return place


def _position(variables: Mapping[str, str], count: str, index: str) -> tuple[int, int]:
    processes, process = _number(variables, count), _number(variables, index)
    if process >= processes:
        raise UserError(
            f"{index}={process}, but {count}={processes}: the last of {processes} processes is "
            f"number {processes - 1}."
        )
    return processes, process


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "")
    if not text.isdecimal():
        raise UserError(
            f"{name} is {text!r}, not a whole number: set it, if the launcher does not."
        )
    return int(text)


def _local_devices(place: ProcessPlace, variables: Mapping[str, str]) -> list[int] | None:
    """The GPUs that a process takes, by index among those it sees; none listed means all."""
    if DEVICES in variables:
        if not all(number.isdecimal() for number in variables[DEVICES].split(",")):
            raise UserError(
                f"{DEVICES} is {variables[DEVICES]!r}: write the numbers of GPUs, as in 0,1."
            )
        return None  # JAX reads it
    sees_one = "," not in variables.get("CUDA_VISIBLE_DEVICES", ",")  # srun --gpus-per-task=1
    return [] if place.rank_on_node is None or sees_one else [place.rank_on_node]


def _require_answer(address: str, timeout: int) -> None:
    """Returns once somebody listens at the address."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"Nobody answers at {ADDRESS}={address} after {timeout} s ({error}): is "
                    f"process 0 running there, and its port open?"
                ) from error
            time.sleep(0.5)
