"""The account beside plain LRU; nothing here is callable from Python."""
