"""Check that vLLM's kernels and our adapter import: ``python -m benchmarks.first_light.vllm_imports``."""

import importlib
import sys

import torch

_MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
    "vllm.spinloop",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.model_executor.models.qwen3",
    "rollout.vllm.engine",
    "rollout.vllm.worker",
)


def main() -> None:
    """Exit with 1 if one is missing. Kernels link to the driver, so nothing can be checked without one."""
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            if not torch.cuda.is_available():
                print(f"figures: skipped, no CUDA device ({error})")
                return
            print(f"figures: {name}: {error}")
            sys.exit(1)
    import vllm

    print(f"figures: vLLM {vllm.__version__} with torch {torch.__version__}, {len(_MODULES)} modules imported")


if __name__ == "__main__":
    main()
