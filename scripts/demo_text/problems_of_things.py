# ruff: noqa: E501 (a phrase stays on one line)
"""Word problems about counting things: having, packing, sharing, comparing."""

import itertools
from random import Random

from demo_text.phrases import (
    CONTAINERS,
    GARDENS,
    LEGS,
    THINGS,
    Person,
    one,
    people,
    phrase,
    sentence,
)
from demo_text.problem import Problem, make_problem, number_word, second_turn, work


def _change(rng: Random, who: Person, things: str, have: int) -> tuple[str, str, int]:
    """One event in a story about ``have`` things: its sentence, the sum it asks for, and what is left."""
    other = people(rng, 1)[0].name
    if have >= 4 and rng.random() < 0.5:
        lost = rng.randint(1, have - 1)
        event = phrase(
            rng,
            f"{who.he} [gives {lost} to {other}|loses {lost} of them|sells {lost} of them|puts {lost} away"
            f"|uses {lost} of them|gives {lost} {things} to {who.his} [sister|brother|friend|neighbor]]",
        )
        value, done = work(have, "-", lost)
        return (
            event,
            phrase(rng, f"after that [{who.he}|{who.name}] has {done} {things} [left|]").strip(),
            value,
        )
    if rng.random() < 0.35:
        packs, each = rng.randint(2, 9), rng.randint(2, 12)
        kind = rng.choice(CONTAINERS)
        verb = phrase(rng, "[buys|gets|finds|is given]")
        event = (
            f"{who.he} {verb} {number_word(rng, packs)} {kind} with {number_word(rng, each)} {things} each"
        )
        new, product = work(packs, "*", each)
        value, done = work(have, "+", new)
        return event, f"the {kind} hold {product} {things}. So {who.he} has {done} {things}", value
    new = rng.randint(2, 60)
    event = phrase(
        rng, f"{who.he} [buys {new} more|finds {new} more|gets {new} more from {other}|picks {new} more]"
    )
    value, done = work(have, "+", new)
    return event, phrase(rng, f"then {who.he} has {done} {things}"), value


def chain(rng: Random) -> Problem:
    """A person has things; one to three events change how many."""
    (who,), things = people(rng, 1), rng.choice(THINGS)
    have = rng.randint(3, rng.choice((20, 60, 150)))
    story, steps = [phrase(rng, f"{who.name} has {have} {things}")], []
    for number in range(rng.choice((1, 1, 2, 2, 3))):
        event, step, have = _change(rng, who, things, have)
        story.append(phrase(rng, "[Then|Later|Next|After that] " if number else "") + event)
        steps.append(step + ".")
    ask = phrase(rng, f"How many {things} does {who.name} have [now|in the end|left|]?").replace(" ?", "?")
    if len(story) == 2 and rng.random() < 0.4:
        story = [story[0] + " and " + story[1].removeprefix(f"{who.he} ")]
    extra = rng.randint(2, 40)
    ask_more = f"[And if {who.he} gets {extra} more|What if {who.name} finds {extra} more {things}]?"
    more = second_turn(rng, ask_more, have, "+", extra, f"then {who.he} has @ {things}.")
    return make_problem(". ".join(map(sentence, story)) + ". " + ask, *steps, answer=have, more=more)


