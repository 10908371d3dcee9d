# ruff: noqa: E501 (a phrase stays on one line)
"""Chats that explain, list, compare and advise."""

from random import Random

from demo_text.phrases import (
    COMPLAINTS,
    LISTS,
    TIPS,
    TOPICS,
    Chat,
    Topic,
    bulleted,
    join,
    next_turn,
    numbered,
    phrase,
    sentence,
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
