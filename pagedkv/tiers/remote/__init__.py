"""The remote tier: blocks in a store that other processes and machines share."""
