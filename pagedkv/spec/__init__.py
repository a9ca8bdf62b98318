"""Parameters of a cache: the shape of the KV, namespaces, and sizes as words."""
