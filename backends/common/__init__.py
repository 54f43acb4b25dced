"""Code shared by trainer backends: attention kernels, files, checks. Imports no backend."""
