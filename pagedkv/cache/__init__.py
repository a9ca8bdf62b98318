"""The conductor: KVCache, its steps and sequences, and how prefixes are found, moved, written and released."""
