"""Worker processes with limits for untrusted code: rewards, environments and agents."""
