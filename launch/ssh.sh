#!/usr/bin/env bash
# Trains on a list of hosts, with nothing but ssh.
#
#   launch/ssh.sh node1,node2 llama2_7b --gradient_accumulation_steps 64 --out runs/llama2_7b
#
# All must see this folder, under the same name, let you in without a password, and reach the first
# one's port (JAX_COORDINATOR_PORT, 12355 by default). After the hosts comes what `coat train`
# takes. A non-login shell seldom finds an environment: COAT=/shared/venv/bin/coat names it.
#
# To stop and save: Ctrl-C, or SIGTERM to this script. The process on the first host is told, and
# tells the others.

# shellcheck disable=SC2029  # what ssh is given is completed here, on purpose
set -euo pipefail
if (($# < 2)); then
  echo "ssh.sh: HOST,HOST,... CONFIG [--field value ...]" >&2
  exit 2
fi
IFS=, read -ra hosts <<<"$1"
shift

printf -v folder %q "$PWD"
printf -v command ' %q' "${COAT:-coat}" train "$@"
note=.coat.$HOSTNAME.$$ # a file with the first process's PID, on the first host
address=${hosts[0]}:${JAX_COORDINATOR_PORT:-12355}

# Three variables are all that a process needs to find the others; `exec` keeps its PID.
begin() { # the number of a process
  ssh "${hosts[$1]}" "cd $folder && { test $1 != 0 || echo \$\$ >$note; } && exec env \
    JAX_COORDINATOR_ADDRESS=$address JAX_PROCESS_COUNT=${#hosts[@]} JAX_PROCESS_ID=$1 $command"
}
on_first() { ssh "${hosts[0]}" "cd $folder && $1"; }

processes=()
for index in "${!hosts[@]}"; do
  begin "$index" &
  processes+=($!)
done
trap 'on_first "kill \$(cat $note)"' INT TERM

failed=0
for process in "${processes[@]}"; do
  code=0
  wait "$process" || code=$?
  while kill -0 "$process" 2>/dev/null; do # a signal ended `wait`, not the process
    code=0
    wait "$process" || code=$?
  done
  ((code == 0)) || failed=$code
done
on_first "rm -f $note"
exit "$failed"
