#!/usr/bin/env bash
# The whole check: environment with test tools, ruff, mypy, then every test. Arguments go to pytest (default: the suite).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment dev
ensure_browser
cd "$REPO"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/mypy"
exec "$VENV/bin/python" -m pytest "$@"
