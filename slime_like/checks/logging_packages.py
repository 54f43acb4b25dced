"""Are the packages installed that figures are logged with?"""

from collections.abc import Iterator
from importlib.util import find_spec

from slime_like.config.run import RunConfig


def logging_problems(config: RunConfig) -> Iterator[str]:
    wanted = (("wandb", config.logging.wandb), ("tensorboard", config.logging.tensorboard))
    for package, asked in wanted:
        if asked and find_spec(package) is None:
            yield f"logging.{package}=true, but the package is not installed; pip install {package}, or set it to false"
