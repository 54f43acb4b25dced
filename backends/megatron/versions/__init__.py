"""Places where the supported versions of Megatron-core differ: one file for each, chosen by what is installed."""
