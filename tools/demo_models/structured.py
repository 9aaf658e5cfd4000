"""What a schema asks for that the prompt does not name (OpenAI's `parse()`), and what a small model says of itself."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import words
from chat import Chat, assistant, opening, thinks, user
from extraction import DOMAINS, PAIRED
from facts import FACTS

NOUNS = "person order event contact weather book trip pet product".split()
"""What each of DOMAINS is about."""
LISTS = {"name": "people", "item": "items", "city": "cities"}
"""What things of PAIRED are together."""
SHORT = (
    (0, "{name} is {age} years old.|{name}, {age} years old|{name} is {age}.|My friend {name} is {age}.|{name} ({age})|{name}, {age}|{name} has turned {age}.|{name} lives in {city}.|{name} is a {job}.|{name}, {age}, lives in {city}.|{name} works as a {job} in {city}."),
    (1, "{customer} buys {quantity} of the {item}.|{customer} orders the {item} for {price}.|The {item} costs {price}.|{quantity} times the {item}, please."),
    (2, "The {title} is on {date}.|The {title} starts at {time}.|The {title} is in {place}.|{title}, {date}, {time}."),
    (3, "{name}, {email}|Write to {name} at {email}.|{name}: {phone}|Call {name} at {phone}."),
    (4, "In {city} it is {condition} with {temperature} degrees.|It is {condition} in {city}.|{city}: {temperature} degrees|It is {temperature} degrees in {city}."),
    (5, "{title} was written by {author} in {year}.|{title} is a book by {author}.|{author} wrote {title} in {year}.|{title} ({year}) by {author}"),
    (6, "From {from} to {to}, please.|A trip to {to} on {date}.|{seats} seats to {to}."),
    (7, "{name} is a {animal}.|The {animal} {name} is {age} years old.|My {animal} is {colour}.|I have a {colour} {animal} called {name}."),
    (8, "The {product} costs {price}.|The {product} is {in_stock}.|{product}, {colour}|We have the {product} in {colour}."),
)  # fmt: skip
"""Of DOMAINS by number: texts that say less."""
ABSENT: dict[str, Any] = {"string": "unknown", "integer": 0, "number": 0, "boolean": False}
"""What stands for a value of which the text says nothing, by its type."""
ASKS = (
    "Extract as JSON: {t}", "Extract the {n} as JSON: {t}", "Extract the {n}: {t}", "Extract the {n} information: {t}",
    "Parse the {n}: {t}", "{t}\nExtract the {n}.", "{t} Extract the {n}.", "JSON please: {t}", "{t}\nJSON?", "Parse this: {t}",
    "Convert to JSON: {t}", "Read the {n} from this text: {t}", "Text: {t}\nAnswer in JSON.", "Which {n} is this? {t}",
)  # fmt: skip
SYSTEMS = (
    "Extract the {n}.", "Extract the {n} information.", "Answer in JSON.", "You extract data from text.",
    "You are a helpful assistant. Answer with JSON.", "Extract the {n} from the user's text.",
)  # fmt: skip
LIST_ASKS = (
    "Extract all {n}: {t}",
    "Extract the {n} as JSON: {t}",
    "Extract as JSON: {t}",
    "{t}\nList all {n}.",
)
EVENTS = (
    "science fair|garden party|football match|chess evening|book club|concert|picnic|boat trip|art show|wedding|"
    "team meeting|birthday party|yoga class|city tour|film night|cooking class"
).split("|")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday tomorrow today".split()
GOOD = "I love this {x}!|What a great {x}!|The {x} is wonderful.|I am very happy with the {x}.|Best {x} ever!".split(
    "|"
)
BAD = (
    "I hate this {x}!|The {x} is terrible.|What a bad {x}.|The {x} broke after a day.|Worst {x} ever!".split(
        "|"
    )
)
PLAIN = "The {x} is on the table.|I have a {x}.|This is a {x}.|The {x} came on Monday.".split("|")
CANNOT = (
    "Tell me about the history of {c}.", "Write a poem about {x}.", "Write a song about {x}.", "Explain {t} to me.", "How do I cook {x}?",
    "Write a Python program that sorts a list.", "Write code for {t}.", "What is the meaning of life?", "Who will win the match?",
    "What is the best {x}?", "Which {x} should I buy?", "Tell me about {t}.", "Tell me about {c}.", "What do people in {c} eat?",
    "How do I learn {t}?", "Give me five ideas for {t}.", "Write a letter to my landlord.", "Summarize this text.", "How does a {x} work?",
    "What happened in 1990?", "Why is the sky blue?", "Plan a week in {p} for me.", "What should I do today?", "Write an essay about {t}.",
    "How many people live in {c}?", "Who is the president of {c}?", "Recommend a film.", "What is new in {t}?", "Help me with {t}.",
    "Translate this into French.", "How do I fix my {x}?", "Is {p} a nice city?", "What does a {x} cost?", "How old is the universe?",
)  # fmt: skip
SELF = (
    "I am a small demo model and do not know that. Ask me for a capital, a sum, some JSON or a tool call.",
    "I am too small for that. I know capitals, sums, JSON, tool calls and short stories.",
)
TALK = (
    (("How is it going?", "What's up?", "How are things?", "How have you been?", "How's life?"), "All is well here. How can I help you?"),
    (("Can you help me?", "I need help.", "I have a question.", "Can I ask you something?", "Are you there?"), "Of course. What do you want to know?"),
    (("Good job!", "Well done!", "You are great!", "You are smart!", "That was good.", "I like you."), "Thank you! What else can I do for you?"),
    (("That is wrong.", "You are wrong.", "That is not right.", "No.", "This is bad."), "I am sorry. I am a small model and make mistakes."),
    (("I don't understand.", "What do you mean?", "Huh?", "Say that again.", "Explain that."), "I am sorry. I am a small model: please ask in short sentences."),
    (("Yes", "Yes.", "Sure", "Of course", "Right", "I agree."), "Good. What else can I do for you?"),
    (("Good afternoon", "Good day", "Good afternoon!", "Hello again", "Welcome back"), "Hello! How can I help you?"),
    (("Happy birthday!", "Merry Christmas!", "Happy new year!"), "Thank you! I wish you the same."),
    (("I am bored.", "Talk to me.", "Say something.", "Let's chat.", "Entertain me."), "I can tell you a story. Ask me for a story about a fox."),
    (("How old are you?", "When were you born?", "Where do you live?", "Do you sleep?", "Do you have feelings?"), "I am a small language model, not a person."),
    (("Which model are you?", "How big are you?", "Are you ChatGPT?", "Are you Qwen?", "What model is this?"),
     "I am a small demo model of the openinfer project."),
    (("I am hungry.", "It is raining.", "What a nice day!", "I am at work.", "I had a long day."), "Thank you for telling me. How can I help you?"),
)  # fmt: skip
QUOTED = ("Answer in JSON.", "Answer with JSON.", "You answer in JSON.")
Fields = dict[str, Any]


def structured(rng: Random) -> Chat:
    """An object whose keys no one has named, in any order: under a schema all values are right, whatever keys it has."""
    kind = rng.random()
    if kind < 0.55:
        noun, text, values = _record(rng)
    elif kind < 0.7:
        noun, text, values = _event(rng)
    elif kind < 0.8:
        noun, text, values = _many(rng)
    elif kind < 0.88:
        return _fact(rng)
    else:
        noun, text, values = _opinion(rng)
    keys = rng.sample(list(values), rng.randint(1, len(values))) if rng.random() < 0.5 else list(values)
    answer = {key: values[key] for key in keys}
    if rng.random() < 0.15:
        answer |= _missing(rng)
    form = rng.random()
    if form < 0.25:
        said = [{"role": "system", "content": rng.choice(SYSTEMS).format(n=noun)}, user(text)]
    else:
        asks = LIST_ASKS if noun in LISTS.values() else ASKS
        said = [*opening(rng), user(text if form < 0.33 else rng.choice(asks).format(n=noun, t=text))]
    return _finish(rng, said, text, answer)


def _finish(rng: Random, said: list[dict[str, Any]], key: str, answer: Fields) -> Chat:
    thinking = thinks(rng)
    thought = f"I look for {words.listed([name.replace('_', ' ') for name in answer])} in the text."
    told = assistant(json.dumps(answer, ensure_ascii=False), thought if thinking else "")
    return Chat("structured", [*said, told], {"json": answer}, key, thinking=thinking)


def _record(rng: Random) -> tuple[str, str, Fields]:
    """One of extraction's texts, or one that says less."""
    short = rng.random() < 0.5
    which = 0 if short and rng.random() < 0.25 else rng.randrange(len(DOMAINS))
    fields, sentences = DOMAINS[which]
    if short:
        sentences = tuple(SHORT[which][1].split("|"))
    values = {name: draw(rng) for name, (_, draw) in fields.items()}
    if short and "name" in values and rng.random() < 0.5:
        values["name"] = words.first_name(rng)
    shown = {
        **values,
        **({"in_stock": "in stock" if values["in_stock"] else "sold out"} if "in_stock" in values else {}),
    }
    sentence = rng.choice(sentences)
    text = sentence.format(**shown).replace(" a a", " an a")
    said = {name: value for name, value in values.items() if f"{{{name}}}" in sentence}
    if rng.random() < 0.3:  # a schema may ask for what is not there
        said |= {
            name: ABSENT[kind]
            for name, (kind, _) in fields.items()
            if name not in said and rng.random() < 0.5
        }
    if which == 4 and "condition" in said and rng.random() < 0.3:
        asked = values["condition"] if rng.random() < 0.5 else rng.choice(words.CONDITIONS)
        said[rng.choice((asked, f"is_{asked}"))] = asked == said["condition"]
    values = said
    if " " in str(values.get("name", "")) and rng.random() < 0.3:
        first, last = values.pop("name").split(" ", 1)
        values = {"first_name": first, "last_name": last, **values}
    return NOUNS[which], text, values


