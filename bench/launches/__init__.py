"""CPU time of the calls that launch kernels, without a GPU."""
