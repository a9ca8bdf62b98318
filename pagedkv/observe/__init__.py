"""What the cache tells its owner, and asks of him: hooks, counts, metrics, clocks and other callbacks."""
