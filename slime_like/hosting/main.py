"""Entry point of an engine in another interpreter: ``python -m slime_like.hosting.main DESCRIPTOR SCRATCH``."""

import asyncio
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.hosting.parent import Owner
from slime_like.interfaces import load_engine


async def main(descriptor: int, scratch: Path) -> None:
    """Serve the engine that the first call names until the owner at the other end of the descriptor ends."""
    owner = Owner(Connection(descriptor), scratch)
    with owner.starting() as (settings, engine_index):
        config = RunConfig.model_validate(settings)
        engine = load_engine(config.rollout.engine)(config, engine_index)
    await owner.serve(engine)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
