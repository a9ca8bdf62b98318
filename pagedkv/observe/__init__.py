"""The cache's reports to its owner: hooks, counts, metrics; and the callbacks it calls."""
