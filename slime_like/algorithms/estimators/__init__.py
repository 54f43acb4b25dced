"""Advantage estimators, one function each; see ``slime_like.algorithms.advantages``."""
