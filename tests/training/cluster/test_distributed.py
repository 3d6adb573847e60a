"""Processes find each other, whoever launched them."""

import jax
import pytest
from processes import free_port

from coat_jax.errors import UserError
from coat_jax.training.cluster import distributed
from coat_jax.training.cluster.distributed import find_place

ADDRESS = "node1:1234"
VARIABLES = {
    "JAX_COORDINATOR_ADDRESS": ADDRESS,
    "JAX_PROCESS_COUNT": "4",
    "JAX_PROCESS_ID": "2",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1:34911",
}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def without(variables, name):
    return {other: value for other, value in variables.items() if other != name}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # no srun
        (VARIABLES, (ADDRESS, 4, 2, [], "deactivate")),
        (MPIRUN, (None, 4, 3, [1], "ompi")),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, (None, 4, 3, [], "ompi")),
        (SRUN, (None, 4, 3, [1], "slurm")),
        (SRUN | {"SLURM_STEP_NUM_NODES": "4"}, (None, 4, 3, [], "slurm")),
        (SRUN | MPIRUN, (None, 4, 3, [1], "ompi")),  # mpirun starts its daemons with srun
        (SRUN | VARIABLES, (ADDRESS, 4, 2, [], "deactivate")),
        (SRUN | {"JAX_COORDINATOR_ADDRESS": ADDRESS}, (ADDRESS, 4, 3, [1], "slurm")),
        # Processes share the GPUs of a node.
        (SRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (None, 4, 3, [1], "slurm")),
        (SRUN | {"CUDA_VISIBLE_DEVICES": "0"}, (None, 4, 3, [], "slurm")),
        (SRUN | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, (None, 4, 3, None, "slurm")),
    ],
)
def test_the_launcher_says_where_a_process_stands(variables, place):
    """By the arguments of `jax.distributed.initialize`, in their order."""
    found = find_place(variables)
    assert (found and tuple(found.values())) == place


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [
        (without(VARIABLES, "JAX_PROCESS_ID"), "JAX_PROCESS_ID=''"),
        (without(VARIABLES, "JAX_PROCESS_COUNT"), "JAX_PROCESS_COUNT=''"),
        (VARIABLES | {"JAX_PROCESS_COUNT": "two"}, "JAX_PROCESS_COUNT='two'"),
        (VARIABLES | {"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID='4'"),
        (without(VARIABLES, "JAX_COORDINATOR_ADDRESS"), "JAX_COORDINATOR_ADDRESS=None"),
        (VARIABLES | {"JAX_COORDINATOR_ADDRESS": "node1"}, "JAX_COORDINATOR_ADDRESS='node1'"),
        ({"JAX_COORDINATOR_ADDRESS": ADDRESS}, "JAX_PROCESS_COUNT='', JAX_PROCESS_ID=''"),
        (without(MPIRUN, "OMPI_MCA_orte_hnp_uri"), "JAX_COORDINATOR_ADDRESS=None"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID=''"),
    ],
)
def test_incomplete_and_contradicting_variables_are_refused(variables, wrong):
    with pytest.raises(UserError, match=f"cannot join others: .*{wrong}.* Set JAX_COORD"):
        find_place(variables)


@pytest.fixture
def joins(monkeypatch):
    """What `jax.distributed.initialize` was called with."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **options: calls.append(options))
    for name in {*VARIABLES, *MPIRUN, *SRUN}:
        monkeypatch.delenv(name, raising=False)
    return calls


def test_one_process_joins_nobody_and_chooses_gpus_by_cudas_variable(joins, monkeypatch):
    distributed.start()
    for name, value in (VARIABLES | {"JAX_PROCESS_COUNT": "1", "JAX_PROCESS_ID": "0"}).items():
        monkeypatch.setenv(name, value)
    distributed.start()
    assert joins == []
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "1")
    with pytest.raises(UserError, match="set CUDA_VISIBLE_DEVICES instead"):
        distributed.start()


def test_slurm_and_open_mpi_are_asked_for_the_address(joins, monkeypatch):
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    distributed.start(timeout=7)
    (options,) = joins
    assert tuple(options.values())[:5] == (None, 4, 3, [1], "slurm")
    assert options["initialization_timeout"] == 7


def test_a_coordinator_that_does_not_answer_is_named(joins, monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    for name, value in {**VARIABLES, "JAX_COORDINATOR_ADDRESS": address}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"JAX_COORDINATOR_ADDRESS={address} after 1 s"):
        distributed.start(timeout=1)
    assert joins == []
