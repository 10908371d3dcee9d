"""The engine as programs call it, and how one is put together. May import all but jobs, experiments and cli."""
