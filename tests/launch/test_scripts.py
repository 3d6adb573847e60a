"""The scripts start processes that meet, pass their arguments on, and stop them all.

What they call (coat, srun, mpirun, ssh) is played here: it starts processes on this machine, with
the variables that the real one sets.
"""

import os
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest
from jax._src.clusters import ClusterEnv
from processes import ROOT, SECONDS, environment, free_port, line

from coat_jax.cli.train import STOPPED
from coat_jax.training.cluster.distributed import find_place

LAUNCH = ROOT / "launch"
SCRIPTS = ["slurm.sbatch", "mpirun.sh", "ssh.sh"]
ARGUMENTS = ["configs/a.py", "--out", "it's $HOME/a run"]

# Processes agree to stop when one is asked to, as those of a run do.
COAT = """
printf '%s\\n' "$@" >"$NOTES/given.$$"
env >"$NOTES/variables.$$"
trap 'touch "$NOTES/stop"' USR1 TERM
echo $$ >>"$NOTES/numbers"
echo started
until [[ -e $NOTES/stop ]]; do sleep 0.05; done
exit 143
"""
# Starts its operands twice, as the first and second task of a step on two nodes.
SRUN = """
while [[ $1 == -* ]]; do echo "$1" >>"$NOTES/options"; shift; done
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=2 \\
  SLURM_STEP_NODELIST=127.0.0.[1-2] JAX_COORDINATOR_PORT=$PORT "$@" &
  tasks+=($!)
done
for task in "${tasks[@]}"; do wait $task || code=$?; done
exit ${code:-0}
"""
SCONTROL = 'echo "$@" >>"$NOTES/scontrol"'
MPIRUN = """
while [[ $1 == -* ]]; do
  case $1 in
    --hostfile | --map-by | --bind-to) echo "$1 $2" >>"$NOTES/options"; shift 2 ;;
    -x) [[ $2 != *=* ]] || export "$2"; shift 2 ;;
    *) exit 1 ;;
  esac
done
for rank in 0 1; do
  OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_SIZE=1 \\
  OMPI_COMM_WORLD_LOCAL_RANK=0 "$@" &
  ranks+=($!)
done
for rank in "${ranks[@]}"; do wait $rank || code=$?; done
exit ${code:-0}
"""
SSH = 'echo "$1" >>"$NOTES/hosts"; exec bash -c "$2"'  # as sshd does, in the home of its user
PLAYED = {"coat": COAT, "srun": SRUN, "scontrol": SCONTROL, "mpirun": MPIRUN, "ssh": SSH}


