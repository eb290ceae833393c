#!/bin/sh
# Several hosts, or several agents on one: run this once on each, with the same NODES and ENDPOINT (HOST:PORT of the first).
#
#   ENDPOINT=host0:29500 NODES=2 RANKS=4 launch/agent.sh layout.kvp=8 decode.prompts=FILE.jsonl
#
# NODES agents (2 if unset) with RANKS ranks each (one a GPU if unset) meet at ENDPOINT; RUN distinguishes jobs that
# share it. On one host, start it twice.
set -eu
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}" # failed connections are reported in one line
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m launch.agent "$@"
