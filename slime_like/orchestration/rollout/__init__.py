"""Path from prompts to scored groups: engines, requests, rewards, advantages and staleness."""
