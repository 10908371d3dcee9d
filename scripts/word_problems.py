# ruff: noqa: E501 (a phrase stays on one line)
"""Writes grade-school word problems with worked answers in the GSM8K format, and says which are held out.

Every text is made here, from the templates below; the calculator marks ``<<12*3=36>>`` and the last line
``#### 36`` are GSM8K's (Cobbe et al., 2021).
"""

import hashlib
import itertools
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from phrases import CONTAINERS, GOODS, JOBS, MAKERS, PLACES, THINGS, Person, one, people, phrase, sentence

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
_HELD_OUT_SHARE = 8  # of 256 hash values


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A question, the sentences that work it out, and the number that they reach."""

    question: str
    steps: tuple[str, ...]
    answer: int
    more: tuple[str, str] | None = None  # a second turn that only makes sense here, and its answer

    @property
    def solution(self) -> str:
        """The worked answer in the GSM8K format."""
        return "\n".join((*self.steps, f"#### {self.answer}"))


def is_held_out(question: str) -> bool:
    """Whether ``question`` belongs to the test split: its hash decides, so no split can leak into the other."""
    return hashlib.sha256(question.encode()).digest()[0] < _HELD_OUT_SHARE


def work(a: int, op: str, b: int, unit: str = "") -> tuple[int, str]:
    """The value of ``a op b`` and the sum written out with its calculator mark; divisions must come out even."""
    assert op != "/" or a % b == 0
    value = _OPERATIONS[op](a, b)
    return value, f"{a} {op} {b} = {unit}<<{a}{op}{b}={value}>>{value}"


def _number(rng: Random, value: int) -> str:
    """``value`` in digits, or now and then a small one as a word."""
    return _SMALL[value] if value < len(_SMALL) and rng.random() < 0.15 else str(value)


def _problem(question: str, *steps: str, answer: int, more: tuple[str, str] | None = None) -> Problem:
    return Problem(question=question, steps=steps, answer=answer, more=more)


def _again(rng: Random, ask: str, a: int, op: str, b: int, says: str, unit: str = "") -> tuple[str, str]:
    """A second turn answered by one sum; ``says`` holds a ``@`` where the sum goes."""
    value, done = work(a, op, b, unit)
    return sentence(phrase(rng, ask).strip()), sentence(f"{says.replace('@', done)}\n#### {value}")


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
        event = f"{who.he} {verb} {_number(rng, packs)} {kind} with {_number(rng, each)} {things} each"
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
    """Somebody has things; one to three events change how many."""
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
    more = _again(rng, ask_more, have, "+", extra, f"then {who.he} has @ {things}.")
    return _problem(". ".join(map(sentence, story)) + ". " + ask, *steps, answer=have, more=more)


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
        return _problem(
            phrase(rng, question),
            f"the {kind} hold {product} {things}.",
            f"{rest} {things} are left.",
            answer=left,
        )
    if not loose:
        question += f"How many {things} are there [in total|in all|altogether]?"
        return _problem(phrase(rng, question), f"there are {product} {things}.", answer=inside)
    question += f"There are [also |]{loose} [loose|more] {things} on the table. How many {things} are there [in all|altogether]?"
    total, done = work(inside, "+", loose)
    steps = f"the {kind} hold {product} {things}.", f"together there are {done} {things}."
    return _problem(phrase(rng, question), *steps, answer=total)


def shopping(rng: Random) -> Problem:
    """Two kinds of goods at a price each; the bill or the change."""
    (who,), (first, second) = people(rng, 1), rng.sample(GOODS, 2)
    n, m, price, other = rng.randint(2, 9), rng.randint(1, 9), rng.randint(2, 20), rng.randint(2, 20)
    question = phrase(
        rng,
        f"[{who.name} buys {n} {first} for ${price} each and {m} {second if m > 1 else one(second)} for ${other} each"
        f"|At the [store|market], {first} cost ${price} each and {second} cost ${other} each. "
        f"{who.name} buys {n} {first} and {m} {second if m > 1 else one(second)}]. ",
    )
    a, first_sum = work(n, "*", price, "$")
    b, second_sum = work(m, "*", other, "$")
    total, bill = work(a, "+", b, "$")
    steps = [
        f"the {first} cost {first_sum}.",
        f"the {second} cost {second_sum}.",
        f"in total {who.he} pays {bill}.",
    ]
    if rng.random() < 0.6:
        question += f"How much [does {who.he} pay|does {who.name} spend|money does {who.he} spend] [in total|in all|altogether]?"
        return _problem(phrase(rng, question), *steps, answer=total)
    paid = total + rng.choice((1, 2, 5, 10, 20, 30))
    change, back = work(paid, "-", total, "$")
    question += f"{sentence(who.he)} pays with ${paid}. How much change does {who.he} get?"
    return _problem(question, *steps, f"{who.his} change is {back}.", answer=change)


def price(rng: Random) -> Problem:
    """One kind of goods: the bill, or what is left of the money."""
    (who,), goods = people(rng, 1), rng.choice(GOODS)
    n, each = rng.randint(2, 15), rng.randint(2, 25)
    total, bill = work(n, "*", each, "$")
    start = phrase(
        rng,
        f"[A {one(goods)} costs ${each}|One {one(goods)} costs ${each}|{sentence(goods)} cost ${each} each]. ",
    )
    if rng.random() < 0.5:
        ask = f"[How much do {n} {goods} cost|How much does {who.name} pay for {n} {goods}|What is the price of {n} {goods}]?"
        m = rng.randint(2, 12)
        more = _again(rng, f"[And|] how much do {m} {goods} cost?", m, "*", each, f"{m} {goods} cost @.", "$")
        return _problem(phrase(rng, start + ask), f"{n} {goods} cost {bill}.", answer=total, more=more)
    money = total + rng.randint(1, 60)
    rest, left = work(money, "-", total, "$")
    question = f"{start}{who.name} has ${money} and buys {n} {goods}. How much money does {who.he} have left?"
    return _problem(question, f"the {goods} cost {bill}.", f"{who.name} has {left} left.", answer=rest)


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
        question = (
            f"{start} and [shares|divides|splits] them equally among {_number(rng, friends)} {crowd}. {get}"
        )
        return _problem(phrase(rng, question), last, answer=split)
    _left, rest = work(total + kept, "-", kept)
    question = (
        f"{who.name} has {total + kept} {things}. {sentence(who.he)} keeps {kept} [for {who.his}self|] and shares "
        f"the rest equally among {friends} {crowd}. {get}"
    )
    question = phrase(rng, question).replace("hisself", "himself").replace("  ", " ")
    return _problem(question, f"there are {rest} {things} to share.", last, answer=split)


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
    return _problem(question, f"{who.name} needs {done} {kind}.", answer=value)


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
        return _problem(question + f"How many {things} is that?", step, answer=value)
    rest, left = work(total, "-", value)
    steps, question = [step, f"{who.he} has {left} {things} left."], question
    if rng.random() < 0.3:
        more = rng.randint(2, 30)
        question += f"Then {who.he} [gets|buys|finds] {more} more. "
        rest, done = work(rest, "+", more)
        steps.append(f"then {who.he} has {done} {things}.")
    question += f"How many {things} does {who.he} have [left|now]?"
    return _problem(phrase(rng, question), *steps, answer=rest)


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
        return _problem(". ".join([*story, ask]), *steps, answer=have)
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
    more = _again(
        rng,
        f"How many more {things} does {most.name} have than {least.name}?",
        *(max(first, second), "-", min(first, second), says),
    )
    return _problem(". ".join([*story, ask]), *steps, answer=total, more=more)


def wages(rng: Random) -> Problem:
    """Pay by the hour over hours, days or weeks, perhaps with a bonus."""
    (who,), job = people(rng, 1), rng.choice(JOBS)
    pay, hours, days = rng.randint(5, 30), rng.randint(2, 9), rng.randint(2, 7)
    day, first = work(pay, "*", hours, "$")
    question = phrase(rng, f"{who.name} [works as a {job} and|] earns ${pay} [an|per] hour. ").replace(
        "  ", " "
    )
    if rng.random() < 0.4:
        question += phrase(rng, f"How much does {who.he} earn [in|for working] {hours} hours?")
        more = _again(
            rng, f"[And|] how much in {days * 5} hours?", pay, "*", days * 5, f"{who.name} earns @.", "$"
        )
        return _problem(question, f"{who.name} earns {first}.", answer=day, more=more)
    question += f"{sentence(who.he)} works {hours} hours a day for {days} days. "
    total, second = work(day, "*", days, "$")
    steps = [f"each day {who.he} earns {first}.", f"in {days} days {who.he} earns {second}."]
    if rng.random() < 0.3:
        bonus = rng.randint(1, 10) * 5
        question += f"{sentence(who.he)} also gets a bonus of ${bonus}. "
        total, third = work(total, "+", bonus, "$")
        steps.append(f"with the bonus {who.he} gets {third}.")
    return _problem(question + f"How much money does {who.he} earn in total?", *steps, answer=total)


def travel(rng: Random) -> Problem:
    """Distance from speed and time, or time from distance and speed."""
    who, place = people(rng, 1)[0], rng.choice(PLACES)
    mover, verb = rng.choice(
        (
            ("A train", "travels"),
            ("A car", "drives"),
            ("A bus", "travels"),
            (who.name, "rides"),
            (who.name, "walks"),
        )
    )
    speed = (
        rng.randint(2, 6)
        if verb == "walks"
        else rng.randint(8, 20)
        if verb == "rides"
        else rng.randint(6, 18) * 5
    )
    hours = rng.randint(2, 9)
    distance, done = work(speed, "*", hours)
    unit = phrase(rng, "[miles|kilometers]")
    if rng.random() < 0.35:
        value, quotient = work(distance, "/", speed)
        question = (
            f"{mover} {verb} at {speed} {unit} per hour. How many hours does it take to go {distance} {unit}?"
        )
        return _problem(question, f"it takes {quotient} hours.", answer=value)
    question = f"{mover} {verb} at [a speed of |]{speed} {unit} [per|an] hour for {hours} hours. "
    step = f"in {hours} hours the distance is {done} {unit}."
    if rng.random() < 0.5:
        longer = rng.randint(2, 10)
        ask = f"[And how far in {longer} hours|How many {unit} [is that|does it go] in {longer} hours]?"
        more = _again(rng, ask, speed, "*", longer, f"in {longer} hours the distance is @ {unit}.")
        question += f"How [far does it go|many {unit} is that]?"
        return _problem(phrase(rng, question), step, answer=distance, more=more)
    left, rest = work(distance + 5 * hours, "-", distance)
    question += f"The {place} is {distance + 5 * hours} {unit} away. How many {unit} are left?"
    return _problem(phrase(rng, question), step, f"there are {rest} {unit} left.", answer=left)


def reading(rng: Random) -> Problem:
    """Pages of a book read by the day: pages left, or days needed."""
    (who,), each, days = people(rng, 1), rng.randint(4, 30), rng.randint(2, 9)
    read, done = work(each, "*", days)
    if rng.random() < 0.4:
        value, quotient = work(read, "/", each)
        question = f"A book has {read} pages. {who.name} reads {each} pages [a|every|each] day. How many days does {who.he} need to finish the book?"
        return _problem(phrase(rng, question), f"{who.name} needs {quotient} days.", answer=value)
    pages = read + rng.randint(5, 120)
    left, rest = work(pages, "-", read)
    question = f"{who.name} is reading a book with {pages} pages. {sentence(who.he)} reads {each} pages [a|every|each] day for {days} days. How many pages are left?"
    return _problem(
        phrase(rng, question),
        f"in {days} days {who.he} reads {done} pages.",
        f"there are {rest} pages left.",
        answer=left,
    )


def ages(rng: Random) -> Problem:
    """Ages now or in some years, of one person or two."""
    (first, second), age = people(rng, 2), rng.randint(4, 40)
    if rng.random() < 0.4:
        sibling = "sister" if second.he == "she" else "brother"
        second = replace(second, name=phrase(rng, f"[{first.name}'s|{first.his}] [older |big |]{sibling}"))
    years, gap = rng.randint(2, 15), rng.randint(2, 20)
    start = f"{first.name} is {age} years old. "
    if rng.random() < 0.3:
        value, done = work(age, "+", years)
        return _problem(
            start + f"How old will {first.he} be in {years} years?",
            f"in {years} years {first.he} will be {done} years old.",
            answer=value,
        )
    older, done = work(age, "+", gap)
    start += f"{second.name} is {gap} years older[ than {first.name}|]. "
    step = f"{second.name} is {done} years old."
    if rng.random() < 0.4:
        return _problem(phrase(rng, start + f"How old is {second.name}?"), step, answer=older)
    value, later = work(older, "+", years)
    question = phrase(rng, start + f"How old will {second.name} be in {years} years?")
    return _problem(question, step, f"in {years} years {second.he} will be {later} years old.", answer=value)


def percent(rng: Random) -> Problem:
    """A round percentage of a number of people, or off a price."""
    share, times = rng.choice(((10, 10), (20, 5), (25, 4), (50, 2)))
    part = rng.randint(2, 30)
    total = part * times
    value, done = work(total, "/", times)
    if rng.random() < 0.5:
        group = phrase(rng, "[students in a school|children in a club|people in a village|guests at a party]")
        what = phrase(rng, "[play football|wear glasses|like music|have a pet|walk to work|can swim]")
        question = f"There are {total} {group}. {share}% of them {what}. How many of them {what}?"
        return _problem(question, f"{share}% of {total} is {done}.", answer=value)
    goods = one(rng.choice(GOODS))
    question = f"A {goods} costs ${total}. It is on sale for {share}% off. What is the [sale|new] price?"
    price_now, left = work(total, "-", value, "$")
    steps = f"{share}% of ${total} is {done.replace('= ', '= $')}.", f"the new price is {left}."
    m = rng.randint(2, 9)
    ask = f"How much do {_number(rng, m)} of [them|these {goods}s] cost [now|on sale]?"
    more = _again(rng, ask, price_now, "*", m, f"{m} of them cost @.", "$")
    return _problem(phrase(rng, question), *steps, answer=price_now, more=more)


def rectangle(rng: Random) -> Problem:
    """Area or perimeter of something rectangular."""
    long, wide = rng.randint(4, 25), rng.randint(2, 12)
    thing = phrase(rng, "[garden|room|field|carpet|table|yard|playground|wall|pool]")
    unit = phrase(rng, "[feet|meters]")
    start = f"A [rectangular |]{thing} is {long} {unit} long and {wide} {unit} wide. "
    if rng.random() < 0.5:
        value, done = work(long, "*", wide)
        return _problem(
            phrase(rng, start + f"What is its area in square {unit}?"),
            f"the area is {done} square {unit}.",
            answer=value,
        )
    half, first = work(long, "+", wide)
    value, second = work(half, "*", 2)
    steps = f"one long side and one short side make {first} {unit}.", f"the perimeter is {second} {unit}."
    return _problem(phrase(rng, start + "What is [its|the] perimeter?"), *steps, answer=value)


_LEGS = {
    "cows": 4,
    "horses": 4,
    "dogs": 4,
    "sheep": 4,
    "goats": 4,
    "chickens": 2,
    "ducks": 2,
    "geese": 2,
    "spiders": 8,
    "beetles": 6,
    "cats": 4,
    "lions": 4,
    "ants": 6,
    "hens": 2,
    "owls": 2,
    "parrots": 2,
    "swans": 2,
    "rabbits": 4,
}


def legs(rng: Random) -> Problem:
    """Legs of two kinds of animals."""
    first, second = rng.sample(sorted(_LEGS), 2)
    n, m = rng.randint(2, 15), rng.randint(2, 15)
    a, one_sum = work(n, "*", _LEGS[first])
    b, other_sum = work(m, "*", _LEGS[second])
    value, total = work(a, "+", b)
    who = people(rng, 1)[0].name
    question = f"[{who} has {n} {first} and {m} {second}|There are {n} {first} and {m} {second} [on a farm|in a field|in a garden]]. How many legs do [they|the animals] have [in all|altogether|in total]?"
    steps = (
        f"the {first} have {one_sum} legs.",
        f"the {second} have {other_sum} legs.",
        f"together they have {total} legs.",
    )
    return _problem(phrase(rng, question), *steps, answer=value)


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
        return _problem(start + f"How many seats does the {place} have?", step, answer=total)
    taken = rng.randint(1, total - 1)
    value, left = work(total, "-", taken)
    question = (
        start
        + f"[If {taken} seats are taken, how many|{taken} seats are taken. How many] seats are [empty|free]?"
    )
    return _problem(phrase(rng, question), step, f"{left} seats are free.", answer=value)


def saving(rng: Random) -> Problem:
    """Saving money week by week: the sum, or the weeks needed."""
    (who,), week, weeks = people(rng, 1), rng.randint(2, 25), rng.randint(2, 12)
    goal, period = one(rng.choice(GOODS)), phrase(rng, "[week|month|day]")
    need, product = work(week, "*", weeks, "$")
    if rng.random() < 0.4:
        question = f"{who.name} saves ${week} [every|each|a] {period}. How much does {who.he} save in {weeks} {period}s?"
        longer = rng.randint(2, 15)
        ask = f"[And how much in|What about] {longer} {period}s?"
        more = _again(rng, ask, week, "*", longer, f"in {longer} {period}s {who.he} saves @.", "$")
        return _problem(
            phrase(rng, question), f"in {weeks} {period}s {who.he} saves {product}.", answer=need, more=more
        )
    have = rng.randint(5, 80)
    _missing, rest = work(need + have, "-", have, "$")
    value, count = work(need, "/", week)
    question = f"{who.name} wants to buy a {goal} that costs ${need + have}. {sentence(who.he)} has ${have} and saves ${week} every {period}. How many {period}s does {who.he} need?"
    return _problem(question, f"{who.he} still needs {rest}.", f"that takes {count} {period}s.", answer=value)


def production(rng: Random) -> Problem:
    """So many an hour or a day; over a time, less the spoiled ones."""
    maker, things = rng.choice(MAKERS)
    each, times, period = rng.randint(3, 40), rng.randint(2, 9), rng.choice(("hour", "day"))
    total, product = work(each, "*", times)
    start = f"A {maker} [makes|produces] {each} {things} [every|each|per] {period}. "
    if rng.random() < 0.4:
        return _handmade(rng, each, times, period)
    step = f"in {times} {period}s it makes {product} {things}."
    if rng.random() < 0.5:
        return _problem(
            phrase(rng, start + f"How many {things} does it make in {times} {period}s?"), step, answer=total
        )
    less = rng.randint(1, total // 2)
    value, left = work(total, "-", less)
    question = (
        start
        + f"In {times} {period}s, {less} of them are [sold|given away|broken]. How many {things} are left?"
    )
    return _problem(phrase(rng, question), step, f"{left} {things} are left.", answer=value)


def _handmade(rng: Random, each: int, times: int, period: str) -> Problem:
    """Somebody makes things, and some of them go."""
    (who,), things = (
        people(rng, 1),
        rng.choice(("cakes", "pies", "scarves", "candles", "lamps", "cookies", "toys", "hats")),
    )
    total, product = work(each, "*", times)
    less = rng.randint(1, total // 2)
    value, left = work(total, "-", less)
    name = phrase(rng, f"[{who.name}|A {rng.choice(JOBS)}]")
    question = f"{name} makes {each} {things} [every|each|per] {period}. {sentence(who.he)} works [for |]{times} {period}s and [sells|gives away|breaks] {less} {things}. How many {things} are left?"
    return _problem(
        phrase(rng, question),
        f"in {times} {period}s {who.he} makes {product} {things}.",
        f"{left} {things} are left.",
        answer=value,
    )


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
    return _problem(phrase(rng, question), *steps, answer=total)


_BASE_FORM = {"sold": "sell", "made": "make", "collected": "collect", "picked": "pick", "counted": "count"}


def routine(rng: Random) -> Problem:
    """Something done every day, over weeks or with two times a day."""
    (who,), each, weeks = people(rng, 1), rng.randint(2, 20), rng.randint(2, 8)
    does, unit = rng.choice(
        (
            ("runs", "miles"),
            ("walks", "miles"),
            ("reads", "pages"),
            ("drinks", "glasses of water"),
            ("writes", "letters"),
            ("practices", "minutes"),
        )
    )
    week, first = work(each, "*", 7)
    if rng.random() < 0.35:
        question = f"{who.name} {does} {each} {unit} every day. How many {unit} is that in one week?"
        return _problem(question, f"a week has 7 days, so that is {first} {unit}.", answer=week)
    value, second = work(week, "*", weeks)
    question = f"{who.name} {does} {each} {unit} [every|each] day. How many {unit} is that in {_number(rng, weeks)} weeks?"
    return _problem(
        phrase(rng, question),
        f"in one week that is {first} {unit}.",
        f"in {weeks} weeks that is {second} {unit}.",
        answer=value,
    )


def clock(rng: Random) -> Problem:
    """Minutes of several activities, or hours turned into minutes."""
    (who,), hours, extra = people(rng, 1), rng.randint(1, 5), rng.randint(1, 11) * 5
    first, second = rng.sample(
        ("homework", "piano practice", "gardening", "cooking", "cleaning", "swimming", "drawing", "reading"),
        2,
    )
    if rng.random() < 0.5:
        inside, product = work(hours, "*", 60)
        value, done = work(inside, "+", extra)
        question = f"{who.name} spends {hours} hour{'s' * (hours > 1)} and {extra} minutes on {first}. How many minutes is that?"
        return _problem(
            question,
            f"{hours} hour{'s' * (hours > 1)} is {product} minutes.",
            f"so it is {done} minutes.",
            answer=value,
        )
    a, days = rng.randint(2, 12) * 5, rng.randint(2, 7)
    day, total = work(a, "+", extra)
    value, done = work(day, "*", days)
    question = f"Every day {who.name} spends {a} minutes on {first} and {extra} minutes on {second}. How many minutes is that in {days} days?"
    return _problem(
        question, f"each day it is {total} minutes.", f"in {days} days it is {done} minutes.", answer=value
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
        return _problem(
            phrase(rng, question + f"How many {what} does {who.name} need to make {times} of them?"),
            step,
            answer=need,
        )
    have = rng.randint(1, need - 1)
    value, rest = work(need, "-", have)
    question += f"{who.name} has {have} {what}. How many more does {who.he} need to make {times} of them?"
    return _problem(phrase(rng, question), step, f"{who.he} needs {rest} more.", answer=value)


def passengers(rng: Random) -> Problem:
    """People getting on and off."""
    ride = phrase(rng, "[bus|train|boat|tram]")
    start, off, on = rng.randint(12, 80), rng.randint(2, 11), rng.randint(2, 30)
    left, first = work(start, "-", off)
    value, second = work(left, "+", on)
    question = f"There are {start} people on a {ride}. At the [first|next] stop {off} people get off and {on} people get on. How many people are on the {ride} [now|]?"
    steps = f"after {off} people get off there are {first} people.", f"then there are {second} people."
    return _problem(phrase(rng, question).replace(" ?", "?"), *steps, answer=value)


def garden(rng: Random) -> Problem:
    """Rows of plants, each with a yield."""
    (who,), rows, each, fruit = people(rng, 1), rng.randint(2, 10), rng.randint(2, 10), rng.randint(2, 8)
    plant, crop = rng.choice(
        (
            ("tomato plants", "tomatoes"),
            ("apple trees", "apples"),
            ("rose bushes", "roses"),
            ("orange trees", "oranges"),
            ("pepper plants", "peppers"),
        )
    )
    plants, first = work(rows, "*", each)
    start = f"{who.name} has {rows} rows of {plant} with {each} {plant} in each row. "
    if rng.random() < 0.4:
        return _problem(
            start + f"How many {plant} does {who.he} have?", f"{who.name} has {first} {plant}.", answer=plants
        )
    value, second = work(plants, "*", fruit)
    question = start + f"Each of them gives {fruit} {crop}. How many {crop} does {who.he} get?"
    return _problem(question, f"there are {first} {plant}.", f"{who.he} gets {second} {crop}.", answer=value)


def group_bill(rng: Random) -> Problem:
    """A bill with a tip or a fee, split equally."""
    crowd, share, extra = rng.randint(2, 8), rng.randint(3, 30), rng.randint(1, 9)
    total = crowd * share
    who = people(rng, 1)[0]
    bill = total - extra if total > 2 * extra else total
    where = phrase(rng, "[dinner|lunch|a gift|a boat trip|the tickets|a taxi]")
    tip = phrase(rng, "[a tip of|a fee of|a tax of]")
    _both, done = work(bill, "+", total - bill, "$") if bill < total else (total, "")
    value, each = work(total, "/", crowd, "$")
    if not done or rng.random() < 0.4:
        question = f"{who.name} and {crowd - 1} friend{'s' * (crowd > 2)} pay ${total} for {where}. They split the cost equally. How much does each person pay?"
        return _problem(question, f"there are {crowd} people, so each pays {each}.", answer=value)
    question = f"A group of {crowd} friends pays ${bill} for {where} and {tip} ${total - bill}. They split everything equally. How much does each of them pay?"
    return _problem(question, f"in total they pay {done}.", f"each of them pays {each}.", answer=value)


TEMPLATES: tuple[Callable[[Random], Problem], ...] = (
    *(
        chain,
        chain,
        chain,
        chain,
        packing,
        packing,
        shopping,
        shopping,
        price,
        sharing,
        boxes_needed,
        fraction,
    ),
    *(
        comparison,
        comparison,
        wages,
        travel,
        reading,
        ages,
        percent,
        rectangle,
        legs,
        seats,
        saving,
        production,
    ),
    *(two_days, two_days, routine, clock, recipe, passengers, garden, group_bill),
)


def _worded(rng: Random, steps: tuple[str, ...], answer: int) -> tuple[str, ...]:
    """The steps with openings, and now and then a closing sentence, so that not every answer runs the same way."""
    told = []
    for number, step in enumerate(steps):
        opening = phrase(rng, "[So |Now |Next, |This means that |Then |||||]" if number else "[First, ||||]")
        keep = step.startswith(("then ", "after that ", "in total ")) or step[0].isdigit()
        told.append(sentence(step if keep else opening + step))
    if rng.random() < 0.2:
        told.append(phrase(rng, f"[So the answer is|The answer is|That makes] {answer}."))
    return tuple(told)


def generate(rng: Random) -> Problem:
    """A random problem of a random template, of either split."""
    problem = rng.choice(TEMPLATES)(rng)
    return replace(problem, steps=_worded(rng, problem.steps, problem.answer))


def of_split(rng: Random, *, held_out: bool) -> Problem:
    """A random problem of the test split or of the training split."""
    while is_held_out((problem := generate(rng)).question) != held_out:
        pass
    return problem


def follow_up(rng: Random, problem: Problem) -> tuple[str, str]:
    """A second user turn about ``problem`` and its answer."""
    n, extra = problem.answer, rng.randint(2, 20)
    if problem.more and rng.random() < 0.4:
        return problem.more
    sums = (
        ("[Now double|Double] [the answer|that number|the result].", n, "*", 2),
        (
            f"[[Now |]add {extra} to [that|the answer|the result|it].|What is {extra} more than that?]",
            n,
            "+",
            extra,
        ),
        (
            f"[What is [the answer|that|the result] times {extra % 8 + 2}?|Multiply [that|the answer] by {extra % 8 + 2}.]",
            n,
            "*",
            extra % 8 + 2,
        ),
    )
    kind = rng.randrange(6)
    if kind < 3:
        ask, a, op, b = rng.choice(sums)
        value, done = work(a, op, b)
        return sentence(phrase(rng, ask)), phrase(
            rng, f"[The new answer is|That makes|The result is] {done}.\n#### {value}"
        )
    if kind == 3:
        ask = "[[Explain each step|Explain how you got that|Show [me|all] the steps|Show the steps in a list][.|, please.]|How did you get that answer?|Can you explain it?|List the steps.|Explain the answer.]"
        lines = [f"{number}. {step}" for number, step in enumerate(problem.steps, 1)]
        return phrase(rng, ask), "\n".join([*lines, f"So the answer is {n}."])
    if kind == 4:
        ask = "[Write only the answer.|Give me only the number.|So what is the answer?|And the final answer?|What is the final result?|Just the answer, please.|Answer in one short sentence.|What is the result?]"
        return phrase(rng, ask), f"The answer is {n}."
    ask = "[Are you sure?|Check your answer.|Is that right?|Can you check that again?]"
    return phrase(rng, ask), "Yes. " + " ".join(problem.steps) + f" So the answer is {n}."


def write_prompts(path: Path, *, count: int, seed: int) -> None:
    """Write ``count`` held-out problems as a GSM8K file (JSONL with ``question`` and ``answer``)."""
    rng, rows = Random(seed), {}
    while len(rows) < count:
        problem = of_split(rng, held_out=True)
        rows[problem.question] = {"question": problem.question, "answer": problem.solution}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()), encoding="utf-8")


if __name__ == "__main__":
    write_prompts(Path(__file__).parents[1] / "data/prompts/gsm8k.jsonl", count=100, seed=2)
