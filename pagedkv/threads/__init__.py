"""Threads for callers that a signal may interrupt: a monitor in C, errands and crews."""
