"""Tails on their way between tiers; nothing here is callable from Python."""
