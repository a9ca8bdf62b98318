"""Partly filled blocks in the tree; nothing here is callable from Python."""
