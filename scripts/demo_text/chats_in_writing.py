# ruff: noqa: E501 (a phrase stays on one line)
"""Chats that tell, describe, plan and talk: stories, poems, letters, roles, small talk."""

from random import Random

from demo_text.phrases import (
    CAPITALS,
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
    people,
    phrase,
    sentence,
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


def roleplay(rng: Random) -> Chat:
    """Role play."""
    role, name = rng.choice(sorted(ROLES)), rng.choice(SHE + HE)
    ask = f"[Pretend [that |]you are|Imagine you are|Act as|Act like|You are|Play the role of] {a(role)}[. Introduce yourself.|. Greet me.|. Tell me about your day.|. What do you say?| and say hello.| and talk to me.|.]"
    chat = [phrase(rng, ask), ROLES[role].format(n=name)]
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
    chat = [phrase(rng, ask), phrase(rng, f"[Here is a simple plan for {city}:\n|]") + bulleted(told)]
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
    what, good, bad = rng.choice(SIDES)
    ask = f"[What are the pros and cons of {what}?|Give me the advantages and disadvantages of {what}.|What is good and bad about {what}?|Is {what} a good idea?|What do you think about {what}?|Write about {what}.]"
    answer = f"Pros:\n{bulleted(list(good))}\nCons:\n{bulleted(list(bad))}"
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
