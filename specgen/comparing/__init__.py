"""``specgen compare``: heads against heads on the same prompts. May import every package but ``cli``."""
