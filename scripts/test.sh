#!/usr/bin/env bash
# The whole check: environment with test tools, ruff, mypy, then every test, three files at a time: much of it is waiting
# for processes to start and to end. Arguments go to pytest (default: the suite); `-n 0` runs one file after the other.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment dev
ensure_browser
cd "$REPO"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
exec "$VENV/bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
