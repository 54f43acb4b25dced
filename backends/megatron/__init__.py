"""Megatron-core trains: every module here is imported with it, and it with its compiled functions deferred."""

from backends.megatron.deferred_compile import deferred_compile

with deferred_compile():
    import megatron.core  # noqa: F401
