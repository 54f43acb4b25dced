"""Cost of hashing in a sync: both sides work at the same time, and the slower one sets the pace."""

from collections.abc import Sequence
from dataclasses import dataclass

_NO_WAIT_S = 0.002
"""What a call takes that has nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of a sync: engines load the buckets of the round before, while senders gather, hash and write new ones.

    Attributes:
        send_hash_s: seconds the slowest sender hashed.
        wait_s: seconds that senders, having finished, waited for the engines.
        loaded_nbytes: of the buckets that engines loaded meanwhile.
    """

    send_hash_s: float
    wait_s: float
    loaded_nbytes: int


def exposed_seconds(rounds: Sequence[Round], engine_hash_s: float) -> float:
    """By how much hashing on both sides lengthened the rounds, at most.

    A round takes ``max(senders, engines)``. Where senders waited, for ``w`` seconds, hashing of ``h`` seconds on their
    side and ``g`` on the engines' lengthened it by ``min(w + h, g)``; where they did not, by ``h`` at most.

    Args:
        engine_hash_s: seconds the slowest engine hashed in all rounds; spread over them by bytes.
    """
    total = sum(each.loaded_nbytes for each in rounds) or 1
    exposed = 0.0
    for each in rounds:
        engine = engine_hash_s * each.loaded_nbytes / total
        waited = each.wait_s > _NO_WAIT_S
        exposed += min(each.wait_s + each.send_hash_s, engine) if waited else each.send_hash_s
    return exposed
