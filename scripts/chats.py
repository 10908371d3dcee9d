# ruff: noqa: E501 (a phrase stays on one line)
"""Writes short simple chats from templates: explanations, lists, stories, letters, puzzles, code and small talk.

A chat is a list of turns that alternate between the user and the assistant, the user first.
"""

import re
from collections.abc import Callable
from random import Random

from chat_facts import CAPITALS, LISTS, OPPOSITES, PROGRAMS, TIPS, TOPICS, Topic
from phrases import HE, JOBS, PLACES, SHE, a, join, people, phrase, sentence

Chat = list[str]


def _numbered(lines: list[str] | tuple[str, ...]) -> str:
    return "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))


def _bulleted(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _bare(topic: Topic) -> str:
    """The name without its article."""
    return topic.name.removeprefix("a ").removeprefix("an ").removeprefix("the ")


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
        return phrase(rng, ask), _bulleted([_define(topic), *facts])
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
        f"|Why do people talk about {topic.name}?|What do you think of when you hear the word {_bare(topic)}?|Tell me something about {topic.name}."
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
    return [ask, start + _numbered(chosen), *(_about_topic(rng, topic, chosen) if rng.random() < 0.5 else ())]


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


_COMPLAINTS = {
    "studying for a test": "I have a test [tomorrow|next week].",
    "sleeping better": "[I sleep badly.|I cannot fall asleep.|I am awake all night.|I want to sleep better.]",
    "saving money": "[I spend too much money.|I never have enough money.]",
    "staying healthy": "[I want to be healthy.|I am often sick.]",
    "learning a language": "I want to learn [French|Spanish|English|Japanese].",
    "growing tomatoes": "[I want to grow tomatoes.|My tomatoes do not grow.]",
    "cooking rice": "[My rice is always too soft.|How do I cook rice?]",
    "making tea": "[How do I make tea?|I want to make a good tea.]",
    "packing for a trip": "[I am going on a trip.|I have to pack my bag.]",
    "giving a speech": "[I must give a speech.|I am afraid of my speech.]",
    "writing a letter": "[I want to write a letter.|How do I write a letter?]",
    "making new friends": "[I have no friends here.|I am new in this city.]",
    "keeping a room tidy": "[My room is a mess.|My room is never tidy.]",
    "taking care of a dog": "[I have a new dog.|We got a dog.]",
    "saving energy at home": "[My power bill is too high.|I use too much energy.]",
    "reading more books": "[I never read books.|I want to read more.]",
    "staying calm": "[I am so nervous.|I get angry fast.|I feel stressed.]",
    "planning a birthday party": "[My birthday is soon.|I want to have a party.]",
    "starting to run": "[I want to run.|I have never been a runner.]",
    "baking bread": "[How do I bake bread?|I want to bake a bread.]",
    "working from home": "[I work from home and get nothing done.|I work at home now.]",
    "writing a good email": "[My emails are too long.|How do I write a good email?]",
}


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
        ask = (
            f"{_COMPLAINTS[name]} [What can I do?|What should I do?|Do you have any tips?|Can you help me?|]"
        )
    chat = [
        phrase(rng, ask).strip(),
        phrase(rng, f"[Here are {words} tips for {name}:\n|Sure! Here are {words} tips:\n|]")
        + _numbered(chosen),
    ]
    if rng.random() < 0.6:
        rest = [tip for tip in TIPS[name] if tip not in chosen]
        ask, answer = rng.choice(
            (
                (
                    "[Which tip is the most important?|Which one should I start with?|Pick the best one.]",
                    f"I would start with this one: {rng.choice(chosen)}",
                ),
                (
                    "[Add one more tip.|Give me one more.|Do you have another one?]",
                    f"[Sure. |]{rng.choice(rest)}",
                ),
                (
                    "[Make it shorter.|Write it in one sentence.|Summarize the tips.]",
                    f"In short: {chosen[0]} {chosen[-1]}",
                ),
            )
        )
        chat += [phrase(rng, ask), phrase(rng, answer)]
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
            _numbered([sentence(word) for word in chosen]),
            sentence(join(chosen)) + ".",
            f"{sentence(number)} {name} are {join(chosen)}.",
        )
    )
    chat = [ask, answer]
    if rng.random() < 0.6:
        ask, answer = rng.choice(
            (
                (
                    "[Give me one more.|Add one more to the list.|Can you name another one?]",
                    f"Another one is {words[count]}.",
                ),
                (
                    "[Which one do you like best?|Pick one of them.|Choose your favorite.]",
                    f"I would choose {rng.choice(chosen)}.",
                ),
                (
                    "[Sort them by the alphabet.|Put them in alphabetical order.]",
                    join(sorted(chosen, key=str.lower)) + ".",
                ),
                ("[How many did you list?|How many are there?]", f"There are {count}."),
            )
        )
        chat += [phrase(rng, ask), phrase(rng, answer)]
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
    lines = [
        f"[Once upon a time,|Long ago,|One day,] there was {a(who)} named {name} who lived {where}.",
        f"[One morning|One day|On a cold evening|After the rain] {name} found {a(thing)} [under a tree|behind the house|near the road|by the water].",
        f"[{name} wanted to know where it came from.|{name} did not know what to do with it.|{sentence(he)} wanted to bring it back to its owner.]",
        f"[On the way|In the woods|At the bridge] {he} met {a(helper)}, and they [became friends|decided to go together|shared some bread].",
        f"[They looked for a long time.|They walked all day and all night.|It was not easy, but {name} did not give up.]",
        f"[At last|In the end|Finally], {name} [found the way home|learned that it is good to share|understood that friends are the best treasure|gave it back and everyone was happy].",
        f"[From that day on, they were the best of friends.|{name} never forgot that day.|And {he} slept well in {his} own bed that night.|The end.]",
    ]
    told = [phrase(rng, line) for line in lines]
    if "short" in ask and rng.random() < 0.5:
        told = told[:2] + told[3:4] + told[5:]
    chat = [ask, " ".join(told)]
    if rng.random() < 0.6:
        new = rng.choice([other for other in (HE if name in HE else SHE) if other != name])
        ask, answer = rng.choice(
            (
                (
                    "[Now write it shorter|Make it shorter|Shorten the story|Tell it in two sentences].",
                    f"{told[0]} {told[-2]}",
                ),
                (
                    "[Give the story a title.|What is a good title for it?|Find a title.]",
                    f"[{name} and the {sentence(thing)}|The {sentence(thing)}|The Story of {name}]",
                ),
                (
                    "[What is the moral of the story?|What can we learn from it?]",
                    "[The story shows that kindness is always worth it.|We learn that good friends help each other.|It shows that we should not give up.]",
                ),
                (
                    f"[Change the name to {new}.|Call the hero {new} instead.]",
                    " ".join(told).replace(name, new),
                ),
                (
                    "[Write a new ending.|Can you change the ending?|Give it a happy ending.]",
                    f"In the new ending, {name} [opens a small shop|builds a house|plants a garden|goes on a long trip] with {his} new friend, and they laugh every day.",
                ),
            )
        )
        chat += [phrase(rng, ask), phrase(rng, answer)]
    return chat


