#!/usr/bin/env bash
# Packs what a GPU machine with torch and transformers, but no package index, needs for run.sh: three archives, each below 50 MB, in
# build/first_light. run.sh unpacks what it finds there. For Python 3.12 and Hopper GPUs.
#   bash benchmarks/first_light/pack.sh [NUMBER...]      default: 1 2 3
#   1.tar.xz  Ray without its Java part, Megatron-core, pydantic, math-verify, this project's entry points
#   2.tar.xz  Python packages that vLLM imports
#   3.tar.xz  vLLM for CUDA without what only other GPUs or quantized models use
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../../scripts/environment.sh"
OUT="$REPO/build/first_light"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT
python="$(find_python)"

BASE=(ray megatron-core omegaconf plotly pydantic pydantic_core annotated-types typing-inspection typing_extensions jsonschema
    jsonschema-specifications referencing rpds-py math-verify latex2sympy2_extended antlr4-python3-runtime)
# Versions are those of the CPU build, whose dependencies are the same; only this one is pinned otherwise for CUDA.
TVM_FFI=apache-tvm-ffi==0.1.11
ENGINE=(anthropic astor blake3 cachetools cbor2 cffi compressed-tensors cryptography depyf docstring_parser email-validator
    dnspython fastapi fastapi-cli gguf googleapis-common-protos httpcore2 httptools httpx2 ijson interegular jiter jmespath lark
    llguidance lm-format-enforcer loguru mcp mcp-types mistral_common model-hosting-container-standards msgspec openai
    opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp opentelemetry-exporter-otlp-common
    opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-http opentelemetry-proto opentelemetry-sdk
    opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony outlines_core partial-json-parser
    prometheus-fastapi-instrumentator pybase64 pycountry pycparser pydantic-extra-types pydantic-settings PyJWT
    python-dotenv python-json-logger python-multipart pyzmq rich-toolkit setproctitle sniffio sse-starlette starlette supervisor
    truststore uvicorn watchfiles websockets xgrammar)

# Of lines for several Pythons the last is for the newest.
pinned() { for package in "$@"; do grep -oi "^$package==[^ ;]*" "$REPO/constraints.txt" | tail -1; done; }

install() { # $1: site; then requirements
    local platforms=() glibc
    for glibc in 2_12 2_17 2_24 2_26 2_27 2_28 2_31 2_34; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    "$python" -m pip install -q --no-deps --ignore-requires-python --only-binary=:all: --no-compile --python-version 3.12 --implementation cp \
        "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 --target "$1" "${@:2}"
}

pack() { # $1: number; its site is $WORK/$1
    tar -C "$WORK/$1" --sort=name --owner=0 --group=0 --exclude='*.js.map' -cf - . | xz -T0 -6 >"$OUT/$1.tar.xz"
    say "$(du -m "$OUT/$1.tar.xz" | cut -f1) MB in $OUT/$1.tar.xz"
}

fill_1() {
    install "$WORK/1" $(pinned "${BASE[@]}")
    rm -rf "$WORK"/1/ray/{jars,rllib}
    "$python" -m pip wheel -q --no-deps -w "$WORK/own" "$REPO"
    rm -rf "$REPO/slime_like.egg-info" "$REPO/build/lib" "$REPO"/build/bdist.*
    install "$WORK/1" "$WORK"/own/*.whl
    rm -rf "$WORK"/1/{slime_like,backends,rollout} # the clone has them
}

fill_2() { install "$WORK/2" $(pinned "${ENGINE[@]}") "$TVM_FFI"; }

fill_3() {
    install "$WORK/3" vllm==0.32.0
    local vllm="$WORK/3/vllm"
    # Rust's front end; FlashAttention 2; kernels for DeepSeek, Kimi and 4-bit weights; CUTLASS's headers.
    rm -rf "$vllm"/{vllm-rs,vllm_flash_attn/_vllm_fa2_C.abi3.so,third_party/{deep_gemm,fmha_sm100,tml_fa4}} \
        "$vllm"/_{deepselect,flashkda,flashmla,flashmla_extension,qutlass}_C.abi3.so \
        "$vllm/entrypoints/serve/instrumentator/static"
    (cd "$REPO" && "$python" -m benchmarks.first_light.hopper "$vllm"/_{moe_,}C_stable_libtorch.abi3.so)
}

mkdir -p "$OUT"
[ $# -gt 0 ] || set -- 1 2 3
for number in "$@"; do
    "fill_$number"
    pack "$number"
done
