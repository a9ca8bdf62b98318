# The policy "s3fifo": a small and a main FIFO and a ghost queue.
from pagedkv._core.place cimport Policy

cdef Policy S3FIFO
