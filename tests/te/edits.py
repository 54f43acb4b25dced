"""Change an installed Transformer Engine 2.20.2 so that its Python code runs on a CPU: ``python -m tests.te.edits``.

Only checks of devices and types change, and the extension that is loaded. A text that is not found is an error.
"""

import sys
from pathlib import Path

VERSION = "2.20.2"
CUDA_TENSORS = "query_layer.is_cuda and key_layer.is_cuda and value_layer.is_cuda"
ATTENTION = "pytorch/attention/dot_product_attention"

EDITS: list[tuple[str, str, str]] = [
    (
        "common/__init__.py",
        """    spec = importlib.util.spec_from_file_location(module_name, _get_shared_object_file(framework))
    solib = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = solib
    spec.loader.exec_module(solib)
""",
        """    from tests.te import extension

    solib = extension.install()
""",
    ),
    ("pytorch/module/base.py", "if not torch.cuda.is_available():\n            raise", "if False:\n            raise"),
    ("pytorch/module/base.py", "if not inp.is_cuda:\n                raise", "if False:\n                raise"),
    (f"{ATTENTION}/dot_product_attention.py", CUDA_TENSORS, "True"),
    (f"{ATTENTION}/backends.py", CUDA_TENSORS, "True"),
    # The comparisons with float64 need more digits than 16 bits have.
    (
        f"{ATTENTION}/backends.py",
        "            x.dtype in [torch.float16, torch.bfloat16] or isinstance(x, QuantizedTensorStorage)\n",
        "            x.dtype in [torch.float16, torch.bfloat16, torch.float32]\n"
        "            or isinstance(x, QuantizedTensorStorage)\n",
    ),
    (
        f"{ATTENTION}/utils.py",
        "    if qkv_dtype not in [torch.bfloat16, torch.float16, torch.float8_e4m3fn] or qkv_type not in (\n",
        "    if qkv_dtype not in [torch.bfloat16, torch.float16, torch.float32] or qkv_type not in (\n",
    ),
]
"""File, text, and what becomes of each place that has it."""


def main(packages: Path) -> None:
    package = packages / "transformer_engine"
    for file, old, new in EDITS:
        text = (package / file).read_text(encoding="utf-8")
        if old not in text:
            sys.exit(f"{package / file} has no {old!r}: this is not Transformer Engine {VERSION}, or it is changed")
        (package / file).write_text(text.replace(old, new), encoding="utf-8")
    # Transformer Engine and this project ask whether the extension is installed.
    (package / "wheel_lib" / "transformer_engine_torch.cpu.so").touch()
    metadata = packages / f"transformer_engine_torch-{VERSION}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: {VERSION}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
