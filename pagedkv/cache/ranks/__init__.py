"""A cache whose KV lies in the processes of tensor-parallel ranks, and the ranks."""
