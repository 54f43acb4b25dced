#!/usr/bin/env bash
# Runs the tests of Transformer Engine's layers with the real package, above kernels for a CPU: see docs/gpu.md. The
# first run makes .venv-te with Python 3.12 (8 GB, most of it torch's CUDA build), which PYTHON or PATH must have.
#   bash scripts/test_te.sh                 every test of this lane
#   bash scripts/test_te.sh ARGUMENTS       further arguments of pytest, e.g. -k resumed
set -euo pipefail
export PYTHON="${PYTHON:-python3.12}" PIP_NO_CACHE_DIR=1
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
answer_help "$0" "$@"
VENV="$REPO/.venv-te"
EXTRA="$REPO/tests/te/requirements.txt"

te_key() { cat "$EXTRA" "$REPO/tests/te/edits.py" <(environment_key) | sha256sum | cut -d' ' -f1; }

# The wheels are installed and edited. Of the package that would be compiled, the sources are kept, to be read.
install_te() {
    local packages
    packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    say "installing Transformer Engine for tests"
    rm -rf "$VENV/transformer_engine_torch" "$packages"/transformer_engine*
    pip_install --no-deps --require-hashes --requirement <(grep -v '^transformer_engine_torch' "$EXTRA")
    local sources="$VENV/sources"
    mkdir -p "$sources"
    "$VENV/bin/pip" download -qq --no-deps --no-build-isolation --no-binary :all: --require-hashes --dest "$sources" \
        --requirement <(grep '^transformer_engine_torch' "$EXTRA")
    mkdir "$VENV/transformer_engine_torch"
    tar -xzf "$sources"/transformer_engine_torch-*.tar.gz -C "$VENV/transformer_engine_torch" --strip-components 1
    rm -r "$sources"
    PYTHONPATH="$REPO" "$VENV/bin/python" -m tests.te.edits "$packages"
    te_key >"$VENV/.slime-like-te"
}

is_te_complete() { [ "$(cat "$VENV/.slime-like-te" 2>/dev/null)" = "$(te_key)" ]; }

ensure_environment dev
if ! is_te_complete; then
    exec 9>"$VENV.lock"
    flock -w 3600 9 || die "$VENV has been in use for an hour; end the installation there"
    is_te_complete || install_te
    exec 9>&-
fi
cd "$REPO"
TE_CPU_KERNELS=1 PYTHONPATH="$REPO" exec "$VENV/bin/python" -m pytest \
    tests/parallel/test_transformer_engine.py tests/parallel/test_fp8.py \
    tests/mutation/test_parity.py::test_a_fused_optimizer_that_begins_anew_is_caught "$@"
