#!/usr/bin/env bash
# Trains on the hosts of a file, with Open MPI to start the processes. JAX does not use MPI itself.
#
#   launch/mpirun.sh hosts llama2_7b --gradient_accumulation_steps 64 --out runs/llama2_7b
#
# The file names one host a line. All must see this folder, under the same name, and reach the
# first one's port (JAX_COORDINATOR_PORT, 12355 by default). After the file comes what `coat train`
# takes.
#
# To stop and save:  kill -USR1 $(pgrep -n -u $USER mpirun)
# mpirun passes SIGUSR1 on to all processes. After SIGTERM or Ctrl-C it kills them within seconds,
# too soon to save.

set -euo pipefail
if (($# < 2)) || [[ ! -r $1 ]]; then
  echo "mpirun.sh: HOSTFILE CONFIG [--field value ...], with a readable file" >&2
  exit 2
fi
hosts=$1
shift

first=$(awk '!/^#/ && NF { print $1; exit }' "$hosts")
# Open MPI 5 no longer reports where the first process is, so the address is set here.
address=$first:${JAX_COORDINATOR_PORT:-12355}

# Open MPI shows processes a terminal, even where their output goes to a file.
[[ -t 1 ]] || export TERM=dumb

# One process on each node, for all of its GPUs; PER_NODE=8 starts one for each of eight. Open MPI
# would bind a process to one core (--bind-to none), and starts it without our PATH.
exec mpirun --hostfile "$hosts" --map-by "ppr:${PER_NODE:-1}:node" --bind-to none \
  -x PATH -x TERM -x JAX_COORDINATOR_ADDRESS="$address" "${COAT:-coat}" train "$@"