def packing(rng: Random) -> Problem:
    """Full containers and some loose things."""
    (who,), things, kind = people(rng, 1), rng.choice(THINGS), rng.choice(CONTAINERS)
    packs, each, loose = rng.randint(2, 12), rng.randint(2, 15), rng.randint(0, 20)
    question = phrase(
        rng,
        f"[{who.name} has {packs} {kind} of {things}. There are {each} {things} in each {one(kind)}"
        f"|There are {packs} {kind} with {each} {things} in each [{one(kind)}|of them]"
        f"|{who.name} fills {packs} {kind} with {each} {things} each]. ",
    )
    inside, product = work(packs, "*", each)
    if loose and rng.random() < 0.4:
        lost = rng.randint(1, inside - 1)
        left, rest = work(inside, "-", lost)
        question += f"[Then|Later] {lost} {things} are [lost|sold|given away|taken out]. How many {things} are [left|there now]?"
        return make_problem(
            phrase(rng, question),
            f"the {kind} hold {product} {things}.",
            f"{rest} {things} are left.",
            answer=left,
        )
    if not loose:
        question += f"How many {things} are there [in total|in all|altogether]?"
        return make_problem(phrase(rng, question), f"there are {product} {things}.", answer=inside)
    question += f"There are [also |]{loose} [loose|more] {things} on the table. How many {things} are there [in all|altogether]?"
    total, done = work(inside, "+", loose)
    steps = f"the {kind} hold {product} {things}.", f"together there are {done} {things}."
    return make_problem(phrase(rng, question), *steps, answer=total)


def sharing(rng: Random) -> Problem:
    """Things shared equally, perhaps after some are taken away or added."""
    (who,), things = people(rng, 1), rng.choice(THINGS)
    friends, each = rng.randint(2, 10), rng.randint(2, 15)
    total = friends * each
    crowd = phrase(rng, "[friends|children|students|cousins|neighbors|classmates]")
    get = phrase(
        rng, f"How many {things} does each [{one(crowd) if crowd != 'children' else 'child'}|of them] get?"
    )
    split, done = work(total, "/", friends)
    last = f"each one gets {done} {things}."
    start, kept = f"{who.name} has {total} {things}", rng.randint(1, 12)
    if rng.random() < 0.5:
        question = f"{start} and [shares|divides|splits] them equally among {number_word(rng, friends)} {crowd}. {get}"
        return make_problem(phrase(rng, question), last, answer=split)
    _left, rest = work(total + kept, "-", kept)
    question = (
        f"{who.name} has {total + kept} {things}. {sentence(who.he)} keeps {kept} [for {who.his}self|] and shares "
        f"the rest equally among {friends} {crowd}. {get}"
    )
    question = phrase(rng, question).replace("hisself", "himself").replace("  ", " ")
    return make_problem(question, f"there are {rest} {things} to share.", last, answer=split)


def boxes_needed(rng: Random) -> Problem:
    """Things put into containers of one size."""
    (who,), things, kind = people(rng, 1), rng.choice(THINGS), rng.choice(CONTAINERS)
    each, count = rng.randint(2, 12), rng.randint(2, 15)
    value, done = work(each * count, "/", each)
    question = phrase(
        rng,
        f"{who.name} has {each * count} {things} and [wants to put|puts] {each} {things} in each {one(kind)}. "
        f"How many {kind} does {who.he} need?",
    )
    return make_problem(question, f"{who.name} needs {done} {kind}.", answer=value)


_PARTS = {
    2: ("half of", "Half of"),
    3: ("a third of", "A third of"),
    4: ("a quarter of", "A quarter of"),
    5: ("a fifth of", ""),
}


def fraction(rng: Random) -> Problem:
    """A part of the things goes; how many went or are left."""
    (who,), things = people(rng, 1), rng.choice(THINGS)
    share, part = rng.choice((2, 2, 2, 3, 4, 5)), rng.randint(2, 24)
    total = share * part
    verb = phrase(rng, "[gives away|sells|uses|donates|sends away]")
    question = f"{who.name} has {total} {things} and {verb} {_PARTS[share][0]} them. "
    value, done = work(total, "/", share)
    step = f"{_PARTS[share][0]} {total} is {done}, so {who.he} {verb} {value} {things}."
    if rng.random() < 0.3:
        return make_problem(question + f"How many {things} is that?", step, answer=value)
    rest, left = work(total, "-", value)
    steps, question = [step, f"{who.he} has {left} {things} left."], question
    if rng.random() < 0.3:
        more = rng.randint(2, 30)
        question += f"Then {who.he} [gets|buys|finds] {more} more. "
        rest, done = work(rest, "+", more)
        steps.append(f"then {who.he} has {done} {things}.")
    question += f"How many {things} does {who.he} have [left|now]?"
    return make_problem(phrase(rng, question), *steps, answer=rest)


