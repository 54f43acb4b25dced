"""Entry point of an engine in another interpreter: ``python -m slime_like.hosting.main DESCRIPTOR SCRATCH``."""

import asyncio
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.hosting.calls import Answer, one_line
from slime_like.hosting.parent import Owner
from slime_like.interfaces import load_engine


async def main(descriptor: int, scratch: Path) -> None:
    """Serve the engine that the first call names, until the owner at the other end of the descriptor ends."""
    owner = Owner(Connection(descriptor), scratch)
    call = await asyncio.to_thread(owner.first_call)
    settings, engine_index = call.arguments
    try:
        config = RunConfig.model_validate(settings)
        engine = load_engine(config.rollout.engine)(config, engine_index)
    except BaseException as error:
        owner.answer(Answer(call.number, error=one_line(error), kind=type(error).__name__))
        owner.end()
        raise
    owner.answer(Answer(call.number))
    await owner.serve(engine)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
