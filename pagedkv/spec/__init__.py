"""What a cache is made for: the shape of the KV, namespaces, and sizes as words."""