def comparison(rng: Random) -> Problem:
    """Two or three people compared: more, fewer, times as many."""
    crowd, things = people(rng, rng.choice((2, 2, 3))), rng.choice(THINGS)
    have = total = rng.randint(4, 40)
    story, steps = [f"{crowd[0].name} has {have} {things}"], []
    for before, who in itertools.pairwise(crowd):
        kind, by = rng.choice("+-*"), rng.randint(2, 5)
        if kind == "-" and have <= 3:
            kind = "+"
        by = by if kind == "*" else rng.randint(1, have - 1) if kind == "-" else rng.randint(1, 30)
        words = {
            "+": f"{by} more {things} than",
            "-": f"{by} fewer {things} than",
            "*": f"{by} times as many {things} as",
        }
        text = "twice as many " + things + " as" if (kind, by) == ("*", 2) else words[kind]
        story.append(f"{who.name} has {text} {before.name}")
        have, done = work(have, kind, by)
        steps.append(f"{who.name} has {done} {things}.")
        total += have
    if rng.random() < 0.4:
        ask = f"How many {things} does {crowd[-1].name} have?"
        return make_problem(". ".join([*story, ask]), *steps, answer=have)
    counts = [int(step.rsplit(">>", 1)[1].split()[0]) for step in steps]
    sum_so_far = int(story[0].split()[2])
    for number, count in enumerate(counts):
        sum_so_far, done = work(sum_so_far, "+", count)
        group = "together" if number == len(counts) - 1 else f"{crowd[0].name} and {crowd[1].name} together"
        steps.append(
            f"{group} they have {done} {things}." if group == "together" else f"{group} have {done} {things}."
        )
    ask = phrase(rng, f"How many {things} do they have [together|in total|in all|altogether]?")
    first, second = int(story[0].split()[2]), counts[0]
    most, least = (crowd[0], crowd[1]) if first > second else (crowd[1], crowd[0])
    says = f"{most.name} has @ more {things}."
    more = second_turn(
        rng,
        f"How many more {things} does {most.name} have than {least.name}?",
        *(max(first, second), "-", min(first, second), says),
    )
    return make_problem(". ".join([*story, ask]), *steps, answer=total, more=more)


def legs(rng: Random) -> Problem:
    """Legs of two kinds of animals."""
    first, second = rng.sample(sorted(LEGS), 2)
    n, m = rng.randint(2, 15), rng.randint(2, 15)
    a, one_sum = work(n, "*", LEGS[first])
    b, other_sum = work(m, "*", LEGS[second])
    value, total = work(a, "+", b)
    who = people(rng, 1)[0].name
    question = f"[{who} has {n} {first} and {m} {second}|There are {n} {first} and {m} {second} [on a farm|in a field|in a garden]]. How many legs do [they|the animals] have [in all|altogether|in total]?"
    steps = (
        f"the {first} have {one_sum} legs.",
        f"the {second} have {other_sum} legs.",
        f"together they have {total} legs.",
    )
    return make_problem(phrase(rng, question), *steps, answer=value)


def seats(rng: Random) -> Problem:
    """Rows of seats, some of them taken."""
    rows, each, place = (
        rng.randint(3, 20),
        rng.randint(4, 15),
        phrase(rng, "[theater|cinema|bus|hall|stadium|classroom]"),
    )
    total, done = work(rows, "*", each)
    start = f"A {place} has {rows} rows of seats with {each} seats in each row. "
    step = f"there are {done} seats."
    if rng.random() < 0.35:
        return make_problem(start + f"How many seats does the {place} have?", step, answer=total)
    taken = rng.randint(1, total - 1)
    value, left = work(total, "-", taken)
    question = (
        start
        + f"[If {taken} seats are taken, how many|{taken} seats are taken. How many] seats are [empty|free]?"
    )
    return make_problem(phrase(rng, question), step, f"{left} seats are free.", answer=value)


