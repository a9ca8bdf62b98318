"""Copies and transfers between tiers; nothing here is callable from Python."""
