# ruff: noqa: E501 (a phrase stays on one line)
"""Word problems about money, time, distance, age and area."""

from dataclasses import replace
from random import Random

from demo_text.phrases import (
    GOODS,
    HABITS,
    JOBS,
    MAKERS,
    PLACES,
    one,
    people,
    phrase,
    sentence,
)
from demo_text.problem import Problem, make_problem, number_word, second_turn, work


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
        return make_problem(phrase(rng, question), *steps, answer=total)
    paid = total + rng.choice((1, 2, 5, 10, 20, 30))
    change, back = work(paid, "-", total, "$")
    question += f"{sentence(who.he)} pays with ${paid}. How much change does {who.he} get?"
    return make_problem(question, *steps, f"{who.his} change is {back}.", answer=change)


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
        more = second_turn(
            rng, f"[And|] how much do {m} {goods} cost?", m, "*", each, f"{m} {goods} cost @.", "$"
        )
        return make_problem(phrase(rng, start + ask), f"{n} {goods} cost {bill}.", answer=total, more=more)
    money = total + rng.randint(1, 60)
    rest, left = work(money, "-", total, "$")
    question = f"{start}{who.name} has ${money} and buys {n} {goods}. How much money does {who.he} have left?"
    return make_problem(question, f"the {goods} cost {bill}.", f"{who.name} has {left} left.", answer=rest)


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
        more = second_turn(
            rng, f"[And|] how much in {days * 5} hours?", pay, "*", days * 5, f"{who.name} earns @.", "$"
        )
        return make_problem(question, f"{who.name} earns {first}.", answer=day, more=more)
    question += f"{sentence(who.he)} works {hours} hours a day for {days} days. "
    total, second = work(day, "*", days, "$")
    steps = [f"each day {who.he} earns {first}.", f"in {days} days {who.he} earns {second}."]
    if rng.random() < 0.3:
        bonus = rng.randint(1, 10) * 5
        question += f"{sentence(who.he)} also gets a bonus of ${bonus}. "
        total, third = work(total, "+", bonus, "$")
        steps.append(f"with the bonus {who.he} gets {third}.")
    return make_problem(question + f"How much money does {who.he} earn in total?", *steps, answer=total)


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
        return make_problem(question, f"it takes {quotient} hours.", answer=value)
    question = f"{mover} {verb} at [a speed of |]{speed} {unit} [per|an] hour for {hours} hours. "
    step = f"in {hours} hours the distance is {done} {unit}."
    if rng.random() < 0.5:
        longer = rng.randint(2, 10)
        ask = f"[And how far in {longer} hours|How many {unit} [is that|does it go] in {longer} hours]?"
        more = second_turn(rng, ask, speed, "*", longer, f"in {longer} hours the distance is @ {unit}.")
        question += f"How [far does it go|many {unit} is that]?"
        return make_problem(phrase(rng, question), step, answer=distance, more=more)
    left, rest = work(distance + 5 * hours, "-", distance)
    question += f"The {place} is {distance + 5 * hours} {unit} away. How many {unit} are left?"
    return make_problem(phrase(rng, question), step, f"there are {rest} {unit} left.", answer=left)


