"""Built-in parts of the objective by name, with their traits. A new part needs one entry here.

Importing this module imports none of the parts, so settings are read and checked without torch.
"""

from collections.abc import Mapping

_ALGORITHMS = "slime_like.algorithms"

LOSSES: Mapping[str, str] = {
    "ppo_clip": f"{_ALGORITHMS}.losses.ppo_clip:PPOClip",
    "policy_gradient": f"{_ALGORITHMS}.losses.policy_gradient:PolicyGradient",
    "gspo": f"{_ALGORITHMS}.losses.gspo:GSPO",
    "cispo": f"{_ALGORITHMS}.losses.cispo:CISPO",
    "sapo": f"{_ALGORITHMS}.losses.sapo:SAPO",
    "gmpo": f"{_ALGORITHMS}.losses.gmpo:GMPO",
    "dppo_tv": f"{_ALGORITHMS}.losses.dppo:DPPOTV",
    "dppo_kl": f"{_ALGORITHMS}.losses.dppo:DPPOKL",
    "clip_cov": f"{_ALGORITHMS}.losses.covariance:ClipCov",
    "kl_cov": f"{_ALGORITHMS}.losses.covariance:KLCov",
    "dro": f"{_ALGORITHMS}.losses.dro:DRO",
    "sft": f"{_ALGORITHMS}.losses.sft:SFT",
}
"""Policy terms, ``algorithm.loss``."""

SEQUENCE_LOSSES = ("gspo", "gmpo")
"""Losses with a ratio of whole sequences."""

STEP_LOSSES = ("clip_cov", "kl_cov")
"""Losses that choose tokens of the whole optimizer step, with old logprobs."""

ADVANTAGES: Mapping[str, str] = {
    "grpo": f"{_ALGORITHMS}.estimators.group:grpo",
    "grpo_mean_only": f"{_ALGORITHMS}.estimators.group:mean_only",
    "dr_grpo": f"{_ALGORITHMS}.estimators.group:mean_only",
    "rloo": f"{_ALGORITHMS}.estimators.group:rloo",
    "reinforce_pp": f"{_ALGORITHMS}.estimators.batch:reinforce_pp",
    "reinforce_pp_baseline": f"{_ALGORITHMS}.estimators.batch:reinforce_pp_baseline",
    "opo": f"{_ALGORITHMS}.estimators.group:opo",
    "pass_at_k": f"{_ALGORITHMS}.estimators.group:pass_at_k",
    "gpg": f"{_ALGORITHMS}.estimators.batch:gpg",
    "gdpo": f"{_ALGORITHMS}.estimators.batch:gdpo",
    "turn_rloo": f"{_ALGORITHMS}.estimators.turns:turn_rloo",
    "turn_index_mean": f"{_ALGORITHMS}.estimators.turns:turn_index_mean",
    "optimal_token_baseline": f"{_ALGORITHMS}.estimators.tokens:optimal_token_baseline",
    "gae": f"{_ALGORITHMS}.estimators.tokens:gae",
    "remax": f"{_ALGORITHMS}.estimators.group:remax",
    "pass_through": f"{_ALGORITHMS}.estimators.group:pass_through",
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

ALIASES: Mapping[str, Mapping[str, str]] = {
    "loss": {"vanilla": "ppo_clip", "ppo": "ppo_clip", "reinforce": "policy_gradient", "geo_mean": "gmpo"},
    "advantage": {
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        "rloo_vectorized": "rloo",
        "grpo_vectorized": "grpo",
        "grpo_passk": "pass_at_k",
        "tir_optimal_token_baseline": "optimal_token_baseline",
    },
}
"""Names of other trainers (verl, TRL, slime) for the same formulas, by field of ``algorithm``."""
