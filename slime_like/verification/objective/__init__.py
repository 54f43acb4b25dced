"""Proof of an objective: its expected gradient by enumeration, next to the true one."""
