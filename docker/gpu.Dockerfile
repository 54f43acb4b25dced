# Image for GPU nodes: one engine, Transformer Engine, flash-attn, and this project. Never built by its authors (docs/support.md).
#
#   docker build -f docker/gpu.Dockerfile -t slime-like:vllm .
#   docker build -f docker/gpu.Dockerfile -t slime-like:sglang --build-arg ENGINE=sglang --build-arg TORCH=2.14.1 .
#
# Engines pin torch: vLLM 0.32.0 wants 2.13.0, the version that all of this project's tests run with; SGLang 0.5.23 wants 2.14.1.
# Therefore one engine per image.
#
# The base has no cuDNN: Transformer Engine would load it beside the one that torch brings, and two versions do not mix.
# Its digest is that of the list of all architectures.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04@sha256:7d2f6a8c2071d911524f95061a0db363e24d27aa51ec831fcccf9e76eb72bc92

ARG ENGINE=vllm
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu130
ARG VLLM=0.32.0
ARG SGLANG=0.5.23
ARG TRANSFORMER_ENGINE=2.20.2
ARG FLASH_ATTN=2.8.3.post2
# What is compiled for: Ampere 8.0, Hopper 9.0, Blackwell 10.0.
ARG CUDA_ARCHS="8.0;9.0;10.0"
# A job of flash-attn takes 4 GiB per thread: 6 jobs of 2 threads about 50 GiB.
ARG MAX_JOBS=6
ARG NVCC_THREADS=2

ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
# ibverbs-providers has the drivers of network cards: without them NCCL finds none, and falls back to TCP.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv git ninja-build iproute2 \
        libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/slime-like
# torch's cuDNN, for compilers and for Transformer Engine, which looks here first.
ENV PATH=/opt/slime-like/bin:$PATH \
    CUDNN_HOME=/opt/slime-like/lib/python3.12/site-packages/nvidia/cudnn
ENV CPATH=$CUDNN_HOME/include \
    LD_LIBRARY_PATH=$CUDNN_HOME/lib

# torch first and alone, so that nothing later chooses another one.
RUN pip install "torch==${TORCH}" --index-url "${TORCH_INDEX}" \
    && printf 'torch==%s\n' "${TORCH}" >/opt/pins.txt
RUN if [ "${ENGINE}" = vllm ]; then pip install -c /opt/pins.txt "vllm==${VLLM}"; \
    elif [ "${ENGINE}" = sglang ]; then pip install -c /opt/pins.txt "sglang==${SGLANG}"; \
    else echo "ENGINE=${ENGINE} is neither vllm nor sglang" >&2; exit 1; fi

# Compiled against that torch: tens of minutes.
COPY docker/compile.sh /opt/compile.sh
RUN pip install setuptools wheel packaging pybind11 psutil \
    && FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS="80;90;100" MAX_JOBS="${MAX_JOBS}" NVCC_THREADS="${NVCC_THREADS}" \
       bash /opt/compile.sh flash-attn "${FLASH_ATTN}" -c /opt/pins.txt \
    && pip install -c /opt/pins.txt "transformer-engine[core_cu13]==${TRANSFORMER_ENGINE}" \
    && NVTE_FRAMEWORK=pytorch TORCH_CUDA_ARCH_LIST="${CUDA_ARCHS}" MAX_JOBS="${MAX_JOBS}" \
       bash /opt/compile.sh transformer-engine-torch "${TRANSFORMER_ENGINE}" -c /opt/pins.txt

# The project with the versions its tests run with, where the engine has not chosen already.
COPY . /opt/src
WORKDIR /opt/src
RUN pip install -c /opt/pins.txt ray==2.60.0 megatron-core==0.19.2 psutil==7.2.2 math-verify==0.9.0 ring-flash-attn==0.1.8 \
        fla-core==0.6.0 tensorboard==2.21.0 pyarrow==26.0.1 \
    && pip install --no-build-isolation -c /opt/pins.txt ".[train]" \
    && python -c "import torch; assert torch.__version__.split('+')[0] == '${TORCH}', torch.__version__" \
    && slime-like --version

# Runs without root: the cluster's key must belong to the user of the run.
RUN useradd --create-home --uid 1001 trainer && chown trainer /opt/src
USER trainer
CMD ["bash"]
