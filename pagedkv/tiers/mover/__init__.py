"""The mover: threads that copy blocks between tiers.

They give up late work, and leave calls that hang.
"""
