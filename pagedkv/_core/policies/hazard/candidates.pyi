"""Runs that may be looked at in any order; nothing here is callable from Python."""
