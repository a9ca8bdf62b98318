"""Sessions that callers name; nothing here is callable from Python."""
