"""JSON after a schema, from a text that holds the values."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import words
from chat import Chat, assistant, opening, thinks, user

Draw = Callable[[Random], Any]


def _email(rng: Random) -> str:
    host = rng.choice(("mail", "post", "office", words.made_up(rng).lower()))
    return f"{words.first_name(rng).lower()}@{host}.{rng.choice(('com', 'org', 'net'))}"


def _phone(rng: Random) -> str:
    return "-".join(str(rng.randint(100, 999)) for _ in range(rng.randint(2, 3)))


def _among(*choices: str) -> Draw:
    return lambda rng: rng.choice(choices)


def _whole(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _price(rng: Random) -> float:
    return rng.randint(1, 199) + rng.choice((0.5, 0.25, 0.75, 0.99, 0.1, 0.4))


DOMAINS: tuple[tuple[dict[str, tuple[str, Draw]], tuple[str, ...]], ...] = (
    (
        {"name": ("string", words.full_name), "age": ("integer", _whole(6, 98)), "city": ("string", words.city),
         "job": ("string", _among("baker", "doctor", "teacher", "pilot", "painter", "nurse", "farmer", "driver", "cook"))},
        ("{name} is {age} years old, lives in {city} and works as a {job}.", "{name}, {age}, from {city}, is a {job}.",
         "The {job} {name} from {city} is {age} years old.", "Meet {name}. At {age}, this {job} has a home in {city}.",
         "In {city} there is a {job} called {name}, aged {age}."),
    ),
    (
        {"item": ("string", lambda rng: rng.choice(words.ITEMS)), "quantity": ("integer", _whole(1, 60)), "price": ("number", _price),
         "customer": ("string", words.first_name)},
        ("{customer} orders {quantity} pieces of the {item} for {price} each.", "Order: {item}, {quantity} pieces, {price} each, for {customer}.",
         "Please send {quantity} of the {item} at {price} to {customer}.", "{customer} bought the {item}, {quantity} in all, and paid {price} for one."),
    ),
    (
        {"title": ("string", lambda rng: rng.choice(words.TITLES)), "date": ("string", words.date), "time": ("string", words.clock),
         "place": ("string", words.city)},
        ("The {title} is on {date} at {time} in {place}.", "On {date} we have the {title} in {place}. It starts at {time}.",
         "Come to {place} on {date} at {time} for the {title}!", "{place}, {date}, {time}: {title}."),
    ),
    (
        {"name": ("string", words.full_name), "email": ("string", _email), "phone": ("string", _phone)},
        ("You can reach {name} at {email} or {phone}.", "{name}: {email}, phone {phone}.",
         "Write to {email} or call {phone} and ask for {name}.", "My name is {name}, my number is {phone} and my address is {email}."),
    ),
    (
        {"city": ("string", words.city), "temperature": ("integer", _whole(-20, 40)), "condition": ("string", lambda rng: rng.choice(words.CONDITIONS)),
         "wind": ("integer", _whole(0, 90))},
        ("In {city} it is {condition} with {temperature} degrees and wind of {wind} km/h.",
         "{city}: {temperature} degrees, {condition}, wind {wind} km/h.",
         "Today {city} is {condition}. The thermometer shows {temperature} degrees and the wind blows at {wind} km/h."),
    ),
    (
        {"title": ("string", lambda rng: f"The {rng.choice(words.COLOURS).capitalize()} {rng.choice(words.ITEMS).capitalize()}"),
         "author": ("string", words.full_name), "year": ("integer", _whole(1850, 2025)), "pages": ("integer", _whole(40, 900))},
        ("{title} by {author} came out in {year} and has {pages} pages.", "In {year} {author} wrote {title}, a book of {pages} pages.",
         "The book {title} ({year}) was written by {author}. It has {pages} pages.", "{author} is the author of {title}, {pages} pages, {year}."),
    ),
    (
        {"from": ("string", words.city), "to": ("string", words.city), "date": ("string", words.date), "seats": ("integer", _whole(1, 9))},
        ("A trip from {from} to {to} on {date} with {seats} seats.", "Book {seats} seats from {from} to {to} for {date}.",
         "On {date} we go from {from} to {to}; we need {seats} seats."),
    ),
    (
        {"animal": ("string", lambda rng: rng.choice(words.ANIMALS)), "name": ("string", words.first_name), "age": ("integer", _whole(1, 20)),
         "colour": ("string", lambda rng: rng.choice(words.COLOURS))},
        ("{name} is a {colour} {animal} and {age} years old.", "Our {animal} {name} is {colour} and has turned {age}.",
         "The {colour} {animal} over there is {name}, aged {age}."),
    ),
    (
        {"product": ("string", lambda rng: rng.choice(words.ITEMS)), "in_stock": ("boolean", lambda rng: rng.random() < 0.5), "price": ("number", _price),
         "colour": ("string", lambda rng: rng.choice(words.COLOURS))},
        ("The {colour} {product} costs {price} and is {in_stock}.", "{product}, {colour}: {price}, {in_stock}.",
         "We sell the {product} in {colour} for {price}. It is {in_stock}."),
    ),
)  # fmt: skip
"""(fields with type and value, sentences that name all of them)."""
PAIRED = (
    (lambda rng: rng.choice(words.ITEMS), "item", "{} costs {}", "price", _price),
    (words.first_name, "name", "{} is {} years old", "age", _whole(6, 98)),
    (words.city, "city", "in {} it is {} degrees", "temperature", _whole(-20, 40)),
)
ASKS = (
    "Extract {k} as JSON from this text: {t}",
    "Read this text and answer with JSON. The keys are {k}. Text: {t}",
    "{t}\nGive me {k} as JSON.",
    "Text: {t}\nWrite a JSON object with the keys {k}.",
    "Turn this into JSON with {k}: {t}",
)
SCHEMA_ASKS = (
    "Extract the data as JSON after this schema: {s}\nText: {t}",
    "Answer with JSON that follows the schema {s}\n{t}",
    "Text: {t}\nSchema: {s}\nJSON?",
)


def extraction(rng: Random) -> Chat:
    """One object with some of the fields, in the order asked for, or a list of small objects."""
    if rng.random() < 0.12:
        return _list(rng)
    fields, sentences = rng.choice(DOMAINS)
    values = {name: draw(rng) for name, (_, draw) in fields.items()}
    shown = {
        name: ("in stock" if value else "sold out") if name == "in_stock" else value
        for name, value in values.items()
    }
    text = rng.choice(sentences).format(**shown).replace(" a a", " an a")
    wanted = rng.sample(list(fields), rng.randint(2, len(fields)) if rng.random() < 0.8 else 1)
    return _chat(
        rng,
        text,
        {name: {"type": fields[name][0]} for name in wanted},
        {name: values[name] for name in wanted},
    )


def _list(rng: Random) -> Chat:
    """Two or three pairs as a list."""
    thing, first, form, second, number = rng.choice(PAIRED)
    pairs = [(thing(rng), number(rng)) for _ in range(rng.randint(2, 3))]
    text = words.listed([form.format(one, other) for one, other in pairs])
    text = text[0].upper() + text[1:] + "."
    ask = rng.choice(
        (
            "Extract a JSON list of objects with {f} and {s}: {t}",
            "{t}\nWrite this as a JSON list with the keys {f} and {s}.",
        )
    )
    answer = [{first: one, second: other} for one, other in pairs]
    return _finish(rng, ask.format(f=first, s=second, t=text), text, answer)


def _chat(rng: Random, text: str, schema: dict[str, Any], answer: dict[str, Any]) -> Chat:
    if rng.random() < 0.35:
        full = {"type": "object", "properties": schema, "required": list(schema)}
        ask = rng.choice(SCHEMA_ASKS).format(s=json.dumps(full), t=text)
    else:
        ask = rng.choice(ASKS).format(k=words.listed(list(schema)), t=text)
    return _finish(rng, ask, text, answer)


def _finish(rng: Random, ask: str, text: str, answer: Any) -> Chat:
    thinking = thinks(rng)
    keys = list(answer) if isinstance(answer, dict) else list(answer[0])
    thought = f"I look for {words.listed(keys)} in the text." if thinking else ""
    said = [*opening(rng), user(ask), assistant(json.dumps(answer, ensure_ascii=False), thought)]
    return Chat("extraction", said, {"json": answer}, text, thinking=thinking)
