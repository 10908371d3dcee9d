"""Arms that take turns on the same prompts: throughput, tune, compare. May import jobs, bench and all below them."""
