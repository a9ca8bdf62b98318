"""Sends to the store behind the claims; nothing here is callable from Python."""