def reading(rng: Random) -> Problem:
    """Pages of a book read by the day: pages left, or days needed."""
    (who,), each, days = people(rng, 1), rng.randint(4, 30), rng.randint(2, 9)
    read, done = work(each, "*", days)
    if rng.random() < 0.4:
        value, quotient = work(read, "/", each)
        question = f"A book has {read} pages. {who.name} reads {each} pages [a|every|each] day. How many days does {who.he} need to finish the book?"
        return make_problem(phrase(rng, question), f"{who.name} needs {quotient} days.", answer=value)
    pages = read + rng.randint(5, 120)
    left, rest = work(pages, "-", read)
    question = f"{who.name} is reading a book with {pages} pages. {sentence(who.he)} reads {each} pages [a|every|each] day for {days} days. How many pages are left?"
    return make_problem(
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
        return make_problem(
            start + f"How old will {first.he} be in {years} years?",
            f"in {years} years {first.he} will be {done} years old.",
            answer=value,
        )
    older, done = work(age, "+", gap)
    start += f"{second.name} is {gap} years older[ than {first.name}|]. "
    step = f"{second.name} is {done} years old."
    if rng.random() < 0.4:
        return make_problem(phrase(rng, start + f"How old is {second.name}?"), step, answer=older)
    value, later = work(older, "+", years)
    question = phrase(rng, start + f"How old will {second.name} be in {years} years?")
    return make_problem(
        question, step, f"in {years} years {second.he} will be {later} years old.", answer=value
    )


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
        return make_problem(question, f"{share}% of {total} is {done}.", answer=value)
    goods = one(rng.choice(GOODS))
    question = f"A {goods} costs ${total}. It is on sale for {share}% off. What is the [sale|new] price?"
    price_now, left = work(total, "-", value, "$")
    steps = f"{share}% of ${total} is {done.replace('= ', '= $')}.", f"the new price is {left}."
    m = rng.randint(2, 9)
    ask = f"How much do {number_word(rng, m)} of [them|these {goods}s] cost [now|on sale]?"
    more = second_turn(rng, ask, price_now, "*", m, f"{m} of them cost @.", "$")
    return make_problem(phrase(rng, question), *steps, answer=price_now, more=more)


def rectangle(rng: Random) -> Problem:
    """Area or perimeter of something rectangular."""
    long, wide = rng.randint(4, 25), rng.randint(2, 12)
    thing = phrase(rng, "[garden|room|field|carpet|table|yard|playground|wall|pool]")
    unit = phrase(rng, "[feet|meters]")
    start = f"A [rectangular |]{thing} is {long} {unit} long and {wide} {unit} wide. "
    if rng.random() < 0.5:
        value, done = work(long, "*", wide)
        return make_problem(
            phrase(rng, start + f"What is its area in square {unit}?"),
            f"the area is {done} square {unit}.",
            answer=value,
        )
    half, first = work(long, "+", wide)
    value, second = work(half, "*", 2)
    steps = f"one long side and one short side make {first} {unit}.", f"the perimeter is {second} {unit}."
    return make_problem(phrase(rng, start + "What is [its|the] perimeter?"), *steps, answer=value)


def saving(rng: Random) -> Problem:
    """Saving money week by week: the sum, or the weeks needed."""
    (who,), week, weeks = people(rng, 1), rng.randint(2, 25), rng.randint(2, 12)
    goal, period = one(rng.choice(GOODS)), phrase(rng, "[week|month|day]")
    need, product = work(week, "*", weeks, "$")
    if rng.random() < 0.4:
        question = f"{who.name} saves ${week} [every|each|a] {period}. How much does {who.he} save in {weeks} {period}s?"
        longer = rng.randint(2, 15)
        ask = f"[And how much in|What about] {longer} {period}s?"
        more = second_turn(rng, ask, week, "*", longer, f"in {longer} {period}s {who.he} saves @.", "$")
        return make_problem(
            phrase(rng, question), f"in {weeks} {period}s {who.he} saves {product}.", answer=need, more=more
        )
    have = rng.randint(5, 80)
    _missing, rest = work(need + have, "-", have, "$")
    value, count = work(need, "/", week)
    question = f"{who.name} wants to buy a {goal} that costs ${need + have}. {sentence(who.he)} has ${have} and saves ${week} every {period}. How many {period}s does {who.he} need?"
    return make_problem(
        question, f"{who.he} still needs {rest}.", f"that takes {count} {period}s.", answer=value
    )


def _handmade(rng: Random, each: int, times: int, period: str) -> Problem:
    """A person makes things and gives some away."""
    (who,), things = (
        people(rng, 1),
        rng.choice(("cakes", "pies", "scarves", "candles", "lamps", "cookies", "toys", "hats")),
    )
    total, product = work(each, "*", times)
    less = rng.randint(1, total // 2)
    value, left = work(total, "-", less)
    name = phrase(rng, f"[{who.name}|A {rng.choice(JOBS)}]")
    question = f"{name} makes {each} {things} [every|each|per] {period}. {sentence(who.he)} works [for |]{times} {period}s and [sells|gives away|breaks] {less} {things}. How many {things} are left?"
    return make_problem(
        phrase(rng, question),
        f"in {times} {period}s {who.he} makes {product} {things}.",
        f"{left} {things} are left.",
        answer=value,
    )


def production(rng: Random) -> Problem:
    """A rate per hour or day over a time, minus the spoiled ones."""
    maker, things = rng.choice(MAKERS)
    each, times, period = rng.randint(3, 40), rng.randint(2, 9), rng.choice(("hour", "day"))
    total, product = work(each, "*", times)
    start = f"A {maker} [makes|produces] {each} {things} [every|each|per] {period}. "
    if rng.random() < 0.4:
        return _handmade(rng, each, times, period)
    step = f"in {times} {period}s it makes {product} {things}."
    if rng.random() < 0.5:
        return make_problem(
            phrase(rng, start + f"How many {things} does it make in {times} {period}s?"), step, answer=total
        )
    less = rng.randint(1, total // 2)
    value, left = work(total, "-", less)
    question = (
        start
        + f"In {times} {period}s, {less} of them are [sold|given away|broken]. How many {things} are left?"
    )
    return make_problem(phrase(rng, question), step, f"{left} {things} are left.", answer=value)


def routine(rng: Random) -> Problem:
    """Something done every day, over weeks or with two times a day."""
    (who,), each, weeks = people(rng, 1), rng.randint(2, 20), rng.randint(2, 8)
    does, unit = rng.choice(HABITS)
    week, first = work(each, "*", 7)
    if rng.random() < 0.35:
        question = f"{who.name} {does} {each} {unit} every day. How many {unit} is that in one week?"
        return make_problem(question, f"a week has 7 days, so that is {first} {unit}.", answer=week)
    value, second = work(week, "*", weeks)
    question = f"{who.name} {does} {each} {unit} [every|each] day. How many {unit} is that in {number_word(rng, weeks)} weeks?"
    return make_problem(
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
        return make_problem(
            question,
            f"{hours} hour{'s' * (hours > 1)} is {product} minutes.",
            f"so it is {done} minutes.",
            answer=value,
        )
    a, days = rng.randint(2, 12) * 5, rng.randint(2, 7)
    day, total = work(a, "+", extra)
    value, done = work(day, "*", days)
    question = f"Every day {who.name} spends {a} minutes on {first} and {extra} minutes on {second}. How many minutes is that in {days} days?"
    return make_problem(
        question, f"each day it is {total} minutes.", f"in {days} days it is {done} minutes.", answer=value
    )


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
        return make_problem(question, f"there are {crowd} people, so each pays {each}.", answer=value)
    question = f"A group of {crowd} friends pays ${bill} for {where} and {tip} ${total - bill}. They split everything equally. How much does each of them pay?"
    return make_problem(question, f"in total they pay {done}.", f"each of them pays {each}.", answer=value)
