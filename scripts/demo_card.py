"""Model cards of the bundled pair."""

import json
from pathlib import Path


def write_cards(output: Path, figures: dict[str, object]) -> None:
    (output / "training.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
