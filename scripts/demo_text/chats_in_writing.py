# ruff: noqa: E501 (a phrase stays on one line)
"""Chats that tell, describe, plan and talk: stories, poems, letters, roles, small talk."""

from random import Random

from demo_text.phrases import (
    CAPITALS,
    CHOICES,
    HE,
    LETTERS,
    RHYMES,
    ROLES,
    SHE,
    SIDES,
    TALK,
    TOPICS,
    Chat,
    a,
    bulleted,
    next_turn,
    people,
    phrase,
    sentence,
    tell,
)

_WHO = "[young|little|brave|shy|curious|clever|old|lonely|kind|quiet|hungry|tired] [dragon|fox|cat|dog|robot|girl|boy|sailor|king|queen|wizard|owl|bear|mouse|rabbit|baker|painter|knight|bird|teacher|explorer|gardener]"


_WHERE = "[in a small village|near the sea|in a deep forest|on a high mountain|in a big city|by a quiet river|in an old castle|on a green island|on a farm|in a far country]"


def story(rng: Random) -> Chat:
    """A very short story with a wish, a problem and an end."""
    who, where, (hero,) = phrase(rng, _WHO), phrase(rng, _WHERE), people(rng, 1)
    thing = phrase(
        rng,
        "[golden key|old map|silver bell|small lamp|red balloon|lost letter|magic stone|blue feather|warm coat|little boat]",
    )
    helper = phrase(rng, _WHO)
    ask = (
        f"[Write|Tell me|Can you write|Please write] a [short |very short |little ]story [about {a(who)}.|about {a(who)} {where}."
        f"|about {a(who)} who finds {a(thing)}.|about {a(who)} named {hero.name}.|with {a(who)} and {a(helper)}.]"
    )
    ask = phrase(rng, ask)
    ask = ask[:-1] + "?" if ask.startswith("Can") else ask
    name, he, his = hero.name, hero.he, hero.his
    told = tell(
        rng,
        "story",
        who=a(who),
        name=name,
        where=where,
        thing=a(thing),
        he=he,
        He=sentence(he),
        his=his,
        helper=a(helper),
    )
    if "short" in ask and rng.random() < 0.5:
        told = told[:2] + told[3:4] + told[5:]
    chat = [ask, " ".join(told)]
    if rng.random() < 0.6:
        new = rng.choice([other for other in (HE if name in HE else SHE) if other != name])
        chat += next_turn(
            rng,
            "story",
            first=told[0],
            last=told[-2],
            name=name,
            his=his,
            title=sentence(thing),
            new=new,
            renamed=" ".join(told).replace(name, new),
        )
    return chat


def poem(rng: Random) -> Chat:
    """Four rhyming lines on a topic."""
    topic = rng.choice(TOPICS)
    x = topic.bare
    first, second = rng.sample(RHYMES, 2)
    chat = [
        phrase(
            rng,
            f"[Write|Make|Can you write|Please write] a [short |little |four line |]poem about {rng.choice((topic.name, 'the ' + x))}[.|, please.]",
        ),
        sentence("\n".join(first).format(x=x)),
    ]
    if rng.random() < 0.5:
        second, start = ("\n".join(lines).format(x=x) for lines in (second, first[:2]))
        chat += next_turn(rng, "poem", second=second, start=start, title=sentence(x))
    return chat


def letter(rng: Random) -> Chat:
    """A short email, note or message."""
    reader, (sender,) = (
        phrase(
            rng,
            "[my teacher|my boss|a friend|my neighbor|my landlord|a customer|my team|my sister|my uncle|my coach]",
        ),
        people(rng, 1),
    )
    why, body = rng.choice(LETTERS)
    ask = f"[Write|Draft|Help me write|Can you write|Please write] a [short |polite |friendly ][email|message|note|letter] to {reader} about {why}."
    name = {"my teacher": "Teacher", "my boss": "Ms. Brown", "a customer": "Customer", "my team": "team"}.get(
        reader, rng.choice(SHE + HE)
    )
    text = (
        f"[Dear|Hello|Hi] {name},\n\n{body}\n\n[Best regards|Kind regards|Best wishes|Yours],\n{sender.name}"
    )
    first, *_, _last = body.split(". ")
    chat = [phrase(rng, ask), phrase(rng, text)]
    if rng.random() < 0.5:
        first = f"{first[0].lower() if first[:2] != 'I ' else 'I'}{first[1:]}"
        chat += next_turn(
            rng, "letter", name=name, first=first, subject=sentence(why), body=body, sender=sender.name
        )
    return chat


