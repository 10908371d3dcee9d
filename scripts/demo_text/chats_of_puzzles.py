# ruff: noqa: E501 (a phrase stays on one line)
"""Chats with one right answer: code, extraction, order, sums, series, words, rewriting."""

import re
from random import Random

from demo_text.phrases import (
    CAPITALS,
    JOBS,
    LISTS,
    OPPOSITES,
    ORDERS,
    PLACES,
    PROGRAMS,
    TENSES,
    Chat,
    a,
    bulleted,
    next_turn,
    numbered,
    people,
    phrase,
    sentence,
)


def program(rng: Random) -> Chat:
    """A small Python function with one sentence on how it works."""
    task, code, how = rng.choice(PROGRAMS)
    block = f"```python\n{code}\n```"
    ask = f"[Write|Can you write|Please write|Show me|Give me] a [Python |]function that {task}[.| in Python.|, please.]"
    chat = [
        phrase(rng, ask)
        .replace("Python function", "@")
        .replace("in Python", "in Python" if "@" not in ask else "")
        .replace("@", "Python function"),
        f"{block}\n{how}",
    ]
    if rng.random() < 0.3:
        chat = [
            phrase(
                rng, f"[What does this code do?|Explain this code.|Explain what this function does.]\n{block}"
            ),
            f"The function {task}. {how}",
        ]
    if rng.random() < 0.6:
        name, rest = code.removeprefix("def ").split("\n", 1)
        documented = f'def {name}\n    """{sentence(task)}."""\n{rest}'
        short = name.split("(")[0]
        chat += next_turn(
            rng,
            "program",
            task=task,
            how=how,
            documented=documented,
            renamed=code.replace(short, "solve"),
            name=short,
        )
    return chat


def extraction(rng: Random) -> Chat:
    """Names, ages, cities or numbers taken out of a sentence."""
    crowd = people(rng, rng.choice((2, 2, 3)))
    cities = rng.sample(sorted(CAPITALS.values()), len(crowd))
    ages, jobs = [rng.randint(8, 70) for _ in crowd], rng.sample(JOBS, len(crowd))
    text = " ".join(
        phrase(rng, f"{who.name} is {age} years old and [lives in|comes from] {city}.")
        if n % 2 == 0
        else f"{who.name}, {a(job)} from {city}, is {age}."
        for n, (who, age, city, job) in enumerate(zip(crowd, ages, cities, jobs, strict=True))
    )
    names = [who.name for who in crowd]
    what, found = rng.choice(
        (
            ("names", names),
            ("cities", cities),
            ("ages", [str(age) for age in ages]),
            ("numbers", [str(age) for age in ages]),
        )
    )
    ask = f"[Extract|Find|List|Write down|Give me|Pick out] [all |all the |the ]{what} [from|in] [this text|the text|this sentence|the following text]: {text}"
    if rng.random() < 0.3:
        text, what, found = (
            f"[We|They|My friends] [started in|came from|flew to] {cities[0]}, [stayed in|visited|went to] {cities[1]} [for two days|for a week|by train] and [ended in|left for|came back to] {rng.choice(['Dublin', 'Boston', 'Sydney', 'Prague'])}.",
            "cities",
            [],
        )
        text = phrase(rng, text)
        found = [*cities[:2], text[:-1].rsplit(" ", 1)[1]]
        ask = phrase(rng, f"[Extract|Find|List|Write down] [all |the ]cities in this text: {text}")
        return [
            ask,
            bulleted(found),
            phrase(rng, "[How many cities are there?|How many did you find?|How many are there?]"),
            f"There are {len(found)} cities.",
        ]
    shape = rng.randrange(3)
    answer = (bulleted(found), ", ".join(found), numbered(found))[shape]
    chat = [phrase(rng, ask), answer]
    if rng.random() < 0.6:
        oldest, pick = max(range(len(crowd)), key=ages.__getitem__), rng.randrange(len(crowd))
        compared = (
            f"Who is {'older' if ages[0] != ages[1] else 'first'}, {names[0]} or {names[1]}?"
            if rng.random() < 0.5 or len(crowd) > 2
            else "Which of them is older?"
        )
        ask, answer = next_turn(
            rng,
            "extraction",
            oldest=names[oldest],
            years=ages[oldest],
            compared=compared,
            older=names[0 if ages[0] >= ages[1] else 1],
            more=max(ages[:2]),
            what=what,
            count=len(found),
            one=names[pick],
            city=cities[pick],
            age=ages[pick],
            names=", ".join(names),
            json="{" + ", ".join(f'"{n}": {g}' for n, g in zip(names, ages, strict=True)) + "}",
        )
        chat += [ask.replace("?.", "?"), answer]
    return chat


