"""Events of the tree; nothing here is callable from Python."""
