"""The policy ``hazard``; nothing here is callable from Python."""
