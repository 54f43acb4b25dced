"""Weights in shared memory, over processes."""

from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.transports.registry import open_sender
from tests.process.conftest import python
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
    assert python(program).split() == [str(tensor_checksum(tensor)) for _, tensor in bucket(3).tensors]
    assert len(left(session)) == 1  # the reader's end removed nothing
    sender.close()