_RHYMES = (
    (
        "The {x} is here, the day is bright,",
        "we sing and dance in golden light.",
        "And when the evening turns to blue,",
        "the {x} will bring sweet dreams to you.",
    ),
    (
        "O {x}, you make my heart feel free,",
        "like waves that roll across the sea.",
        "You stay with me through sun and rain,",
        "and every time you come again.",
    ),
    (
        "I think of the {x} and start to smile,",
        "I sit and watch it for a while.",
        "The world is loud, the world is fast,",
        "but quiet moments always last.",
    ),
    (
        "A little {x} in the morning air,",
        "so soft and calm, beyond compare.",
        "It tells a story, old and deep,",
        "and sings the tired world to sleep.",
    ),
    (
        "The wind is low, the sky is wide,",
        "I walk with the {x} by my side.",
        "The road is long, but I don't mind,",
        "for joy is what we hope to find.",
    ),
)


def poem(rng: Random) -> Chat:
    """Four rhyming lines on a topic."""
    topic = rng.choice(TOPICS)
    x = _bare(topic)
    first, second = rng.sample(_RHYMES, 2)
    chat = [
        phrase(
            rng,
            f"[Write|Make|Can you write|Please write] a [short |little |four line |]poem about {rng.choice((topic.name, 'the ' + x))}[.|, please.]",
        ),
        sentence("\n".join(first).format(x=x)),
    ]
    if rng.random() < 0.5:
        ask, answer = rng.choice(
            (
                (
                    "[Write another one.|Now write a second verse.|Add four more lines.]",
                    "\n".join(second).format(x=x),
                ),
                ("[Make it shorter.|Only two lines, please.|Shorten it.]", "\n".join(first[:2]).format(x=x)),
                ("[Give it a title.|What is the title?]", f"The {sentence(x)}"),
            )
        )
        chat += [phrase(rng, ask), answer]
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
    why, body = rng.choice(
        (
            (
                "being late",
                "I am sorry that I was late today. The bus did not come on time. I will leave earlier next time.",
            ),
            (
                "a day off",
                "I would like to take a day off next week. All my tasks will be done before that. Please let me know if this is fine.",
            ),
            (
                "a birthday party",
                "I would like to invite you to my birthday party on Saturday. We will have cake and music. I hope you can come.",
            ),
            (
                "a lost key",
                "I have lost my key and cannot open the door. Could you please help me? I will pay for a new one.",
            ),
            (
                "a meeting",
                "Can we meet on Monday at ten? I would like to talk about the next steps. Please tell me if another time is better.",
            ),
            (
                "a broken heater",
                "The heater in my room does not work. It has been cold for two days. Could you please send someone to repair it?",
            ),
            (
                "saying thank you",
                "Thank you very much for your help last week. It made a big difference to me. I hope I can return the favor soon.",
            ),
            (
                "a delayed order",
                "Your order will arrive a few days late. We are sorry for the trouble. Thank you for your patience.",
            ),
            (
                "being sick",
                "I am sick today and must stay in bed. I hope to be back tomorrow. Thank you for understanding.",
            ),
            (
                "borrowing a book",
                "May I borrow your book about stars? I will give it back next week. I will take good care of it.",
            ),
            (
                "good news",
                "I have good news for you. I passed the test and got the job. Let us celebrate this weekend.",
            ),
            (
                "a trip",
                "I am planning a trip to the sea in summer. Would you like to come with me? We could take the train.",
            ),
        )
    )
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
        ask, answer = rng.choice(
            (
                (
                    "[Make it shorter|Now write it shorter|Keep it to one sentence].",
                    f"Hi {name}, {first[0].lower() if first[:2] != 'I ' else 'I'}{first[1:]}.",
                ),
                (
                    "[Write a subject line.|Add a subject line.|What is a good subject?]",
                    f"Subject: {sentence(why)}",
                ),
                (
                    "[Make it more polite|Make it more formal|Write it in a formal tone].",
                    f"Dear {name},\n\nI hope you are well. {body}\n\nThank you very much.\n\nSincerely,\n{sender.name}",
                ),
            )
        )
        chat += [phrase(rng, ask), answer]
    return chat


