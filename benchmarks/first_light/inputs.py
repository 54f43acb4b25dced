"""Make a random model of a shape, with sums as prompts: ``python -m benchmarks.first_light.inputs SHAPE DIR``."""

import sys
from pathlib import Path

from benchmarks.trainer.jobs import dtype
from benchmarks.trainer.shapes import write_checkpoint
from slime_like.examples.tiny_model import make_arithmetic_data


def main() -> None:
    """A checkpoint that an earlier script made stays."""
    shape, directory = sys.argv[1], Path(sys.argv[2])
    if not (directory / "tokenizer.json").exists():  # written last
        write_checkpoint(shape, directory, dtype())
    make_arithmetic_data(directory / "data")


if __name__ == "__main__":
    main()
