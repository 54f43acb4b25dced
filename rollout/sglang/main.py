"""Entry point of SGLang's process: ``python -m rollout.sglang.main DESCRIPTOR SCRATCH``."""

import gc
import shutil
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

from rollout.arguments import on_cpu
from slime_like.hosting.parent import Owner


def main(descriptor: int, scratch: Path) -> None:
    """Serve the owner at the other end of the inherited socket ``descriptor``; temporary files go to ``scratch``."""
    owner = Owner(Connection(descriptor), scratch)
    with owner.starting() as (config, engine_index):
        from rollout.sglang.launch import launch

        tempfile.tempdir = str(scratch)
        engine, reports = launch(config, engine_index, descriptor, owner)
        tempfile.tempdir = None
        from rollout.sglang.host import Host

        gc.freeze()
        host = Host(engine, reports, config, engine_index)
        engine.loop.run_until_complete(host.reach_schedulers())
        if on_cpu():  # every socket is connected and every group has met; NCCL's may still have to
            shutil.rmtree(scratch)
    engine.loop.run_until_complete(owner.serve(host))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
