# ruff: noqa: E501 (a phrase stays on one line)
"""Short simple chats from templates: explaining, comparing, advising, telling, describing and talking.

A chat is a list of turns that alternate between the user and the assistant, the user first.
"""

from collections.abc import Callable
from random import Random

from demo_text.chats_of_puzzles import extraction, order, program, rewriting, series, sums, words
from demo_text.phrases import (
    CAPITALS,
    CHOICES,
    COMPLAINTS,
    HE,
    LETTERS,
    LISTS,
    RHYMES,
    ROLES,
    SHE,
    SIDES,
    TALK,
    TIPS,
    TOPICS,
    Chat,
    Topic,
    a,
    bulleted,
    join,
    next_turn,
    numbered,
    people,
    phrase,
    sentence,
    tell,
)


def _define(topic: Topic) -> str:
    return f"{sentence(topic.name)} is {topic.plain}."


def _about_topic(rng: Random, topic: Topic, facts: list[str]) -> tuple[str, str]:
    """A second turn on an explained topic."""
    rest = [fact for fact in topic.facts if fact not in facts] or list(topic.facts)
    kind = rng.randrange(6)
    if kind == 0:
        ask = "[Now write it shorter|Make it shorter|Can you make it shorter|Say it in one sentence|Summarize that in one sentence|Shorten your answer]."
        return phrase(rng, ask), _define(topic)
    if kind == 1:
        ask = "[Now write it as a list|Turn it into a list|Write the main points as a list|Give me the key points]."
        return phrase(rng, ask), bulleted([_define(topic), *facts])
    if kind == 2:
        ask = "[Tell me more.|Give me one more fact.|Can you add one more sentence?|What else should I know?|Add another fact.]"
        return phrase(rng, ask), phrase(rng, "[Sure. |Here is one more fact: |Of course. |]") + rng.choice(
            rest
        )
    if kind == 3:
        ask = "[Explain it to a child|Now explain it to a five year old|Use simpler words|Make it easier to understand]."
        start = "[Let me put it simply.|Think of it like this.|In simple words:] "
        return phrase(rng, ask), phrase(rng, start) + f"It is {topic.plain}. {rng.choice(facts)}"
    if kind == 4:
        ask = "[Give me an example.|Why is it important?|Why does it matter?|What is the most interesting part?]"
        return phrase(rng, ask), phrase(
            rng,
            f"[One thing to remember|A good example|The most interesting part] is this: {rng.choice(facts)}",
        )
    return phrase(rng, "[Thanks!|Thank you.|Great, thank you!|That helps, thanks.]"), _welcome(rng)


def _welcome(rng: Random) -> str:
    return phrase(
        rng,
        "You are welcome! [Let me know if you have another question.|Is there anything else I can help with?|I am happy to help.]",
    )


def explain(rng: Random) -> Chat:
    """What something is."""
    topic = rng.choice(TOPICS)
    facts = rng.sample(topic.facts, rng.choice((2, 3, 3)))
    ask = phrase(
        rng,
        f"[What is {topic.name}?|Explain what {topic.name} is.|Tell me about {topic.name}.|Can you explain {topic.name}?"
        f"|What is {topic.name}, in simple words?|Describe {topic.name}.|What do you know about {topic.name}?"
        f"|Explain {topic.name} to a child.|Explain {topic.name} in a few sentences.|Please explain {topic.name}."
        f"|How would you describe {topic.name}?|Give me a short explanation of {topic.name}.|How does {topic.name} work?"
        f"|Why do people talk about {topic.name}?|What do you think of when you hear the word {topic.bare}?|Tell me something about {topic.name}."
        f"|I want to learn about {topic.name}.|Write a short paragraph about {topic.name}.|Why is {topic.name} important?]",
    )
    answer = " ".join([_define(topic), *facts])
    return [ask, answer, *(_about_topic(rng, topic, facts) if rng.random() < 0.6 else ())]


def facts(rng: Random) -> Chat:
    """Some facts as a numbered list."""
    topic, count = rng.choice(TOPICS), rng.choice((2, 3, 3, 4))
    words = {2: "two", 3: "three", 4: "four"}[count]
    chosen = rng.sample(topic.facts, count)
    ask = f"[Give me|Tell me|List|Write down|Name|What are] [{words}|{count}] [facts|interesting facts|things to know|simple facts] about {topic.name}."
    ask = phrase(rng, ask)
    ask = ask[:-1] + "?" if ask.startswith("What") else ask
    start = phrase(rng, f"[Here are {words} facts about {topic.name}:\n||]")
    return [ask, start + numbered(chosen), *(_about_topic(rng, topic, chosen) if rng.random() < 0.5 else ())]


