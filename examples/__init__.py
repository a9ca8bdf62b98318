"""Examples. Those with more than one file are packages, run as ``python -m examples.NAME``."""
