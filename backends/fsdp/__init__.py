"""A trainer on Hugging Face's own models, sharded by FSDP2."""
