"""The hazard model and its index; nothing here is callable from Python."""
