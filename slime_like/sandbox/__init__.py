"""Worker processes with limits for code that is not trusted: rewards, environments and agents."""