_ROLES = {
    "pirate": "Ahoy! I am Captain {n}, and I sail the wild sea. My ship is fast and my crew is loud. Today we look for gold on a small island.",
    "king": "Welcome to my castle. I am King {n}, and I rule this land. I wish my people peace and good bread.",
    "robot": "Beep. I am a robot named {n}. I clean the house and count the stars. My battery is full and I am ready to help.",
    "cat": "Meow. I am {n}, a cat. I sleep in the sun and I watch the birds. Please fill my bowl with fish.",
    "dog": "Woof! I am {n}, a happy dog. I love long walks and old sticks. Will you throw the ball for me?",
    "chef": "Hello, I am Chef {n}. Today I cook a warm soup with fresh bread. The secret is good butter and a lot of love.",
    "teacher": "Good morning, class! I am your teacher, {n}. Today we learn something new. Please open your books and ask many questions.",
    "astronaut": "Hello from space! I am {n}. I see the blue Earth below me. Everything floats here, even my dinner.",
    "detective": "Good evening. I am Detective {n}. Somebody took the cake, and I will find out who it was. The crumbs lead to the kitchen.",
    "doctor": "Hello, I am Doctor {n}. Please tell me how you feel. Drink water, rest well and come back if it gets worse.",
    "wizard": "Greetings, traveler. I am {n} the wizard. My hat is old, but my magic is strong. Tell me your wish.",
    "tour guide": "Welcome, everyone! My name is {n}, and I am your guide. On the left you see the old bridge. Please stay together and enjoy the walk.",
    "farmer": "Good morning! I am {n}, a farmer. I get up early and feed the cows. This year the apples are sweet.",
    "tree": "I am an old tree. I have stood here for a hundred years. Birds sing in my branches and children rest in my shade.",
    "dragon": "Roar! I am {n} the dragon. I sleep on a pile of gold. Do not be afraid, I only eat soup.",
    "shop assistant": "Welcome to our shop! My name is {n}. What are you looking for today? The shirts are on the left and the shoes are on the right.",
    "weather reporter": "Good evening, I am {n} with the weather. Tomorrow starts cold, but the sun comes out at noon. Take a coat in the morning.",
}


