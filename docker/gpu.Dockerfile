# Image for GPU nodes: one engine, Transformer Engine, flash-attn, and this project. Never built by its authors (docs/support.md).
#
#   docker build -f docker/gpu.Dockerfile -t slime-like:vllm .
#   docker build -f docker/gpu.Dockerfile -t slime-like:sglang --build-arg ENGINE=sglang --build-arg TORCH=2.14.1 .
#
# Engines pin torch: vLLM 0.32.0 wants 2.13.0, the version that all of this project's tests run with; SGLang 0.5.23 wants 2.14.1.
# Therefore one engine per image. Megatron-core 0.16.1 admits Transformer Engine from 2.9 to below 2.12.
FROM nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04

ARG ENGINE=vllm
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG VLLM=0.32.0
ARG SGLANG=0.5.23
ARG TRANSFORMER_ENGINE=2.11.0
ARG FLASH_ATTN=2.8.3
# What is compiled for: Ampere 8.0, Hopper 9.0, Blackwell 10.0.
ARG CUDA_ARCHS="8.0;9.0;10.0"
ARG MAX_JOBS=16

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv git ninja-build iproute2 libibverbs1 \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/slime-like
ENV PATH=/opt/slime-like/bin:$PATH

# torch first and alone, so that nothing later chooses another one.
RUN pip install "torch==${TORCH}" --index-url "${TORCH_INDEX}" \
    && printf 'torch==%s\n' "${TORCH}" >/opt/pins.txt
RUN if [ "${ENGINE}" = vllm ]; then pip install -c /opt/pins.txt "vllm==${VLLM}"; \
    elif [ "${ENGINE}" = sglang ]; then pip install -c /opt/pins.txt "sglang==${SGLANG}"; \
    else echo "ENGINE=${ENGINE} is neither vllm nor sglang" >&2; exit 1; fi

# Compiled against that torch: tens of minutes.
RUN pip install setuptools wheel packaging pybind11 psutil \
    && TORCH_CUDA_ARCH_LIST="${CUDA_ARCHS}" MAX_JOBS="${MAX_JOBS}" FLASH_ATTN_CUDA_ARCHS="80;90;100" \
       pip install --no-build-isolation -c /opt/pins.txt "flash-attn==${FLASH_ATTN}" \
    && NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS}" \
       pip install --no-build-isolation -c /opt/pins.txt "transformer-engine[core_cu13,pytorch]==${TRANSFORMER_ENGINE}"

# The project with the versions its tests run with, where the engine has not chosen already.
COPY . /opt/src
WORKDIR /opt/src
RUN pip install -c /opt/pins.txt ray==2.60.0 megatron-core==0.16.1 psutil==7.2.2 math-verify==0.9.0 ring-flash-attn==0.1.8 \
        tensorboard==2.21.0 matplotlib==3.11.2 pyarrow==26.0.1 xxhash==4.1.0 \
    && pip install --no-build-isolation -c /opt/pins.txt ".[train]" \
    && python -c "import torch; assert torch.__version__.split('+')[0] == '${TORCH}', torch.__version__" \
    && slime-like --version

# Runs without root: the cluster's key must belong to the user of the run.
RUN useradd --create-home --uid 1001 trainer
USER trainer
CMD ["bash"]
