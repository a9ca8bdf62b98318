"""Retention; nothing here is callable from Python."""
