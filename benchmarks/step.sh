#!/usr/bin/env bash
# Seconds of one training step, next to TRL's GRPOTrainer; installs TRL into .venv first. Arguments go to `python -m benchmarks.step`.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"
ensure_environment bench
cd "$REPO"
exec "$VENV/bin/python" -m benchmarks.step "$@"
