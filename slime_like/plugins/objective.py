"""Built-in parts of the objective by name, with their traits. A new part needs one entry here.

Importing this module imports none of the parts, so settings are read and checked without torch.
"""

from collections.abc import Mapping

_ALGORITHMS = "slime_like.algorithms"

LOSSES: Mapping[str, str] = {
    "ppo_clip": f"{_ALGORITHMS}.losses.surrogates:PPOClip",
    "policy_gradient": f"{_ALGORITHMS}.losses.surrogates:PolicyGradient",
    "gspo": f"{_ALGORITHMS}.losses.surrogates:GSPO",
    "cispo": f"{_ALGORITHMS}.losses.surrogates:CISPO",
    "sapo": f"{_ALGORITHMS}.losses.surrogates:SAPO",
    "gmpo": f"{_ALGORITHMS}.losses.surrogates:GMPO",
    "dppo_tv": f"{_ALGORITHMS}.losses.trust_region:DPPOTV",
    "dppo_kl": f"{_ALGORITHMS}.losses.trust_region:DPPOKL",
    "clip_cov": f"{_ALGORITHMS}.losses.trust_region:ClipCov",
    "kl_cov": f"{_ALGORITHMS}.losses.trust_region:KLCov",
    "dro": f"{_ALGORITHMS}.losses.trust_region:DRO",
    "sft": f"{_ALGORITHMS}.losses.surrogates:SFT",
}
"""Policy terms, ``algorithm.loss``."""

SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Losses with a ratio of whole sequences."""

STEP_LOSSES = ("clip_cov", "kl_cov")
"""Losses that choose tokens of the whole optimizer step, with old logprobs."""

DEMONSTRATION_LOSSES = ("sft",)
"""Losses of demonstrations, which no policy sampled. They need neither engines nor rewards."""

ADVANTAGES: Mapping[str, str] = {
    "grpo": f"{_ALGORITHMS}.estimators:grpo",
    "grpo_mean_only": f"{_ALGORITHMS}.estimators:mean_only",
    "dr_grpo": f"{_ALGORITHMS}.estimators:mean_only",
    "rloo": f"{_ALGORITHMS}.estimators:rloo",
    "reinforce_pp": f"{_ALGORITHMS}.estimators:reinforce_pp",
    "reinforce_pp_baseline": f"{_ALGORITHMS}.estimators:reinforce_pp_baseline",
    "opo": f"{_ALGORITHMS}.estimators:opo",
    "pass_at_k": f"{_ALGORITHMS}.estimators:pass_at_k",
    "gpg": f"{_ALGORITHMS}.estimators:gpg",
    "gdpo": f"{_ALGORITHMS}.estimators:gdpo",
    "turn_rloo": f"{_ALGORITHMS}.estimators:turn_rloo",
    "turn_index_mean": f"{_ALGORITHMS}.estimators:turn_index_mean",
    "optimal_token_baseline": f"{_ALGORITHMS}.estimators:optimal_token_baseline",
    "gae": f"{_ALGORITHMS}.estimators:gae",
    "remax": f"{_ALGORITHMS}.estimators:remax",
    "pass_through": f"{_ALGORITHMS}.estimators:pass_through",
}
"""Advantage estimators, ``algorithm.advantage``."""

GROUP_ADVANTAGES = (
    "grpo", "grpo_mean_only", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "pass_at_k", "gpg", "gdpo",
    "turn_rloo", "turn_index_mean", "optimal_token_baseline",
)  # fmt: skip
"""Estimators that compare the samples of a group. With groups of one, every advantage is 0."""

BATCH_ADVANTAGES = ("reinforce_pp", "reinforce_pp_baseline", "gpg", "gdpo")
"""Estimators that need the whole batch before the first advantage is known."""

REDUCTIONS: Mapping[str, str] = {
    "tokens": f"{_ALGORITHMS}.reduction:TokenMean",
    "samples": f"{_ALGORITHMS}.reduction:SampleMean",
    "groups": f"{_ALGORITHMS}.reduction:GroupMean",
    "constant": f"{_ALGORITHMS}.reduction:ConstantLength",
}
"""Reductions, ``algorithm.reduction``."""

KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl")
CORRECTIONS = ("none", "truncate", "clip", "mask", "tis", "mis", "icepop")
