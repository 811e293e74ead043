#!/usr/bin/env bash
# Runs the suite in two halves side by side: the payload's tests compute, all others mostly wait.
set -uo pipefail
cd "$(dirname "$0")/.."

log=$(mktemp)
trap 'kill "${payload:-}" 2>/dev/null; rm -f "$log"' EXIT
.venv/bin/python -m pytest tests/payload >"$log" 2>&1 &
payload=$!
.venv/bin/python -m pytest --ignore tests/payload
rest=$?
wait "$payload"
computed=$?
cat "$log"
[ "$rest" -eq 0 ] && [ "$computed" -eq 0 ]
