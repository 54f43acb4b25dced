#!/usr/bin/env bash
# Environment with test tools, ruff, mypy, then tests.
#   bash scripts/test.sh            every test, three files at a time: much of it is waiting for processes
#   bash scripts/test.sh fast       tests/unit alone: one process, at most a second a test; under two minutes
#   bash scripts/test.sh ARGUMENTS  what pytest is given, e.g. -n 0 tests/parallel, or -m 'engines or faults'
# Markers are the names of the folders in tests/. Seconds of every test are kept in build/test_durations.tsv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment dev
cd "$REPO"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
if [ "${1:-}" = fast ]; then
    shift
    exec "$VENV/bin/python" -m pytest -n 2 --dist loadfile tests/unit --unit-limit 1 "$@"
fi
ensure_browser
exec "$VENV/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
