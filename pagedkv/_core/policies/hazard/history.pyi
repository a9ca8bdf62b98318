"""What is remembered of prefixes; nothing here is callable from Python."""
