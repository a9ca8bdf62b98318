"""The policy ``hazard``: the run with the fewest expected hits per second goes first."""