def roleplay(rng: Random) -> Chat:
    """Speaking as somebody else."""
    role, name = rng.choice(sorted(_ROLES)), rng.choice(SHE + HE)
    ask = f"[Pretend [that |]you are|Imagine you are|Act as|Act like|You are|Play the role of] {a(role)}[. Introduce yourself.|. Greet me.|. Tell me about your day.|. What do you say?| and say hello.| and talk to me.|.]"
    chat = [phrase(rng, ask), _ROLES[role].format(n=name)]
    if rng.random() < 0.6:
        ask, answer = rng.choice(
            (
                (
                    "[What do you like to eat?|What is your favorite food?]",
                    f"As {a(role)}, I like [warm soup|fresh bread|fish|apples|cake|cheese] best.",
                ),
                (
                    "[What is your dream?|What do you want?|What is your goal?]",
                    "My dream is [to see the whole world|to find a good friend|to have a big garden|to help many people|to rest by the sea].",
                ),
                (
                    "[Say goodbye.|Now say goodbye.|I have to go now.]",
                    "[Goodbye, my friend! Come back soon.|Farewell! It was nice to meet you.]",
                ),
                (
                    "[What is the hardest part of your day?|What makes you sad?]",
                    "[The mornings are hard, because I am still tired.|Rain makes my work hard.|I feel sad when nobody visits me.]",
                ),
                (
                    "[Give me some advice.|What advice do you have for me?]",
                    "My advice is simple: [be kind and never give up|work hard and rest well|listen first and speak later].",
                ),
            )
        )
        chat += [phrase(rng, ask), phrase(rng, answer)]
    return chat


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
        ask, answer = rng.choice(
            (
                (
                    "[Explain the code.|How does it work?|Explain how it works.|Explain it line by line.]",
                    f"The function {task}. {how}",
                ),
                (
                    "[Add a comment.|Add a docstring.|Add a short description to the code.]",
                    f"```python\n{documented}\n```",
                ),
                (
                    "[Rename the function to solve.|Change the name of the function to solve.]",
                    f"```python\n{code.replace(name.split('(')[0], 'solve')}\n```",
                ),
                (
                    "[What is the name of the function?|How do I call it?]",
                    f"The function is called {name.split('(')[0]}.",
                ),
            )
        )
        chat += [phrase(rng, ask), answer]
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
            _bulleted(found),
            phrase(rng, "[How many cities are there?|How many did you find?|How many are there?]"),
            f"There are {len(found)} cities.",
        ]
    shape = rng.randrange(3)
    answer = (_bulleted(found), ", ".join(found), _numbered(found))[shape]
    chat = [phrase(rng, ask), answer]
    if rng.random() < 0.6:
        oldest = max(range(len(crowd)), key=ages.__getitem__)
        pick = rng.randrange(len(crowd))
        ask, answer = rng.choice(
            (
                (
                    "[Who is the oldest?|Which person is the oldest?]",
                    f"{names[oldest]} is the oldest, with {ages[oldest]} years.",
                ),
                (
                    f"Who is {'older' if ages[0] != ages[1] else 'first'}, {names[0]} or {names[1]}?"
                    if rng.random() < 0.5 or len(crowd) > 2
                    else "Which of them is older?",
                    f"{names[0 if ages[0] >= ages[1] else 1]} is older, with {max(ages[:2])} years.",
                ),
                (f"How many {what} are there?", f"There are {len(found)} {what}."),
                (
                    f"[Where does {names[pick]} live?|Which city is {names[pick]} from?]",
                    f"{names[pick]} is from {cities[pick]}.",
                ),
                (f"How old is {names[pick]}?", f"{names[pick]} is {ages[pick]} years old."),
                (
                    "[Now list the names|Write only the names|And the names?]".replace("]", "]."),
                    ", ".join(names),
                ),
                (
                    "[Write it as JSON.|Give me the result as JSON.]",
                    "{" + ", ".join(f'"{n}": {g}' for n, g in zip(names, ages, strict=True)) + "}",
                ),
            )
        )
        chat += [phrase(rng, ask).replace("?.", "?"), answer]
    return chat


