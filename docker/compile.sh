#!/usr/bin/env bash
# Compile PACKAGE==VERSION from its source against the installed torch, by the C++ standard that torch's headers need: 20 from
# torch 2.14 on, 17 before. The packages themselves ask for 17 whatever torch is there.
#   bash compile.sh PACKAGE VERSION [ARGUMENTS OF pip install]
set -euo pipefail
package="$1" version="$2"
standard=$(python -c 'from importlib.metadata import version as v; print(20 if tuple(map(int, v("torch").split(".")[:2])) >= (2, 14) else 17)')
source=$(mktemp -d)
pip download -q --no-deps --no-binary :all: --no-build-isolation -d "$source" "$package==$version"
tar -xzf "$source"/*.tar.gz --strip-components=1 -C "$source"
find "$source" -maxdepth 2 \( -name setup.py -o -name build_ext.py \) -exec sed -i "s/-std=c++17/-std=c++$standard/g" {} +
rm -rf "$source/flash_attn/cute" # an old copy of flash-attn-4, which SGLang installs at the same place
pip install --no-build-isolation "${@:3}" "$source"
rm -rf "$source"
