"""The memory of prefixes; nothing here is callable from Python."""
