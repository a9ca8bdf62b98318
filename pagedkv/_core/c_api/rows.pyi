"""Rows of running sequences for C; nothing here is callable from Python."""
