"""Random wording for the generated training text: choices inside a phrase, people, and everyday words."""

import re
from dataclasses import dataclass
from random import Random

Chat = list[str]  # turns of the user and the assistant, the user first
_CHOICE = re.compile(r"\[([^\[\]]*)\]")


def phrase(rng: Random, text: str) -> str:
    """``text`` with every ``[a|b|c]`` replaced by one of its choices, the innermost first."""
    while True:
        text, count = _CHOICE.subn(lambda match: rng.choice(match[1].split("|")), text)
        if not count:
            return text


def sentence(text: str) -> str:
    """``text`` with a capital first letter."""
    return text[:1].upper() + text[1:]


def numbered(lines: list[str] | tuple[str, ...]) -> str:
    """``lines`` as a numbered list."""
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def bulleted(lines: list[str] | tuple[str, ...]) -> str:
    """``lines`` as a list with dashes."""
    return "\n".join(f"- {line}" for line in lines)


def join(words: list[str]) -> str:
    """``a``, ``a and b`` or ``a, b and c``."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def a(word: str) -> str:
    """``word`` with its indefinite article."""
    return ("an " if word[0] in "aeiou" else "a ") + word


@dataclass(frozen=True, kw_only=True)
class Person:
    """A person in a story, with pronouns."""

    name: str
    he: str
    his: str
    him: str


SHE = """
    Anna Maria Lucy Emma Sara Nina Julia Olivia Mia Zoe Lena Carla Ruth Alice Grace Hannah Kate Rosa Ella Ivy
    Priya Mei Fatima Amina Sofia Clara Wendy Jane Betty Tina Natalia Janet Lily Megan Diana Rachel Amy Susan
""".split()  # noqa: SIM905
HE = """
    Tom Ben Max Leo Sam Jack Omar Paul David Mark Peter Carlos Hugo Ivan John Liam Noah Eric Frank Henry Raj Ken
    Ali Felix Oscar Simon Victor James Toby Adam George Bob Daniel Kevin Luke Martin Nick Ryan
""".split()  # noqa: SIM905


def people(rng: Random, count: int) -> list[Person]:
    """``count`` people with different names."""
    return [
        Person(name=name, he="she", his="her", him="her")
        if name in SHE
        else Person(name=name, he="he", his="his", him="him")
        for name in rng.sample(SHE + HE, count)
    ]


THINGS = """
    apples oranges pears plums lemons peaches cookies muffins cupcakes sandwiches candies marbles stickers
    stamps coins shells stones pencils pens crayons erasers books notebooks cards toys balloons flowers roses
    tulips tickets photos buttons beads ribbons eggs bottles cups plates bananas carrots potatoes tomatoes
    onions blocks cars dolls balls postcards magnets badges keys letters magazines
""".split()  # noqa: SIM905
CONTAINERS = """
    boxes bags baskets packs crates jars trays bundles packets drawers
""".split()  # noqa: SIM905
GOODS = """
    shirts hats scarves books toys lamps mugs pens notebooks cakes pies tickets sandwiches pizzas plants chairs
    candles belts socks gloves cups bowls
""".split()  # noqa: SIM905
MAKERS = (
    ("bakery", "loaves"),
    ("bakery", "cakes"),
    ("factory", "toys"),
    ("factory", "bicycles"),
    ("factory", "lamps"),
    ("workshop", "chairs"),
    ("workshop", "tables"),
    ("farm", "eggs"),
    ("printer", "pages"),
    ("kitchen", "meals"),
    ("studio", "posters"),
    ("garden", "tomatoes"),
)
PLACES = """
    school library park market museum beach zoo garden theater station farm village
""".split()  # noqa: SIM905
JOBS = """
    baker gardener teacher painter driver waiter nurse carpenter plumber tailor cleaner cook
""".split()  # noqa: SIM905


def one(plural: str) -> str:
    """The singular of one of the plural words above."""
    irregular = {
        "shelves": "shelf",
        "loaves": "loaf",
        "knives": "knife",
        "scarves": "scarf",
        "cookies": "cookie",
    }
    if plural in irregular:
        return irregular[plural]
    if plural.endswith(("xes", "ches", "shes", "toes")):
        return plural[:-2]
    if plural.endswith("ies") and plural not in {"cookies", "pies"}:
        return plural[:-3] + "y"
    return plural[:-1]