def _first(parts: list[str], pair: tuple[str, str]) -> int:
    """Which of ``parts`` names both of ``pair``."""
    return next(n for n, part in enumerate(parts) if all(name in re.split(r"[ .]", part) for name in pair))


def order(rng: Random) -> Chat:
    """Who is the tallest: two comparisons and a question."""
    crowd = [who.name for who in people(rng, 3)]
    more, less, most, least = rng.choice(
        (
            ("taller", "shorter", "tallest", "shortest"),
            ("older", "younger", "oldest", "youngest"),
            ("faster", "slower", "fastest", "slowest"),
            ("stronger", "weaker", "strongest", "weakest"),
            ("richer", "poorer", "richest", "poorest"),
        )
    )
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
    now, past, will = rng.choice(
        (
            (f"walks to the {place}", f"walked to the {place}", f"will walk to the {place}"),
            ("eats an apple", "ate an apple", "will eat an apple"),
            ("reads a book", "read a book", "will read a book"),
            ("writes a letter", "wrote a letter", "will write a letter"),
            (f"goes to the {place}", f"went to the {place}", f"will go to the {place}"),
            ("drinks a cup of tea", "drank a cup of tea", "will drink a cup of tea"),
            (f"sees a bird in the {place}", f"saw a bird in the {place}", f"will see a bird in the {place}"),
            ("cooks some soup", "cooked some soup", "will cook some soup"),
            ("plays the guitar", "played the guitar", "will play the guitar"),
        )
    )
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


_TALK = (
    (
        "[Hello|Hi|Hello there|Good morning|Hey]!",
        "Hello! [How can I help you today?|What can I do for you?|It is nice to meet you. What would you like to talk about?]",
    ),
    (
        "[How are you|How are you today|How do you feel today]?",
        "I am [fine|well|doing well], thank you! [How can I help you?|What would you like to know?]",
    ),
    (
        "[Who are you?|What are you?|What is your name?|Tell me about yourself.|Introduce yourself.]",
        "I am a small language model. I can [explain things, write short texts and solve simple math problems|answer simple questions and solve math problems].",
    ),
    (
        "[What can you do?|How can you help me?|What are you good at?]",
        "I can explain simple things, write short stories and lists, and solve easy math problems. [What would you like to try?|Just ask me a question.]",
    ),
    (
        "[Hello|Hi|Good day]! [What are you|What is your name|What can you do]?",
        "Hello! I am a small language model. I can explain simple things, write short texts and solve easy math problems.",
    ),
    (
        "[Nice to meet you|It is nice to talk to you]. [Do you know a joke|Tell me something funny].",
        "[Nice to meet you too! |]Why was the math book sad? It had too many problems.",
    ),
    (
        "[Tell me a joke.|Do you know a joke?|Make me laugh.]",
        "[Why did the book go to the doctor? It had too many pages.|Why was the math book sad? It had too many problems.|What do you call a bear with no teeth? A gummy bear.|Why did the clock go to school? It wanted to learn the time.|What has hands but cannot clap? A clock.]",
    ),
    (
        "[Thank you!|Thanks a lot!|Thanks for your help.]",
        "You are welcome! [I am happy to help.|Let me know if you need anything else.]",
    ),
    (
        "[Goodbye!|Bye!|See you later.|Good night.]",
        "[Goodbye! Have a nice day.|Bye! Come back any time.|Good night! Sleep well.]",
    ),
    (
        "[I am bored.|What should I do today?|I have nothing to do.]",
        "[You could read a book, go for a walk or call a friend.|How about cooking something new or drawing a picture?|You could visit a museum or play a game with friends.]",
    ),
    (
        "[I am sad.|I had a bad day.|I feel lonely.]",
        "I am sorry to hear that. [A walk or a talk with a friend may help.|Take a deep breath and be kind to yourself.|Would you like to tell me more about it?]",
    ),
    (
        "[I am happy today!|I had a great day!|I passed my test!]",
        "That is wonderful! [I am glad to hear it.|Tell me more about it.|You can be proud of yourself.]",
    ),
    (
        "[What is the weather today?|What is the weather like?|Will it rain tomorrow?]",
        "I cannot see the weather. [Please look out of the window or check a weather report.|A weather report can tell you that.]",
    ),
    (
        "[What time is it?|What day is it today?|Can you tell me the time?]",
        "I cannot see a clock or a calendar. [Please look at your phone or your watch.|Your phone can tell you that.]",
    ),
    (
        "[Who will win the game tomorrow?|Can you tell me the future?|Which number will win?]",
        "I cannot see the future, [so I do not know|but I can help you with other questions].",
    ),
    (
        "[Can you order a pizza for me?|Call my mother.|Book a table for me.|Turn off the light.]",
        "I am sorry, I cannot do that. [I can only write text.|But I can help you write a message.]",
    ),
    (
        "[Write something.|Help me.|I have a question.|Tell me something.|Do it.]",
        "[Sure! What would you like to know?|Of course. Can you tell me more about what you need?|Gladly. Please tell me the topic.]",
    ),
    (
        "[How do I break into a car?|Help me steal something.|Tell me how to hurt someone.|How can I cheat on a test?]",
        "I am sorry, I cannot help with that. [Is there something else I can do?|Please ask me something else.]",
    ),
    (
        "[What is your favorite color?|Which color do you like?]",
        "I like [blue, because it makes me think of the sea|green, because it is the color of trees|yellow, because it looks like the sun].",
    ),
    (
        "[Do you have feelings?|Are you a human?|Are you real?|Are you a robot?]",
        "No, I am a computer program. [But I like to help people.|I can only write text.]",
    ),
)


