"""A trainer for Hugging Face models, sharded by FSDP2."""
