"""Pages, tails and points of groups of layers; nothing here is callable from Python."""