def _first(parts: list[str], pair: tuple[str, str]) -> int:
    """Which of ``parts`` names both of ``pair``."""
    return next(n for n, part in enumerate(parts) if all(name in re.split(r"[ .]", part) for name in pair))


def order(rng: Random) -> Chat:
    """Who is the tallest: two comparisons and a question."""
    crowd = [who.name for who in people(rng, 3)]
    more, less, most, least = rng.choice(ORDERS)
    high, middle, low = crowd
    parts = [
        rng.choice((f"{x} is {more} than {y}.", f"{y} is {less} than {x}."))
        for x, y in ((high, middle), (middle, low))
    ]
    rng.shuffle(parts)
    question, found = rng.choice(((most, high), (least, low)))
    pairs = [(high, middle), (middle, low)]
    told = " ".join(
        f"{x} is {more} than {y}." for x, y in sorted(pairs, key=lambda pair: _first(parts, pair))
    )
    chat = [
        " ".join([*parts, f"Who is the {question}?"]),
        f"{told} The order is {high}, {middle}, {low}. So {found} is the {question}.",
    ]
    if rng.random() < 0.5:
        other, answer = (least, low) if question == most else (most, high)
        chat += [f"And who is the {other}?", f"{answer} is the {other}."]
    return chat


def sums(rng: Random) -> Chat:
    """Plain arithmetic."""
    op, word = rng.choice((("+", "plus"), ("-", "minus"), ("*", "times"), ("/", "divided by")))
    b = rng.randint(2, 12) if op in "*/" else rng.randint(1, 99)
    start = rng.randint(2, 30) if op in "*/" else b + rng.randint(1, 99)
    start, value = {
        "+": (start, start + b),
        "-": (start, start - b),
        "*": (start, start * b),
        "/": (start * b, start),
    }[op]
    ask = f"[What is|Calculate|Compute|Solve|How much is] {start} [{op}|{word}] {b}"
    chat = [
        phrase(rng, ask) + rng.choice(("?", "?", ".")),
        phrase(rng, f"{start} {op} {b} = <<{start}{op}{b}={value}>>{value}\n#### {value}"),
    ]
    if rng.random() < 0.5:
        extra = rng.randint(1, 50)
        chat += [
            phrase(rng, f"[Now add {extra}.|Add {extra} to [it|that|the result].]"),
            f"{value} + {extra} = <<{value}+{extra}={value + extra}>>{value + extra}\n#### {value + extra}",
        ]
    return chat


