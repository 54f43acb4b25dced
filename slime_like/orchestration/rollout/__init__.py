"""Sampling: from prompts to scored groups, with rewards, advantages and staleness. ``rollout/`` holds the engines."""