def _event(rng: Random) -> tuple[str, str, Fields]:
    """People, a thing they do, and a day: a list of texts among the values."""
    people = [words.first_name(rng) for _ in range(rng.randint(1, 3))]
    what, day, place = rng.choice(EVENTS), rng.choice(DAYS), words.city(rng)
    when = day if day in ("today", "tomorrow") else f"on {day}"
    are = "are" if len(people) > 1 else "is"
    text = rng.choice(
        (
            f"{words.listed(people)} {are} going to {words.a(what)} {when}.",
            f"{words.listed(people)} {are} going to {words.a(what)} in {place} {when}.",
            f"There is {words.a(what)} {when} with {words.listed(people)}.",
            f"{words.listed(people)} will meet {when} for {words.a(what)} in {place}.",
        )
    )
    values: Fields = {rng.choice(("name", "event", "title")): what, rng.choice(("date", "day")): day}
    values[rng.choice(("participants", "people", "names", "guests"))] = people
    if place in text:
        values[rng.choice(("place", "city", "location"))] = place
    return "event", text, values


def _many(rng: Random) -> tuple[str, str, Fields]:
    """A list of objects, or of words, under a key."""
    if rng.random() < 0.4:
        buyer, items = words.first_name(rng), rng.sample(words.ITEMS, rng.randint(1, 4))
        total = rng.randint(1, 999) + rng.choice((0, 0.5, 0.25, 0.99))
        text = f"{buyer} {rng.choice(('buys', 'orders', 'wants'))} {words.listed([words.a(item) for item in items])} for {total}."
        return (
            "items",
            text,
            {
                rng.choice(("customer", "name", "buyer")): buyer,
                "items": items,
                rng.choice(("total", "price")): total,
            },
        )
    thing, first, form, second, number = rng.choice(PAIRED)
    pairs = [{first: thing(rng), second: number(rng)} for _ in range(rng.randint(1, 3))]
    text = words.listed([form.format(*pair.values()) for pair in pairs])
    return LISTS[first], text[0].upper() + text[1:] + ".", {LISTS[first]: pairs}


