"""specgen: offline batch generation with EAGLE3 speculative decoding."""

__version__ = "0.1.0"
