#!/usr/bin/env bash
# Environment with test tools, ruff, mypy, then tests.
#   bash scripts/test.sh            every test, three files at a time: much of it is waiting for processes
#   bash scripts/test.sh fast       tests/unit alone: one process per test file; tests over a second are listed; under two minutes
#   bash scripts/test.sh explore    property tests alone, each with ten times the examples, newly drawn;
#                                   --hypothesis-seed 7 draws the same ones again
#   bash scripts/test.sh ARGUMENTS  arguments of pytest, e.g. -n 0 tests/parallel, or -m 'engines or faults'
# PYTHON=python3.12 before it: the same in .venv-python3.12, with the versions of that Python.
# Markers are the names of the folders in tests/. Seconds of every test are kept in build/test_durations.tsv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer_help "$0" "$@"
ensure_environment dev
if command -v cc >/dev/null; then ensure_environment tasks; else say "no C compiler on PATH; tests of reasoning-gym will be skipped"; fi
cd "$REPO"
unset PYTHONDONTWRITEBYTECODE # every process would compile the project and rewrite the tests again
PYTEST=("$VENV/bin/python" -m pytest)
if [ "${1:-}" = explore ]; then
    exec "${PYTEST[@]}" -n 3 tests/unit tests/process -m hypothesis --hypothesis-profile explore --timeout 1800 "${@:2}"
fi
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
# Compiled once, on the core that mypy leaves, and not by every process that collects tests.
"$VENV/bin/python" -c 'from slime_like.cpu.kernels import decode_attention, decode_heads, draw, operators' &
"$VENV/bin/mypy"
wait $!
if [ "${1:-}" = fast ]; then
    exec "${PYTEST[@]}" -n 2 --dist loadfile tests/unit --unit-limit 1 "${@:2}"
fi
ensure_browser
exec "${PYTEST[@]}" -n 3 --dist loadfile --no-loadscope-reorder "$@"