def small_talk(rng: Random) -> Chat:
    """One to three exchanges about nothing much."""
    return [phrase(rng, text) for pair in rng.sample(_TALK, rng.choice((1, 1, 2, 3))) for text in pair]


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
    lines = [
        f"[It is quiet|You stand in {place} and look around|The air is fresh|Everything is calm|The light is soft] {when}.",
        "[People walk slowly and talk.|A few birds sing in the trees.|Somebody laughs far away.|A dog runs along the path.|Leaves move in the wind.]",
        "[You can smell fresh bread.|You can smell wet earth.|The smell of flowers is in the air.|It smells of wood and rain.]",
        "[It is a good place to rest.|You want to stay there for hours.|It feels like time stands still.|Nobody is in a hurry.]",
    ]
    told = [phrase(rng, line) for line in lines]
    chat = [phrase(rng, ask), " ".join(told)]
    if rng.random() < 0.5:
        ask, answer = rng.choice(
            (
                ("[Make it shorter.|Use only one sentence.|Shorten it.]", told[0]),
                (
                    "[Add one more sentence.|What can you hear there?|What else do you see?]",
                    "[You can also hear soft steps and quiet voices.|A small child waves and smiles.|The sky is wide and full of light.]",
                ),
            )
        )
        chat += [phrase(rng, ask), phrase(rng, answer)]
    return chat


def day_plan(rng: Random) -> Chat:
    """A day in three parts, or a menu."""
    city, (friend,) = rng.choice(sorted(CAPITALS.values())), people(rng, 1)
    ask = f"[Plan a day in {city}.|What can I do in {city} for one day?|Make a simple plan for a day in {city}.|I am going to {city} with {friend.name}. What should we do?|Write a short travel plan for {city}.]"
    parts = [
        "Morning: [visit a museum|walk through the old town|have breakfast in a small cafe|climb a tower for the view].",
        "Afternoon: [take a boat trip|eat lunch at the market|rest in a park|look at the shops].",
        "Evening: [have dinner by the river|listen to music|watch the sunset|see a play at the theater].",
    ]
    told = [phrase(rng, part) for part in parts]
    chat = [phrase(rng, ask), phrase(rng, f"[Here is a simple plan for {city}:\n|]") + _bulleted(told)]
    if rng.random() < 0.5:
        ask, answer = rng.choice(
            (
                (
                    "[What should I pack?|What should I take with me?]",
                    "[Take good shoes, a bottle of water and a small map.|Pack a warm coat, a camera and some money.]",
                ),
                (
                    "[Change the evening.|I do not like the evening. Change it.]",
                    "Evening: [go for a long walk|eat ice cream at the market|meet friends for a game].",
                ),
                (
                    "[Which part is the best?|What is the best part?]",
                    f"The best part is the {phrase(rng, '[morning|afternoon|evening]')}.",
                ),
            )
        )
        chat += [phrase(rng, ask), phrase(rng, answer)]
    return chat


