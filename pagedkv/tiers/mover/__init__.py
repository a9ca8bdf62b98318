"""The mover: threads that copy blocks between tiers, give up what is late, and leave calls that hang."""
