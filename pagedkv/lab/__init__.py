"""Work with a cache beside serving: replay traces, simulate, size, record, show.

Nothing else imports it.
"""
