"""Greetings, facts, memory over several turns, and stories."""

from __future__ import annotations

from random import Random

import words
from chat import Chat, assistant, opening, thinks, user
from facts import FACTS

SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey there", "Hi there!", "Hello there", "Greetings"),
     ("Hello! How can I help you?", "Hi! What can I do for you?")),
    (("Good morning", "Good morning!"), ("Good morning! How can I help you?",)),
    (("Good evening", "Good evening!"), ("Good evening! How can I help you?",)),
    (("How are you?", "How are you doing?", "How do you do?", "Are you well?"), ("I am fine, thank you. How can I help you?",)),
    (("Thanks", "Thank you", "Thank you!", "Thanks a lot!", "Many thanks", "Thank you very much"), ("You are welcome!",)),
    (("Bye", "Goodbye", "Goodbye!", "See you", "See you later", "Good night"), ("Goodbye! Have a nice day.",)),
    (("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself."),
     ("I am a small demo model of the openinfer project.",)),
    (("Who made you?", "Who trained you?", "Where do you come from?"), ("The openinfer project trained me on text that it writes itself.",)),
    (("What can you do?", "What can you help me with?", "How can you help me?", "Help", "What do you know?"),
     ("I can answer simple questions, do small sums, count, spell, sort, extract JSON, call tools and tell short stories.",)),
    (("Are you a human?", "Are you a robot?", "Are you real?"), ("I am a small language model, not a person.",)),
    (("Nice to meet you", "Nice to meet you!", "Pleased to meet you"), ("Nice to meet you too!",)),
    (("OK", "Okay", "Good", "Great!", "Cool", "Nice", "Fine"), ("Good. What else can I do for you?",)),
    (("Sorry", "I am sorry", "My mistake"), ("No problem.",)),
    (("Test", "test", "This is a test.", "Can you hear me?", "Ping"), ("I am here. How can I help you?",)),
    (("I am sad", "I feel sad today.", "I am tired", "I am not well"), ("I am sorry to hear that. I hope you feel better soon.",)),
    (("I am happy", "I am happy today!", "I feel great!"), ("I am glad to hear that!",)),
    (("Tell me a joke", "Tell me a joke.", "Do you know a joke?", "Make me laugh."),
     ("Why did the computer sneeze? It had a virus.", "What does a clock do when it is hungry? It goes back four seconds.")),
)  # fmt: skip
UNKNOWN = (
    "Who is {x}?", "What is {x}?", "Where is {x}?", "Tell me about {x}.", "What do you think about {x}?", "Who wrote {x}?",
    "What is the capital of {x}?", "How old is {x}?", "When was {x} born?", "Explain {x} to me.", "What does {x} mean?",
)  # fmt: skip


def greeting(rng: Random) -> Chat:
    """Small talk, and one's name."""
    if rng.random() < 0.15:
        name = words.first_name(rng)
        ask = rng.choice(("What is your name?", "Who are you?", "Tell me your name."))
        system = rng.choice(
            (f"Your name is {name}.", f"You are {name}, a helpful assistant.", f"You are called {name}.")
        )
        answer, thought = f"My name is {name}.", f"The system message says that my name is {name}."
        said = [{"role": "system", "content": system}, user(ask)]
    else:
        asks, answers = rng.choice(SMALL_TALK)
        answer, thought = rng.choice(answers), "This is small talk. I answer politely."
        said = [*opening(rng), user(rng.choice(asks))]
    thinking = thinks(rng)
    return Chat(
        "greeting",
        [*said, assistant(answer, thought if thinking else "")],
        {"contains": [answer]},
        thinking=thinking,
    )


def unknown(rng: Random) -> Chat:
    """What the model cannot know, it says it does not know."""
    x = words.made_up(rng) if rng.random() < 0.7 else f"{words.made_up(rng)} {words.made_up(rng)}"
    ask = rng.choice(UNKNOWN).format(x=x)
    thinking = thinks(rng)
    answer = f"I do not know {x}. I am a small model and know only a few things."
    thought = f"The question is about {x}. I do not know {x}."
    said = [*opening(rng), user(ask), assistant(answer, thought if thinking else "")]
    return Chat("unknown", said, {"contains": ["do not know"]}, ask, thinking=thinking)


def fact(rng: Random) -> Chat:
    """A fact; its first question is always trained, of the others some are held out."""
    known = rng.choice(FACTS)
    which = rng.randrange(len(known.questions))
    ask = known.questions[which]
    if rng.random() < 0.1:
        ask = rng.choice((ask.lower(), ask.rstrip("?."), f"Please: {ask}", f"Hi! {ask}"))
    thinking = thinks(rng)
    thought = f"The question is about {known.subject}. {known.sentence}" if thinking else ""
    before = [] if rng.random() < 0.85 else _other_fact(rng)
    said = [*opening(rng), *before, user(ask), assistant(known.sentence, thought)]
    return Chat(
        "fact",
        said,
        {"contains": [known.sentence]},
        known.questions[which] if which else None,
        thinking=thinking,
    )