def series(rng: Random) -> Chat:
    """The next number of a series, or numbers sorted."""
    start, step = rng.randint(1, 30), rng.choice((2, 3, 4, 5, 10))
    if rng.random() < 0.5:
        row = [start + step * i for i in range(4)]
        ask = f"[What comes next|What is the next number|Continue the pattern|Which number is next]: {', '.join(map(str, row))}?"
        chat, last = [phrase(rng, ask)], row[-1]
        for _ in range(rng.choice((1, 2))):
            chat += ["And the one after that?"] * (len(chat) % 2 == 0)
            value, chat = (
                last + step,
                [
                    *chat,
                    f"The numbers grow by {step}. The next number is {last} + {step} = <<{last}+{step}={last + step}>>{last + step}.",
                ],
            )
            last = value
        return [
            phrase(
                rng,
                part.replace(
                    "And the one after that?",
                    "[And the one after that?|What comes after that?|And then?|What is the next one?]",
                ),
            )
            for part in chat
        ]
    row = rng.sample(range(1, 100), rng.randint(3, 5))
    if rng.random() < 0.5:
        return [
            phrase(
                rng,
                f"[Sort these numbers|Put these numbers in order|Order the numbers]: {', '.join(map(str, row))}.",
            ),
            ", ".join(map(str, sorted(row))),
        ]
    word, value = rng.choice((("largest", max(row)), ("smallest", min(row))))
    return [
        phrase(rng, f"[What is|Find|Which is] the {word} number: {', '.join(map(str, row))}?"),
        f"The {word} number is {value}.",
    ]


def words(rng: Random) -> Chat:
    """Opposites, capitals, and groups."""
    kind = rng.randrange(4)
    if kind == 0:
        word = rng.choice(sorted(OPPOSITES))
        return [
            phrase(
                rng,
                f"[What is the opposite of {word}?|Give me the opposite of the word {word}.|Write the opposite of {word}.]",
            ),
            f"The opposite of {word} is {OPPOSITES[word]}.",
        ]
    if kind == 1:
        country = rng.choice(sorted(CAPITALS))
        return [
            phrase(
                rng,
                f"[What is the capital of {country}?|Which city is the capital of {country}?|Name the capital of {country}.]",
            ),
            f"The capital of {country} is {CAPITALS[country]}.",
        ]
    first, second = rng.sample(
        ("fruits", "vegetables", "animals", "colors", "sports", "tools", "drinks", "clothes", "vehicles"), 2
    )
    odd, same = rng.choice(LISTS[second]), rng.sample(LISTS[first], 3)
    if kind == 2:
        row = [*same, odd]
        rng.shuffle(row)
        more = [
            phrase(rng, "[Why?|Explain why.|How do you know that?|Why does it not belong?]"),
            f"The word {odd} is not one of the {first}.",
        ]
        ask = f"[Which word does not fit|Which one does not belong|Find the odd one out]: {', '.join(row)}?"
        return [
            phrase(rng, ask),
            ", ".join(f"{word}: {second if word == odd else first}" for word in row)
            + f".\nSo {odd} does not fit, because the others are {first}.",
            *(more if rng.random() < 0.5 else ()),
        ]
    return [
        phrase(
            rng,
            f"[Is {same[0]} one of the {first} or one of the {second}?|Does {same[0]} belong to {first} or {second}?]",
        ),
        f"It belongs to the {first}.",
    ]


def rewriting(rng: Random) -> Chat:
    """One sentence put another way."""
    (who,), place = people(rng, 1), rng.choice(PLACES)
    now, past, will = (text.format(place=place) for text in rng.choice(TENSES))
    tense, text = rng.choice((("past", past), ("future", will)))
    chat = [
        phrase(rng, f"[Rewrite|Put|Write] this sentence in the {tense} tense: {who.name} {now}."),
        f"{who.name} {text}.",
    ]
    if rng.random() < 0.3:
        chat = [
            phrase(
                rng,
                f"[Rewrite this sentence with he or she|Replace the name by he or she]: {who.name} {now}.",
            ),
            f"{sentence(who.he)} {now}.",
        ]
    if rng.random() < 0.4:
        wish = phrase(
            rng,
            "[Give me the book|Open the window|Close the door|Help me|Send me the file|Wait a moment|Tell me the time|Bring me some water]",
        )
        chat = [
            phrase(
                rng, f"[Make this sentence more polite|Say this more politely|Rewrite this politely]: {wish}."
            ),
            f"Could you please {wish[0].lower()}{wish[1:]}?",
        ]
    return chat