def summarize(rng: Random) -> Chat:
    """A short text put into one sentence, or a question about it."""
    topic = rng.choice(TOPICS)
    facts = rng.sample(topic.facts, 3)
    text = " ".join([_define(topic), *facts])
    if rng.random() < 0.5:
        ask = "[Summarize this text in one sentence|Summarize the following text|Give a short summary of this text|What is the main idea of this text?|Shorten this text]"
        return [
            phrase(rng, ask).rstrip("?") + ": " + text,
            phrase(
                rng,
                f"[The text is about {topic.name}.|] It [says|explains] that {topic.name} is {topic.plain}.",
            ).strip(),
        ]
    ask = f"[Read the text and answer the question|Answer the question with the help of the text]. {text} What is {topic.name}?"
    return [phrase(rng, ask), _define(topic)]


def compare(rng: Random) -> Chat:
    """Two topics side by side."""
    kind = rng.choice(sorted({topic.kind for topic in TOPICS}))
    first, second = rng.sample([topic for topic in TOPICS if topic.kind == kind], 2)
    ask = f"[What is the difference between {first.name} and {second.name}?|Compare {first.name} and {second.name}.|How is {first.name} different from {second.name}?]"
    answer = f"{_define(first)} {rng.choice(first.facts)} {_define(second)} {rng.choice(second.facts)}"
    chat = [phrase(rng, ask), answer]
    if rng.random() < 0.5:
        ask = "[Which one do you like more?|Which one is better?|Which one would you choose?]"
        end = f"[It depends on what you need.|Both are good in their own way.] I would choose {rng.choice((first, second)).name}."
        chat += [phrase(rng, ask), phrase(rng, end)]
    return chat


def tips(rng: Random) -> Chat:
    """Advice as a numbered list."""
    name = rng.choice(sorted(TIPS))
    count = rng.choice((3, 3, 4, 5))
    words = {3: "three", 4: "four", 5: "five"}[count]
    chosen = rng.sample(TIPS[name], count)
    chosen.sort(key=TIPS[name].index)
    ask = (
        f"[Give me [{words}|{count}|some] tips for {name}.|What are [{words}|some|good] tips for {name}?|How can I get better at {name}?"
        f"|I need help with {name}. What should I do?|Do you have advice for {name}?|Write a short guide for {name}."
        f"|What is the best way of {name}?|List {words} ideas for {name}.|What are the steps for {name}?]"
    )
    if rng.random() < 0.3:
        ask = f"{COMPLAINTS[name]} [What can I do?|What should I do?|Do you have any tips?|Can you help me?|]"
    chat = [
        phrase(rng, ask).strip(),
        phrase(rng, f"[Here are {words} tips for {name}:\n|Sure! Here are {words} tips:\n|]")
        + numbered(chosen),
    ]
    if rng.random() < 0.6:
        rest = [tip for tip in TIPS[name] if tip not in chosen]
        best, another = rng.choice(chosen), rng.choice(rest)
        chat += next_turn(rng, "tips", best=best, another=another, first=chosen[0], last=chosen[-1])
    return chat


def listing(rng: Random) -> Chat:
    """Members of a group, and one more when asked."""
    name = rng.choice(sorted(LISTS))
    words = list(LISTS[name])
    count = rng.randint(2, min(5, len(words) - 1))
    rng.shuffle(words)
    number = ("two", "three", "four", "five")[count - 2]
    ask = phrase(rng, f"[Name|List|Give me|Tell me|Write down|Can you name] [{number}|{count}] {name}.")
    ask = ask[:-1] + "?" if ask.startswith("Can") else ask
    chosen = words[:count]
    if rng.random() < 0.2 and not name.startswith(("programming", "planets", "countries", "cities")):
        ask = phrase(
            rng, f"[Give me|I need|Do you have] {number} ideas for [nice|good|common|simple|] {name}."
        ).replace("  ", " ")
        ask = ask[:-1] + "?" if ask.startswith("Do") else ask
    answer = rng.choice(
        (
            numbered([sentence(word) for word in chosen]),
            sentence(join(chosen)) + ".",
            f"{sentence(number)} {name} are {join(chosen)}.",
        )
    )
    chat = [ask, answer]
    if rng.random() < 0.6:
        chat += next_turn(
            rng,
            "listing",
            another=words[count],
            best=rng.choice(chosen),
            ordered=join(sorted(chosen, key=str.lower)),
            count=count,
        )
    return chat


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


TEMPLATES: tuple[Callable[[Random], Chat], ...] = (
    *(explain, explain, explain, facts, facts, summarize, compare, tips, tips, listing, story, story),
    *(poem, letter),
    *(roleplay, program, program, extraction, order, order, sums, series, words, words, choice),
    *(rewriting, small_talk, scene, day_plan, sides),
)


def generate(rng: Random) -> Chat:
    """A random chat of a random template: user and assistant texts in turn."""
    return rng.choice(TEMPLATES)(rng)