def passengers(rng: Random) -> Problem:
    """People getting on and off."""
    ride = phrase(rng, "[bus|train|boat|tram]")
    start, off, on = rng.randint(12, 80), rng.randint(2, 11), rng.randint(2, 30)
    left, first = work(start, "-", off)
    value, second = work(left, "+", on)
    question = f"There are {start} people on a {ride}. At the [first|next] stop {off} people get off and {on} people get on. How many people are on the {ride} [now|]?"
    steps = f"after {off} people get off there are {first} people.", f"then there are {second} people."
    return make_problem(phrase(rng, question).replace(" ?", "?"), *steps, answer=value)


_BASE_FORM = {"sold": "sell", "made": "make", "collected": "collect", "picked": "pick", "counted": "count"}


def two_days(rng: Random) -> Problem:
    """Sales of two days where the second is told by the first; the sum."""
    (who,), things, base = people(rng, 1), rng.choice(THINGS), rng.randint(2, 40) * 2
    first, second = rng.sample(
        ("Monday", "Tuesday", "Friday", "Saturday", "Sunday", "the first day", "the second day"), 2
    )
    number = rng.randint(2, 30)
    words, op, by = rng.choice(
        (
            ("twice as many", "*", 2),
            ("three times as many", "*", 3),
            ("half as many", "/", 2),
            (f"{number} more", "+", number),
        )
    )
    verb = phrase(rng, "[sold|made|collected|picked|counted]")
    on = first, second
    other, step = work(base, op, by)
    total, done = work(base, "+", other)
    question = f"On {on[0]}, {who.name} {verb} {base} {things}. On {on[1]}, {who.he} {verb} {words}. How many {things} did {who.he} {_BASE_FORM[verb]} [in total|altogether|in all|on both days]?"
    steps = f"on {on[1]} {who.he} {verb} {step} {things}.", f"in total {who.he} {verb} {done} {things}."
    return make_problem(phrase(rng, question), *steps, answer=total)


def garden(rng: Random) -> Problem:
    """Rows of plants, each with a yield."""
    (who,), rows, each, fruit = people(rng, 1), rng.randint(2, 10), rng.randint(2, 10), rng.randint(2, 8)
    plant, crop = rng.choice(GARDENS)
    plants, first = work(rows, "*", each)
    start = f"{who.name} has {rows} rows of {plant} with {each} {plant} in each row. "
    if rng.random() < 0.4:
        return make_problem(
            start + f"How many {plant} does {who.he} have?", f"{who.name} has {first} {plant}.", answer=plants
        )
    value, second = work(plants, "*", fruit)
    question = start + f"Each of them gives {fruit} {crop}. How many {crop} does {who.he} get?"
    return make_problem(
        question, f"there are {first} {plant}.", f"{who.he} gets {second} {crop}.", answer=value
    )


def recipe(rng: Random) -> Problem:
    """A recipe made several times, or an ingredient for a number of pieces."""
    (who,), each, times = people(rng, 1), rng.randint(2, 9), rng.randint(2, 10)
    food = phrase(rng, "[cake|pie|soup|salad|bread|stew|pizza]")
    what = phrase(rng, "[cups of flour|eggs|spoons of sugar|cups of milk|tomatoes|onions|apples]")
    need, product = work(each, "*", times)
    question = f"[A recipe for one {food} needs|To make one {food}, {who.name} needs] {each} {what}. "
    step = f"for {times} of them {who.he} needs {product} {what}."
    if rng.random() < 0.5:
        return make_problem(
            phrase(rng, question + f"How many {what} does {who.name} need to make {times} of them?"),
            step,
            answer=need,
        )
    have = rng.randint(1, need - 1)
    value, rest = work(need, "-", have)
    question += f"{who.name} has {have} {what}. How many more does {who.he} need to make {times} of them?"
    return make_problem(phrase(rng, question), step, f"{who.he} needs {rest} more.", answer=value)
