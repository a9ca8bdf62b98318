"""See the .pxd; nothing here is callable from Python."""
