#!/usr/bin/env bash
# Runs the supervisor's tests on a bare Python 3.8, the oldest that hosts may have. Where there is none
# it says so, and with CI=true fails. What the tests say is printed when they are done: others run meanwhile.
set -euo pipefail
cd "$(dirname "$0")/.."

if python=$(tools/find-python.sh 3.8); then
    echo "supervisor tests on $("$python" -V), $python"
    status=0
    said=$("$python" -B -I -S tools/supervisor_tests.py 2>&1) || status=$?
    printf '%s\n' "$said"
    exit "$status"
fi
echo "supervisor tests on Python 3.8: skipped, no python3.8 on PATH or in pyenv" >&2
[ "${CI:-}" != true ]
