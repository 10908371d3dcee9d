"""Writes an extraction job: 80 short texts about orders, and the schema of the JSON that each is to become.

    python scripts/extraction_job.py [runs/orders]

For what drafts from finished answers are worth (docs/engine.md): answers have one form and other values.
"""

import json
import random
import sys
from pathlib import Path

_FIRST = [
    "Ada",
    "Ben",
    "Chloe",
    "Dario",
    "Elif",
    "Farid",
    "Greta",
    "Hana",
    "Ivan",
    "Jonas",
    "Keiko",
    "Lena",
    "Marco",
    "Nadia",
    "Omar",
    "Petra",
]
_LAST = [
    "Keller",
    "Rossi",
    "Novak",
    "Tanaka",
    "Silva",
    "Meyer",
    "Dubois",
    "Olsen",
    "Park",
    "Hughes",
    "Costa",
    "Lindt",
]
_CITIES = ["Zurich", "Lisbon", "Oslo", "Turin", "Prague", "Lyon", "Ghent", "Malmo", "Graz", "Porto"]
_STATES = ["shipped", "delayed", "returned", "delivered"]
_PRODUCTS = (
    *("desk lamp", "standing desk", "office chair", "coffee machine", "water filter", "keyboard"),
    *("monitor arm", "headset", "backpack", "rain jacket"),
)
_FORMS = (
    "{name} from {city} ordered {n} x {product} on {date} for {price} EUR in total; the parcel is {state}.",
    "Order of {date}: {product}, {n} pieces, {price} EUR. Customer {name}, {city}. It was {state}.",
    "We spoke to {name} ({city}) about {n} {product}(s) bought {date}. Total {price} EUR, state: {state}.",
)
_ASKED = "Extract the order as JSON with customer, city, product, quantity, date, total_eur and status.\n\n"
_FIELDS = {
    "customer": {"type": "string", "maxLength": 40},
    "city": {"type": "string", "maxLength": 30},
    "product": {"type": "string", "maxLength": 40},
    "quantity": {"type": "integer"},
    "date": {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
    "total_eur": {"type": "number"},
    "status": {"enum": _STATES},
}


def main(output: Path) -> None:
    draw = random.Random(7)
    output.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(80):
        values = {
            "name": f"{draw.choice(_FIRST)} {draw.choice(_LAST)}",
            "city": draw.choice(_CITIES),
            "product": draw.choice(_PRODUCTS),
            "n": draw.randint(1, 9),
            "date": f"2026-{draw.randint(1, 12):02}-{draw.randint(1, 28):02}",
            "price": draw.randint(10, 900),
            "state": draw.choice(_STATES),
        }
        message = {"role": "user", "content": _ASKED + draw.choice(_FORMS).format(**values)}
        rows.append(json.dumps({"id": f"order-{number}", "messages": [message]}) + "\n")
    (output / "orders.jsonl").write_text("".join(rows))
    schema = {"type": "object", "properties": _FIELDS, "required": [*_FIELDS], "additionalProperties": False}
    (output / "schema.json").write_text(json.dumps(schema))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/orders"))
