"""Static bar for the CUDA kernels: instructions of each hot loop, and the bounds they set."""
