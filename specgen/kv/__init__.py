"""Where keys and values are: the geometry of a pass, pages, the cache, shared prefixes. Imports leaves alone."""
