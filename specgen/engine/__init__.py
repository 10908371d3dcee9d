"""The engine as programs call it, and how one is put together. Imports everything but the three that use it."""
