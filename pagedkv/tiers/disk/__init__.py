"""The disk tier: a directory of preallocated files, checked block by block."""
