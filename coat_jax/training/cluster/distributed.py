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
from typing import Any

import jax

from coat_jax.errors import UserError

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT, INDEX = "JAX_PROCESS_COUNT", "JAX_PROCESS_ID"
DEVICES = "JAX_LOCAL_DEVICE_IDS"
# By JAX's names, of which "deactivate" asks no launcher: the number of processes and that of this
# one; the number of those on this node, or of nodes; and the rank on the node. Those of SLURM are
# there within srun only, not in its batch script. mpirun starts its daemons with srun: it is first.
LAUNCHERS = {
    "deactivate": (COUNT, INDEX),
    "ompi": tuple(f"OMPI_COMM_WORLD_{n}" for n in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")),
    "slurm": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_NUM_NODES", "SLURM_LOCALID"),
}


def start(*, timeout: int = 300) -> None:
    """Joins the processes of the run, waiting `timeout` seconds for them, if there are several."""
    place = find_place(os.environ)
    if place is None or place["num_processes"] == 1:
        if DEVICES in os.environ:  # JAX would use all
            raise UserError(
                f"{DEVICES} is set, and JAX reads it only where several processes train together. "
                "For one process set CUDA_VISIBLE_DEVICES instead."
            )
        return
    address, process = place["coordinator_address"], place["process_id"]
    # JAX aborts a process if the others do not join: this line then explains why.
    print(
        f"process {process} of {place['num_processes']}: waits up to {timeout} s for all to join "
        f"at {address or 'the address of the launcher'}",
        file=sys.stderr,
        flush=True,
    )
    if address and process > 0:
        _require_answer(address, timeout)
    jax.distributed.initialize(**place, initialization_timeout=timeout)


def find_place(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Reads the launcher's variables; returns arguments of `jax.distributed.initialize`.

    None where nothing launched this process.
    """
    address = variables.get(ADDRESS)
    launcher = next((name for name, names in LAUNCHERS.items() if names[0] in variables), None)
    if launcher is None:
        if not address and INDEX not in variables:
            return None
        launcher = "deactivate"
    texts = {name: variables.get(name, "") for name in LAUNCHERS[launcher]}
    whole = all(text.isdecimal() for text in texts.values())
    processes, process, *node = map(int, texts.values()) if whole else (0, 0)
    # JAX asks some launchers for the host of process 0: Open MPI 5 does not know it.
    known = launcher == "slurm" or (launcher == "ompi" and "OMPI_MCA_orte_hnp_uri" in variables)
    found = address.rpartition(":")[2].isdecimal() if address else known or processes == 1
    if process >= processes or not found:
        given = ", ".join(f"{name}={text!r}" for name, text in {**texts, ADDRESS: address}.items())
        raise UserError(
            f"This process cannot join others: {given}. Set {ADDRESS} to HOST:PORT of process 0, "
            "and the others to whole numbers; process numbers begin at 0."
        )
    devices: list[int] | None = []  # all that it sees
    if DEVICES in variables:
        devices = None  # JAX reads it
    elif node and "," in variables.get("CUDA_VISIBLE_DEVICES", ","):  # not srun --gpus-per-task=1
        alone = node[0] == (1 if launcher == "ompi" else processes)
        devices = [] if alone else [node[1]]
    return {
        "coordinator_address": address,
        "num_processes": processes,
        "process_id": process,
        "local_device_ids": devices,
        "cluster_detection_method": launcher,
    }


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