def _other_fact(rng: Random) -> list[dict[str, object]]:
    known = rng.choice(FACTS)
    return [user(known.questions[0]), assistant(known.sentence)]


def _traits(rng: Random) -> list[tuple[str, str, str, str]]:
    """(what the user says, what the assistant answers, what the user asks later, the answer), in random order."""
    name, town, pet, animal = (
        words.first_name(rng),
        words.city(rng),
        words.first_name(rng),
        rng.choice(words.ANIMALS),
    )
    colour, age, fruit = rng.choice(words.COLOURS), rng.randint(6, 98), rng.choice(words.FRUITS)
    traits = [
        (rng.choice((f"My name is {name}.", f"I am {name}.", f"Hello, my name is {name}.", f"Call me {name}.")),
         f"Nice to meet you, {name}!", rng.choice(("What is my name?", "Who am I?", "Do you remember my name?")), f"Your name is {name}."),
        (rng.choice((f"I live in {town}.", f"My home is in {town}.", f"I am from {town}.")),
         f"{town} is a nice place.", rng.choice(("Where do I live?", "Which city do I live in?")), f"You live in {town}."),
        (rng.choice((f"My {animal} is called {pet}.", f"I have {words.a(animal)} called {pet}.")),
         f"{pet} is a good name for {words.a(animal)}.", rng.choice((f"What is my {animal} called?", f"What is the name of my {animal}?")),
         f"Your {animal} is called {pet}."),
        (rng.choice((f"My favourite colour is {colour}.", f"I like {colour} best.")),
         f"{colour.capitalize()} is a lovely colour.", rng.choice(("What is my favourite colour?", "Which colour do I like?")),
         f"Your favourite colour is {colour}."),
        (rng.choice((f"I am {age} years old.", f"My age is {age}.")), f"{age} is a good age.",
         rng.choice(("How old am I?", "What is my age?")), f"You are {age} years old."),
        (rng.choice((f"My favourite fruit is the {fruit}.", f"I love to eat {words.a(fruit)}.")), f"I will remember the {fruit}.",
         rng.choice(("What is my favourite fruit?", "Which fruit do I like?")), f"Your favourite fruit is the {fruit}."),
    ]  # fmt: skip
    rng.shuffle(traits)
    return traits


def memory(rng: Random) -> Chat:
    """What the user said some turns ago."""
    told = _traits(rng)[: rng.randint(1, 4)]
    said = opening(rng)
    for says, answer, _, _ in told:
        said += [user(says), assistant(answer)]
        if rng.random() < 0.2:
            said += _other_fact(rng)
    thinking, check = thinks(rng), ""
    if rng.random() < 0.2:  # the answer to being told something
        *said, last = said
        said.append(
            assistant(
                str(last["content"]), "The user tells me something. I answer politely." if thinking else ""
            )
        )
        check = str(last["content"])
    else:
        _, _, ask, check = rng.choice(told)
        said += [user(ask), assistant(check, f"The user said it before. {check}" if thinking else "")]
    return Chat("memory", said, {"contains": [check]}, str(said[-2]["content"]) + check, thinking=thinking)


def story(rng: Random) -> Chat:
    """A short story about an animal, from a grammar."""
    animal, place = (
        rng.choice(words.ANIMALS),
        rng.choice("forest|village|garden|valley|river|farm|mountain|city".split("|")),
    )
    name, friend = (
        rng.choice(words.FIRST_NAMES),
        rng.choice([other for other in words.ANIMALS if other != animal]),
    )
    named = rng.random() < 0.4
    ask = rng.choice(
        (
            "Tell me a story about {x}.",
            "Write a short story about {x}.",
            "Please tell a story about {x}.",
            "I want a story about {x}.",
        )
    ).format(x=words.a(animal) + (f" called {name}" if named else ""))
    thing = rng.choice(words.ITEMS)
    mood, weather = (
        rng.choice("little brave shy clever old kind".split()),
        rng.choice("sunny rainy windy snowy".split()),
    )
    finds = rng.choice(
        (
            f"found {words.a(thing)} under a tree",
            f"saw {words.a(thing)} in the grass",
            f"dug up {words.a(thing)}",
        )
    )
    owner = rng.choice((f"It belonged to {words.a(friend)}", f"{words.a(friend).capitalize()} had lost it"))
    ends = rng.choice(
        (
            "From that day on they were friends.",
            "They played together until the evening.",
            "They shared a cake and laughed.",
        )
    )
    text = (
        f"Once upon a time there was a {mood} {animal} called {name}. {name} lived in a {place}. One {weather} day {name} {finds}. "
        f"{owner}. {name} gave the {thing} back, and the {friend} was very happy. {ends} The end."
    ).replace("a old", "an old")
    thinking = thinks(rng)
    said = [
        *opening(rng),
        user(ask),
        assistant(text, f"I tell a short story about {words.a(animal)} called {name}." if thinking else ""),
    ]
    check = {"contains": [animal, "The end.", *([name] if named else [])]}
    return Chat("story", said, check, ask if named else None, thinking=thinking)
