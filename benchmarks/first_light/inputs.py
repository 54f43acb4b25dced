"""Make random models, each with sums as prompts: ``python -m benchmarks.first_light.inputs DIR SHAPE...``."""

import sys
from pathlib import Path

from benchmarks.trainer.jobs import dtype
from benchmarks.trainer.shapes import write_checkpoint
from slime_like.examples.tiny_model import make_arithmetic_data


def main() -> None:
    """Make the models, keeping checkpoints that an earlier script made."""
    directory, *shapes = sys.argv[1:]
    for shape in dict.fromkeys(shapes):
        model = Path(directory, shape)
        if not (model / "tokenizer.json").exists():  # written last
            write_checkpoint(shape, model, dtype())
        make_arithmetic_data(model / "data")


if __name__ == "__main__":
    main()
