"""First run on a machine with a GPU: tests, benchmark and engines, each bounded in time, and one report."""
