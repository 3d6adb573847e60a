"""The scripts start processes that meet, pass their arguments on, and stop them all.

What they call (srun, mpirun, ssh) is played here: it starts processes on this machine, with the
variables that the real one sets. `coat` is a run without a model, which says what it was given.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from processes import ROOT, SECONDS, environment, free_port, line, lines

LAUNCH = ROOT / "launch"
SCRIPTS = ["slurm.sbatch", "mpirun.sh", "ssh.sh"]
ARGUMENTS = ["configs/a.py", "--out", "it's $HOME/a run"]
STOPPED = 143

COAT = f"""
printf '%s\\n' "$@" >"$NOTES/given.$$"
echo $$ >>"$NOTES/numbers"
exec {sys.executable} {ROOT}/tests/training/cluster/joined.py
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
        process.notes = notes
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def assert_both_join_and_get_the_arguments(process):
    joined = sorted(line(process, "joined") for _ in range(2))
    assert joined == ["joined 0 of 2, sum 3", "joined 1 of 2, sum 3"]
    given = [path.read_text().splitlines() for path in process.notes.glob("given.*")]
    assert given == [["train", *ARGUMENTS]] * 2


def assert_both_stop(process):
    said, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == STOPPED, errors
    steps = [text.split(",")[0] for text in lines(said, "stopped after")]
    assert len(steps) == 2
    assert steps[0] == steps[1]


def signal_one(process, number):
    numbers = (process.notes / "numbers").read_text().split()
    os.kill(int(numbers[-1]), number)


@pytest.mark.parametrize("script", SCRIPTS)
def test_shells_can_read_the_scripts(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)
    assert os.access(LAUNCH / script, os.X_OK)


def test_shellcheck_has_no_objections():
    shellcheck = Path(sysconfig.get_path("scripts")) / "shellcheck"
    subprocess.run([shellcheck, *(LAUNCH / script for script in SCRIPTS)], check=True)


def test_slurm_runs_again_what_had_to_stop(stage):
    process = stage("slurm.sbatch", *ARGUMENTS, SLURM_JOB_ID=7)
    assert_both_join_and_get_the_arguments(process)
    signal_one(process, signal.SIGUSR1)
    assert_both_stop(process)
    assert (process.notes / "scontrol").read_text() == "requeue 7\n"


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
    assert_both_join_and_get_the_arguments(process)
    assert "--map-by ppr:4:node\n" in (process.notes / "options").read_text()
    signal_one(process, signal.SIGUSR1)
    assert_both_stop(process)


def test_ssh_starts_processes_that_meet_and_stops_them(stage, tmp_path):
    process = stage("ssh.sh", "127.0.0.1,node2", *ARGUMENTS)
    assert_both_join_and_get_the_arguments(process)
    process.send_signal(signal.SIGTERM)
    assert_both_stop(process)
    hosts = (process.notes / "hosts").read_text().split()
    assert sorted(hosts[:2]) == ["127.0.0.1", "node2"]
    assert list((tmp_path / "a folder").iterdir()) == []


def test_ssh_hands_on_a_failure(stage, tmp_path):
    (tmp_path / "bin" / "coat").write_text("#!/bin/sh\nexit $((2 * JAX_PROCESS_ID))\n")
    assert stage("ssh.sh", "node1,node2", *ARGUMENTS).wait() == 2


@pytest.mark.parametrize("arguments", [[], ["nowhere"], ["nowhere", "configs/a.py"]])
def test_missing_arguments_are_named(stage, arguments):
    process = stage("mpirun.sh", *arguments)
    _, errors = process.communicate()
    assert (process.returncode, errors.count("\n")) == (2, 1)
    assert "HOSTFILE CONFIG" in errors


def test_missing_arguments_of_ssh_are_named(stage):
    process = stage("ssh.sh", "node1")
    _, errors = process.communicate()
    assert (process.returncode, errors) == (2, "ssh.sh: HOST,HOST,... CONFIG [--field value ...]\n")
