"""Sizes of multi-head latent attention."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        query_rank: of the compressed query; ``None`` where queries are projected at once.
        kv_rank: of what the keys and values of all heads are made from.
        nope_dim, rope_dim: a query or key head's parts without and with rotary embedding; all heads share the latter
            part of the key.
        value_dim: of a value head.
        interleaved: rotary embedding turns neighbouring elements, not those half a head apart.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True
