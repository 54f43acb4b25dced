#!/usr/bin/env bash
# Creates the environment with test tools, then runs ruff, mypy and tests.
#   bash scripts/test.sh            every test, three files at a time, because tests wait for processes
#   bash scripts/test.sh fast       only tests/unit, one process per file; lists tests over a second; under two minutes
#   bash scripts/test.sh explore    only property tests, each with ten times the examples, newly drawn;
#                                   --hypothesis-seed 7 draws the same ones again
#   bash scripts/test.sh ARGUMENTS  arguments of pytest, e.g. -n 0 tests/parallel, or -m 'engines or faults'
# With PYTHON=python3.12, the same runs in .venv-python3.12, with that Python's versions.
# Markers are the names of the folders in tests/. build/test_durations.tsv has the seconds of every test.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer_help "$0" "$@"
ensure_environment dev
if command -v cc >/dev/null; then ensure_environment tasks; else say "no C compiler on PATH; tests of reasoning-gym will be skipped"; fi
cd "$REPO"
unset PYTHONDONTWRITEBYTECODE # otherwise every process would compile the project and rewrite the tests
PYTEST=("$VENV/bin/python" -m pytest)
if [ "${1:-}" = explore ]; then
    exec "${PYTEST[@]}" -n 3 tests/unit tests/process -m hypothesis --hypothesis-profile explore --timeout 1800 "${@:2}"
fi
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
if [ "${1:-}" = fast ]; then
    exec "${PYTEST[@]}" -n 2 --dist loadfile tests/unit --unit-limit 1 "${@:2}"
fi
ensure_browser
exec "${PYTEST[@]}" -n 3 --dist loadfile --no-loadscope-reorder "$@"
