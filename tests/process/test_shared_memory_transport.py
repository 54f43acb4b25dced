"""Weights in shared memory, over processes."""

import subprocess
import sys

from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.transports.leftovers import cleanup
from slime_like.weights.transports.registry import open_sender
from tests.support.weight_buckets import bucket, left


def test_another_process_sees_the_same_bytes(session: str) -> None:
    sender = open_sender("shared_memory", session)
    metadata = sender.send(bucket(3))
    program = (
        "import sys\n"
        "from slime_like.interfaces import BucketMetadata, TensorEntry\n"
        "from slime_like.weights.checksums import tensor_checksum\n"
        "from slime_like.weights.transports.registry import open_receiver\n"
        f"receiver = open_receiver('shared_memory', {sender.rendezvous()!r})\n"
        f"print(*(tensor_checksum(t) for _, t in receiver.receive({metadata!r})))\n"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert output.stdout.split() == [str(tensor_checksum(tensor)) for _, tensor in bucket(3).tensors]
    assert len(left(session)) == 1  # the reader's end removed nothing
    sender.close()


def test_what_a_dead_sender_left_is_removed(session: str) -> None:
    program = (
        "import os, torch\n"
        "from slime_like.interfaces import WeightBucket\n"
        "from slime_like.weights.transports.registry import open_sender\n"
        f"open_sender('shared_memory', {session!r}).send(WeightBucket([('t', torch.ones(9))]))\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    other = open_sender("shared_memory", f"{session}-other")
    other.send(bucket(0))
    assert len(cleanup(session)) == 1
    assert [name for name in left(session) if not name.startswith(f"{session}-other")] == []
    assert len(left(f"{session}-other")) == 1
    other.close()