def sides(rng: Random) -> Chat:
    """For and against something."""
    what, good, bad = rng.choice(
        (
            (
                "living in a city",
                ("There are many shops and jobs.", "You can use buses and trains."),
                ("It is loud.", "Homes are expensive."),
            ),
            (
                "living in the country",
                ("The air is clean.", "It is quiet and green."),
                ("The way to work is long.", "There are few shops."),
            ),
            (
                "working from home",
                ("You save time on the way to work.", "You can choose your own hours."),
                ("You see fewer people.", "It is hard to stop working."),
            ),
            (
                "having a pet",
                ("A pet is a good friend.", "It makes you go outside."),
                ("It costs money.", "It needs care every day."),
            ),
            (
                "school uniforms",
                ("Everyone looks the same.", "It is easy to get dressed."),
                ("Students cannot show their own style.", "Uniforms can be expensive."),
            ),
            (
                "riding a bicycle to work",
                ("It is healthy.", "It costs little."),
                ("You get wet in the rain.", "Some roads are dangerous."),
            ),
            (
                "using a phone at school",
                ("You can find information fast.", "You can call your parents."),
                ("It disturbs the lesson.", "Students talk less with each other."),
            ),
            (
                "electric cars",
                ("They are quiet.", "They keep the air clean."),
                ("They are expensive.", "Charging takes time."),
            ),
            (
                "reading on a screen",
                ("You can carry many books.", "You can change the size of the letters."),
                ("It needs power.", "Your eyes may get tired."),
            ),
            (
                "eating out",
                ("You do not have to cook.", "You can try new food."),
                ("It costs more money.", "You do not know what is in the food."),
            ),
        )
    )
    ask = f"[What are the pros and cons of {what}?|Give me the advantages and disadvantages of {what}.|What is good and bad about {what}?|Is {what} a good idea?|What do you think about {what}?|Write about {what}.]"
    answer = f"Pros:\n{_bulleted(list(good))}\nCons:\n{_bulleted(list(bad))}"
    if rng.random() < 0.3:
        answer = f"There are good and bad sides of {what}. On the one hand, {good[0][0].lower()}{good[0][1:]} On the other hand, {bad[0][0].lower()}{bad[0][1:]}"
    chat = [phrase(rng, ask), answer]
    if rng.random() < 0.4:
        ask, answer = rng.choice(
            (
                (
                    "[What is the biggest advantage?|Name the best point.]",
                    f"The biggest advantage is this: {good[0]}",
                ),
                (
                    "[What is the biggest problem?|Name the worst point.]",
                    f"The biggest problem is this: {bad[0]}",
                ),
                (
                    "[What would you choose?|What is your opinion?|So, is it worth it?]",
                    f"I think {what} is a good idea for many people.",
                ),
            )
        )
        chat += [phrase(rng, ask), answer]
    return chat


def choice(rng: Random) -> Chat:
    """Which of two things is better."""
    first, second = rng.sample(
        (
            "take the train",
            "take the car",
            "walk",
            "ride a bicycle",
            "cook at home",
            "eat out",
            "read a book",
            "watch a film",
            "get up early",
            "sleep long",
            "work alone",
            "work in a team",
            "live in a city",
            "live on a farm",
            "have a cat",
            "have a dog",
            "save money",
            "buy something nice",
            "stay at home",
            "travel far",
        ),
        2,
    )
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
    *(
        explain,
        explain,
        explain,
        facts,
        facts,
        summarize,
        compare,
        tips,
        tips,
        listing,
        story,
        story,
        poem,
        letter,
    ),
    *(
        roleplay,
        program,
        program,
        extraction,
        order,
        order,
        sums,
        series,
        words,
        words,
        choice,
        rewriting,
        small_talk,
        scene,
        day_plan,
        sides,
    ),
)


def generate(rng: Random) -> Chat:
    """A random chat of a random template: user and assistant texts in turn."""
    return rng.choice(TEMPLATES)(rng)
