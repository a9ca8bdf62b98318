"""Insertion into the tree; nothing here is callable from Python."""
