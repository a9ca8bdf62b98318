"""Argument checks for the core: nothing here is callable from Python."""
