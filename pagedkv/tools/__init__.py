"""Command-line tools: ``pagedkv doctor``, and those that read a disk tier's store."""
