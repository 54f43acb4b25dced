#!/usr/bin/env bash
# The whole check: environment with test tools, ruff, mypy, then every test, two files at a time. Arguments go to pytest
# (default: the suite); `-n 0` runs one file after the other.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment dev
ensure_browser
cd "$REPO"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
exec "$VENV/bin/python" -m pytest -n 2 --dist loadfile "$@"