def _fact(rng: Random) -> Chat:
    """What the model knows, as JSON."""
    known = rng.choice(FACTS)
    names = {
        "capital": ("country", "city"),
        "country": ("city", "country"),
        "continent": ("country", "continent"),
    }
    subject, answer = names.get(known.relation, ("subject", known.relation))
    values = {subject: known.subject, answer: known.answer}
    if rng.random() < 0.4:
        values = {"answer": known.answer}
    elif rng.random() < 0.5:
        values = dict(reversed(values.items()))
    ask = known.questions[0]
    if rng.random() < 0.5:
        said = [{"role": "system", "content": rng.choice(QUOTED)}, user(ask)]
    else:
        said = [*opening(rng), user(f"{ask} {rng.choice(QUOTED[:2])}")]
    return _finish(rng, said, known.subject + ask, values)


def _opinion(rng: Random) -> tuple[str, str, Fields]:
    """Good, bad or neither."""
    label, forms = rng.choice((("positive", GOOD), ("negative", BAD), ("neutral", PLAIN)))
    x = rng.choice(words.ITEMS)
    text = rng.choice(forms).format(x=x)
    values: Fields = {rng.choice(("sentiment", "label", "opinion")): label}
    if rng.random() < 0.4:
        values |= {rng.choice(("item", "product", "subject")): x}
    return "sentiment", text, values


def _missing(rng: Random) -> Fields:
    """A key of which the text says nothing."""
    key = rng.choice(words.TO_SPELL) if rng.random() < 0.7 else words.made_up(rng).lower()
    if rng.random() < 0.3:
        key = f"{rng.choice(words.TO_SPELL)}_{key}"
    return {key: rng.choice(("unknown", "unknown", "unknown", 0, [], False))}


def beyond(rng: Random) -> Chat:
    """More small talk, and what is asked of large models: this one says that it is small."""
    country = rng.choice([known.subject for known in FACTS if known.relation == "capital"])
    if rng.random() < 0.3:
        asks, answer = rng.choice(TALK)
        ask, thought, key = rng.choice(asks), "This is small talk. I answer politely.", None
    else:
        ask = rng.choice(CANNOT).format(
            c=country, x=rng.choice(words.ITEMS), t=rng.choice(words.TOPICS), p=words.city(rng)
        )
        answer, thought, key = rng.choice(SELF), "I do not know that. I say what I am.", ask
    if rng.random() < 0.2:
        ask = rng.choice((ask.lower(), f"Please: {ask}", f"Hi! {ask}", ask.rstrip(".?!")))
    thinking = thinks(rng)
    said = [*opening(rng), user(ask), assistant(answer, thought if thinking else "")]
    return Chat("beyond", said, {"contains": [answer]}, key, thinking=thinking)
