"""The operating system: files, memory, network, processes, threads, interrupts."""
