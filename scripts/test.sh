#!/usr/bin/env bash
# The whole check: environment with test tools, ruff, mypy, then every test, three files at a time: much of it is waiting
# for processes to start and to end. Arguments go to pytest (default: the suite); `-n 0` runs one file after the other.
# `test.sh explore`: the property tests alone, each with ten times the examples, drawn anew. Further arguments go to
# pytest: `--hypothesis-seed 7` draws the same ones again.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment dev
if [ "${1-}" = explore ]; then
  cd "$REPO"
  exec "$VENV/bin/python" -m pytest tests/unit -m hypothesis --hypothesis-profile explore --timeout 1800 -n 3 "${@:2}"
fi
ensure_browser
cd "$REPO"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
exec "$VENV/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
