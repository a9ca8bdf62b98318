"""Owners of prefixes; nothing here is callable from Python."""
