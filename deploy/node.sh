#!/bin/bash
# One node of several that serve a model together: start it on each, with the same settings. The first answers HTTP.
#
#   ENDPOINT=host0:29500 NODES=2 NODE=0 deploy/node.sh model.path=DIR layout.kvp=16 serve.host=0.0.0.0 serve.api_keys=FILE
#
# ENDPOINT is HOST:PORT of the first node, NODES how many there are, NODE this one's number, from 0; RANKS of each are as
# many as it has GPUs. A LeaderWorkerSet and Slurm say all of this themselves. The socket is this node's own.
set -euo pipefail
cd "$(dirname "$0")/.."
export NODES="${NODES:-${LWS_GROUP_SIZE:-${SLURM_NNODES:-2}}}"
export ENDPOINT="${ENDPOINT:-${LWS_LEADER_ADDRESS:?set ENDPOINT=HOST:PORT of the first node}:29500}"
node="${NODE:-${LWS_WORKER_INDEX:-${SLURM_NODEID:?set NODE, the number of this node, from 0}}}"
directory="$(mktemp -d)"
trap 'rm -rf "$directory"' EXIT
socket="$directory/helix.sock"
root="$("${PYTHON:-python3}" -c 'import helix; print(helix.ROOT)')" # a wheel has `launch` off Python's path
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

"${PYTHON:-python3}" -m launch.agent "$@" serve.socket="$socket" &
children=("$!")
if [ "$node" = 0 ]; then
    "${PYTHON:-python3}" -m launch.cli serve "$@" serve.attach="$socket" &
    children+=("$!")
    trap 'kill -TERM "${children[1]}" 2>/dev/null || true' TERM INT # it ends once it has answered
else
    trap : TERM INT # ranks end together: this node's do with the first node's
fi

# Whichever ends first takes the other along; a signal alone ends nothing.
ended=
while [ -z "$ended" ]; do
    sleep 1 & # `wait -n` would miss one that has ended already
    wait "$!" || true
    for child in "${children[@]}"; do kill -0 "$child" 2>/dev/null || ended="$child"; done
done
wait "$ended" && code=0 || code=$?
kill -TERM "${children[@]}" 2>/dev/null || true
wait || true
exit "$code"
