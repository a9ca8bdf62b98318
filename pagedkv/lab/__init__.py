"""Work with a cache beside serving: replay traces, simulate, size, record, show.

Nothing else imports it, but for the top of the package, which offers TraceRecorder.
"""
