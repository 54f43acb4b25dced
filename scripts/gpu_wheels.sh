#!/usr/bin/env bash
# Wheels for a GPU machine that has torch, transformers and pytest, but no package index: this project, Megatron-core, pydantic.
#   bash scripts/gpu_wheels.sh [DIR]      default: build/wheels; for Python 3.12, about 6 MB
# There, benchmarks/first_light.sh installs them into a separate folder. They need nothing else:
#   python3 -m pip install --no-index --no-deps --target SITE DIR/*.whl && export PYTHONPATH=SITE
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
DIR="$(realpath -m "${1:-$REPO/build/wheels}")"
PACKAGES=(megatron-core pydantic pydantic_core annotated-types typing-inspection typing_extensions)
# pip matches a platform exactly.
PLATFORMS=(--platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)

python="$(find_python)"
pins=()
for package in "${PACKAGES[@]}"; do
    # Of lines for several Pythons the last is for the newest.
    pins+=("$(grep -o "^$package==[^ ;]*" "$REPO/constraints.txt" | tail -1)")
done
mkdir -p "$DIR"
rm -rf "$DIR"/*.whl "$REPO/build/lib" # what an earlier build left there would be packed, too
"$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${PLATFORMS[@]}" -d "$DIR" "${pins[@]}"
"$python" -m pip wheel -q --no-deps -w "$DIR" "$REPO"
rm -rf "$REPO/slime_like.egg-info" # a Python started there would count it as installed
say "$(find "$DIR" -name '*.whl' | wc -l) wheels for Python 3.12, $(du -shc "$DIR"/*.whl | tail -1 | cut -f1) in $DIR"