def roleplay(rng: Random) -> Chat:
    """Role play."""
    role, name = rng.choice(sorted(ROLES)), rng.choice(SHE + HE)
    ask = f"[Pretend [that |]you are|Imagine you are|Act as|Act like|You are|Play the role of] {a(role)}[. Introduce yourself.|. Greet me.|. Tell me about your day.|. What do you say?| and say hello.| and talk to me.|.]"
    chat = [phrase(rng, ask), ROLES[role].format(n=name)]
    if rng.random() < 0.6:
        chat += next_turn(rng, "roleplay", role=a(role))
    return chat


def small_talk(rng: Random) -> Chat:
    """One to three exchanges of small talk."""
    return [phrase(rng, text) for pair in rng.sample(TALK, rng.choice((1, 1, 2, 3))) for text in pair]


def scene(rng: Random) -> Chat:
    """A place described through the senses."""
    place = phrase(
        rng,
        "[a market|a beach|a forest|a busy street|a small kitchen|a train station|an old library|a garden|a farm|a mountain lake|a school|a park]",
    )
    when = phrase(
        rng, "[in the morning|at night|in summer|in winter|after the rain|on a sunny day|in autumn]"
    )
    ask = f"[Describe {place} {when}.|Write a short description of {place} {when}.|Write three sentences about {place} {when}.|What does {place} look like {when}?]"
    told = tell(rng, "scene", place=place, when=when)
    chat = [phrase(rng, ask), " ".join(told)]
    if rng.random() < 0.5:
        chat += next_turn(rng, "scene", first=told[0])
    return chat


def day_plan(rng: Random) -> Chat:
    """A day in three parts, or a menu."""
    city, (friend,) = rng.choice(sorted(CAPITALS.values())), people(rng, 1)
    ask = f"[Plan a day in {city}.|What can I do in {city} for one day?|Make a simple plan for a day in {city}.|I am going to {city} with {friend.name}. What should we do?|Write a short travel plan for {city}.]"
    told = tell(rng, "day plan")
    chat = [phrase(rng, ask), phrase(rng, f"[Here is a simple plan for {city}:\n|]") + bulleted(told)]
    if rng.random() < 0.5:
        chat += next_turn(rng, "day plan", part=phrase(rng, "[morning|afternoon|evening]"))
    return chat


def sides(rng: Random) -> Chat:
    """For and against something."""
    what, good, bad = rng.choice(SIDES)
    ask = f"[What are the pros and cons of {what}?|Give me the advantages and disadvantages of {what}.|What is good and bad about {what}?|Is {what} a good idea?|What do you think about {what}?|Write about {what}.]"
    answer = f"Pros:\n{bulleted(list(good))}\nCons:\n{bulleted(list(bad))}"
    if rng.random() < 0.3:
        answer = f"There are good and bad sides of {what}. On the one hand, {good[0][0].lower()}{good[0][1:]} On the other hand, {bad[0][0].lower()}{bad[0][1:]}"
    chat = [phrase(rng, ask), answer]
    if rng.random() < 0.4:
        chat += next_turn(rng, "sides", good=good[0], bad=bad[0], what=what)
    return chat


def choice(rng: Random) -> Chat:
    """Which of two things is better."""
    first, second = rng.sample(CHOICES, 2)
    good = {
        "first": "[is easy|saves time|is healthy|costs little]",
        "second": "[is fun|brings new ideas|gives you rest|feels good]",
    }
    ask = f"[Is it better to|Should I|Would you rather] {first} or [to |]{second}?"
    ask = ask if "Is it" in (ask := phrase(rng, ask)) else ask.replace(" or to ", " or ")
    return [
        ask,
        phrase(
            rng,
            f"[Both have good sides.|It depends on what you need.] To {first} {good['first']}. To {second} {good['second']}. [I would {first}.|I would {second}.|Choose what makes you happy.]",
        ),
    ]
