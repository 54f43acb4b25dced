"""What trainer backends share: attention kernels, files, checks. Knows none of them, and they know not each other."""
