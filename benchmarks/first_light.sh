#!/usr/bin/env bash
# What one GPU shows of this project: tests, trainer benchmark, then whatever else is installed. Report: build/first_light/report.md.
#   bash benchmarks/first_light.sh --stage 1    torch and transformers suffice, with wheels of scripts/gpu_wheels.sh in build/wheels;
#                                               below nine minutes
#   bash benchmarks/first_light.sh              the same, then what needs Transformer Engine, flash-attn, vLLM, Ray
# Uses the python3 on PATH. Nothing is downloaded; the wheels go to build/first_light/site.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SITE="$PWD/build/first_light/site"
shopt -s nullglob
wheels=(build/wheels/*.whl)
if [ ${#wheels[@]} -gt 0 ] && ! python3 -I -c 'from importlib.metadata import version; version("slime-like")' 2>/dev/null; then
    rm -rf "$SITE"
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$SITE" "${wheels[@]}"
fi
if [ -d "$SITE" ]; then export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"; fi
# Every process is on this machine: neither NCCL nor gloo has to find another address.
export PYTHONUNBUFFERED=1 NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo
exec python3 -m benchmarks.first_light "$@"
