"""The KV cache and the geometry of a pass: pages, slots, shared prefixes. May import no other package."""
