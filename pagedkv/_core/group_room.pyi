"""Room in a tier that groups of layers share; nothing here is callable from Python."""
