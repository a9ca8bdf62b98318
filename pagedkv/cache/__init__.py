"""KVCache with its sequences, steps, matching and moves."""
