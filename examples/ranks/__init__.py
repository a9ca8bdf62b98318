"""Three processes each compute a third of a model; a fourth decides."""
