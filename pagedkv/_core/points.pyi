"""Points of groups of layers; nothing here is callable from Python."""
