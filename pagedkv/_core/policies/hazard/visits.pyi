"""The policy ``hazard``'s requests under way; nothing here is callable from Python."""
