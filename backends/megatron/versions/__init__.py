"""Differences between the supported versions of Megatron-core: one file each, selected by the installed version."""
