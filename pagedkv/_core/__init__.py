"""The core decides.

It knows block ids, tokens and counts: never a pointer to KV bytes, a stream or a file.

``block_pool`` owns one tier's ids and reference counts; ``radix_tree`` maps token prefixes to runs of blocks;
``placement`` joins the two over the tiers and decides what is evicted, demoted and promoted; ``block_table`` keeps
the running sequences and a step's arrays. The public names are in :mod:`pagedkv.core`.
"""