@pytest.fixture
def stage(tmp_path):
    """Where the scripts run: returns a function that starts one."""
    programs, notes, folder = (tmp_path / name for name in ("bin", "notes", "a folder"))
    for made in (programs, notes, folder):
        made.mkdir()
    for name, text in PLAYED.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (programs / name).chmod(0o755)
    started = []

    def start(script, *arguments, **variables):
        port = free_port()
        process = subprocess.Popen(
            ["bash", LAUNCH / script, *arguments],
            cwd=folder,
            env=environment(
                PATH=f"{programs}:{os.environ['PATH']}",
                NOTES=notes,
                PORT=port,
                **{"JAX_COORDINATOR_PORT": port, **variables},
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        process.notes, process.port = notes, port
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def assert_both_start(process, launcher, coordinator):
    """With the arguments of the script, and where each can find its place."""
    assert [line(process, "started") for _ in range(2)] == ["started"] * 2
    given = [path.read_text().splitlines() for path in process.notes.glob("given.*")]
    assert given == [["train", *ARGUMENTS]] * 2
    assert places(process) == [(coordinator, 2, i, [], launcher) for i in (0, 1)]


def places(process):
    """Where each process stands, by its variables."""
    found = []
    for path in process.notes.glob("variables.*"):
        pairs = (line.partition("=") for line in path.read_text().splitlines())
        place = find_place({name: value for name, _, value in pairs})
        found.append(tuple(place.values()))
    return sorted(found)


def stop_one(process):
    numbers = (process.notes / "numbers").read_text().split()
    os.kill(int(numbers[-1]), signal.SIGUSR1)


def assert_stopped(process):
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == STOPPED, errors


def test_shells_can_read_the_scripts():
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    subprocess.run([shellcheck, *(LAUNCH / script for script in SCRIPTS)], check=True)
    assert all(os.access(LAUNCH / script, os.X_OK) for script in SCRIPTS)


def test_slurm_runs_again_what_had_to_stop(stage):
    process = stage("slurm.sbatch", *ARGUMENTS, SLURM_JOB_ID=7)
    assert_both_start(process, "slurm", None)
    stop_one(process)
    assert_stopped(process)
    assert (process.notes / "scontrol").read_text() == "requeue 7\n"


def test_jax_has_an_environment_for_each_launcher():
    """By whose name `coat train` asks for it."""
    assert {"slurm", "ompi"} <= {cluster.name for cluster in ClusterEnv._cluster_types}


def test_slurm_does_not_run_again_what_failed(stage, tmp_path):
    (tmp_path / "bin" / "coat").write_text("#!/bin/sh\nexit 2\n")
    process = stage("slurm.sbatch", *ARGUMENTS, SLURM_JOB_ID=7)
    assert process.wait() == 2
    assert not (process.notes / "scontrol").exists()


def test_slurm_runs_in_a_container_where_one_is_named(stage, tmp_path):
    (tmp_path / "bin" / "coat").write_text("#!/bin/sh\n")
    assert stage("slurm.sbatch", *ARGUMENTS, CONTAINER="registry#coat:1").wait() == 0
    assert "--container-image=registry#coat:1\n" in (tmp_path / "notes/options").read_text()


def test_slurm_is_told_what_to_ask_for():
    options = [
        text.removeprefix("#SBATCH --").split()[0]
        for text in (LAUNCH / "slurm.sbatch").read_text().splitlines()
        if text.startswith("#SBATCH")
    ]
    assert {"ntasks-per-node=1", "signal=USR1@300", "requeue", "open-mode=append"} <= {*options}


def test_mpirun_starts_processes_that_meet(stage, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# ours\n\n127.0.0.1 slots=8\nnode2 slots=8\n")
    process = stage("mpirun.sh", hosts, *ARGUMENTS, PER_NODE=4)
    assert_both_start(process, "ompi", f"127.0.0.1:{process.port}")
    assert "--map-by ppr:4:node\n" in (process.notes / "options").read_text()
    stop_one(process)
    assert_stopped(process)


def test_ssh_starts_processes_that_meet_and_stops_them(stage, tmp_path):
    process = stage("ssh.sh", "127.0.0.1,node2", *ARGUMENTS)
    assert_both_start(process, "deactivate", f"127.0.0.1:{process.port}")
    process.send_signal(signal.SIGTERM)
    assert_stopped(process)
    hosts = (process.notes / "hosts").read_text().split()
    assert sorted(hosts[:2]) == ["127.0.0.1", "node2"]
    assert list((tmp_path / "a folder").iterdir()) == []


def test_ssh_hands_on_a_failure(stage, tmp_path):
    (tmp_path / "bin" / "coat").write_text("#!/bin/sh\nexit $((2 * JAX_PROCESS_ID))\n")
    assert stage("ssh.sh", "node1,node2", *ARGUMENTS).wait() == 2


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["mpirun.sh"], "mpirun.sh: HOSTFILE CONFIG"),
        (["mpirun.sh", "nowhere", "configs/a.py"], "with a readable file"),
        (["ssh.sh", "node1"], "ssh.sh: HOST,HOST,... CONFIG"),
    ],
)
def test_missing_arguments_are_named(stage, arguments, needed):
    process = stage(*arguments)
    _, errors = process.communicate()
    assert (process.returncode, errors.count("\n")) == (2, 1)
    assert needed in errors
