"""The tools that the demo models are trained with: several names each, so that the schema has to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import words

Draw = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter: its possible names, JSON type, what it is, and a value. `always`: required."""

    names: tuple[str, ...]
    kind: str
    about: str
    draw: Draw
    enum: tuple[str, ...] = ()
    always: bool = True


@dataclass(frozen=True, slots=True)
class Use:
    """A question that needs the tool, the schema offered and the right call; `values` by the parameter's first name."""

    ask: str
    schema: dict[str, Any]
    call: dict[str, Any]
    values: dict[str, Any]
    names: dict[str, str]


@dataclass(frozen=True, slots=True)
class Tool:
    """`do`: what the user wants. asks mention {first name of a parameter}; those of optional parameters only where they
    are in the call. `answer` mentions parameters and the fields of `returns`. `repeat`: the parameter that differs when
    two are asked for at once."""

    names: tuple[str, ...]
    about: str
    do: str
    params: tuple[Param, ...]
    asks: tuple[str, ...]
    returns: dict[str, Draw]
    answer: str
    repeat: str = ""

    def use(self, rng: Random) -> Use:
        """A question and its call, with names drawn for the tool and the parameters."""
        ask = rng.choice(self.asks)
        values = {p.names[0]: p.draw(rng) for p in self.params if "{" + p.names[0] + "}" in ask}
        names = {p.names[0]: rng.choice(p.names) for p in self.params}
        properties: dict[str, Any] = {}
        for p in self.params:
            properties[names[p.names[0]]] = {"type": p.kind, "description": p.about} | (
                {"enum": list(p.enum)} if p.enum else {}
            )
        required = [names[p.names[0]] for p in self.params if p.always]
        schema = {
            "name": rng.choice(self.names), "description": self.about,
            "parameters": {"type": "object", "properties": properties, "required": required},
        }  # fmt: skip
        return self._filled(ask, schema, values, names)

    def again(self, rng: Random, use: Use) -> Use:
        """The same with another value of the parameter that repeats."""
        draw = next(p.draw for p in self.params if p.names[0] == self.repeat)
        values = dict(use.values)
        while values[self.repeat] == use.values[self.repeat]:
            values[self.repeat] = draw(rng)
        return self._filled(use.ask, use.schema, values, use.names)

    def ask_both(self, rng: Random, uses: list[Use]) -> str:
        """One question for both."""
        both = words.listed([str(use.values[self.repeat]) for use in uses])
        return uses[0].ask.replace(str(uses[0].values[self.repeat]), both)

    def result(self, rng: Random, use: Use) -> tuple[dict[str, Any], str]:
        """What the tool returns, and the answer in words."""
        returned = {name: draw(rng) for name, draw in self.returns.items()}
        return returned, self.answer.format(**use.values, **returned)

    def _filled(self, ask: str, schema: dict[str, Any], values: dict[str, Any], names: dict[str, str]) -> Use:
        arguments = {names[name]: values[name] for name in names if name in values}
        text = ask.format(**values) if "{" in ask else ask
        return Use(text, schema, {"name": schema["name"], "arguments": arguments}, values, names)


def _whole(low: int, high: int) -> Draw:
    return lambda rng: rng.randint(low, high)


def _one(options: list[str] | tuple[str, ...]) -> Draw:
    return lambda rng: rng.choice(options)


CITY = Param(("city", "location", "place", "town"), "string", "The name of the city", words.city)
TOOLS: tuple[Tool, ...] = (
    Tool(("get_weather", "weather", "get_current_weather", "weather_lookup"), "Get the current weather of a city", "look up the weather",
         (CITY, Param(("unit", "units"), "string", "The unit of temperature", _one(("celsius", "fahrenheit")), ("celsius", "fahrenheit"), False)),
         ("What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?", "Tell me the weather in {city}.",
          "What is the weather like in {city} today?", "What is the weather in {city} in {unit}?", "Is it warm in {city}? Use {unit}."),
         {"temperature": _whole(-20, 40), "condition": _one(words.CONDITIONS)}, "It is {condition} in {city} with {temperature} degrees.", "city"),
    Tool(("get_time", "current_time", "time_in_city", "local_time"), "Get the local time of a city", "look up the time", (CITY,),
         ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?", "Current time in {city}?"),
         {"time": words.clock}, "It is {time} in {city}.", "city"),
    Tool(("convert_currency", "exchange", "currency_converter"), "Convert an amount of money to another currency", "convert money",
         (Param(("amount", "value"), "number", "The amount of money", _whole(1, 999)),
          Param(("source", "from_currency", "from"), "string", "The currency that one has", _one(words.CURRENCIES)),
          Param(("target", "to_currency", "to"), "string", "The currency that one wants", _one(words.CURRENCIES))),
         ("Convert {amount} {source} to {target}.", "How much is {amount} {source} in {target}?", "Change {amount} {source} into {target}, please."),
         {"result": _whole(1, 9999)}, "{amount} {source} are {result} {target}."),
    Tool(("send_email", "send_mail", "email"), "Send an email", "send an email",
         (Param(("to", "recipient", "address"), "string", "Who gets the email", words.first_name), Param(("subject", "title"), "string", "The subject line", _one(words.TITLES))),
         ("Send an email to {to} about the {subject}.", "Write {to} an email with the subject {subject}.", "Email {to} about the {subject}."),
         {"status": _one(("sent",))}, "The email to {to} is {status}."),
    Tool(("create_event", "add_event", "calendar_add"), "Add an event to the calendar", "add an event to the calendar",
         (Param(("title", "name", "event"), "string", "What the event is", _one(words.TITLES)), Param(("date", "day"), "string", "The day as YYYY-MM-DD", words.date),
          Param(("time", "start"), "string", "The time as HH:MM", words.clock, (), False)),
         ("Put the {title} on {date} in my calendar.", "Add the {title} on {date} at {time}.", "Plan the {title} for {date} at {time}.", "I have a {title} on {date}. Add it to the calendar."),
         {"id": _whole(100, 999)}, "The {title} is in your calendar, number {id}."),
    Tool(("set_timer", "start_timer", "timer"), "Start a timer", "set a timer", (Param(("minutes", "duration"), "integer", "How many minutes", _whole(1, 90)),),
         ("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Wake me in {minutes} minutes.", "Timer, {minutes} minutes."),
         {"ends_at": words.clock}, "The timer ends at {ends_at}."),
    Tool(("search_web", "web_search", "search"), "Search the web", "search the web", (Param(("query", "q", "text"), "string", "What to look for", _one(words.TOPICS)),),
         ("Search the web for {query}.", "Look up {query} on the web.", "Find pages about {query}.", "Google {query}."),
         {"pages": _whole(2, 900), "best": lambda rng: f"{words.made_up(rng).lower()}.com"}, "I found {pages} pages about {query}. The best is {best}."),
    Tool(("get_stock_price", "stock_price", "stock_quote"), "Get the price of a stock", "look up a stock price",
         (Param(("symbol", "ticker"), "string", "The symbol of the stock", lambda rng: "".join(rng.choice("ABCDEFGHKLMNOPRSTVXZ") for _ in range(rng.randint(3, 4)))),),
         ("What is the price of the {symbol} stock?", "How much is one {symbol} share?", "Stock price of {symbol}?", "Tell me the price of {symbol} shares."),
         {"price": _whole(2, 900)}, "One share of {symbol} costs {price}.", "symbol"),
    Tool(("translate", "translate_word", "translator"), "Translate a word", "translate",
         (Param(("word", "text"), "string", "The word to translate", _one(words.TO_SPELL)), Param(("language", "target_language", "to"), "string", "The language wanted", _one(words.LANGUAGES))),
         ("Translate {word} into {language}.", "What is {word} in {language}?", "How do you say {word} in {language}?"),
         {"translation": lambda rng: words.made_up(rng).lower()}, "{word} in {language} is {translation}."),
    Tool(("play_music", "play_song", "play"), "Play music", "play music", (Param(("artist", "musician", "by"), "string", "Whose music to play", words.full_name),),
         ("Play music by {artist}.", "Play something by {artist}.", "I want to hear {artist}.", "Put on a song by {artist}."),
         {"song": lambda rng: f"The {rng.choice(words.COLOURS)} {rng.choice(words.ITEMS)}"}, "I am playing {song} by {artist}."),
    Tool(("add_to_list", "shopping_list_add", "add_item"), "Add a thing to the shopping list", "add to the shopping list",
         (Param(("item", "product", "thing"), "string", "What to buy", _one(words.ITEMS)), Param(("quantity", "count", "number"), "integer", "How many", _whole(2, 30), (), False)),
         ("Add {item} to the shopping list.", "Put {item} on my shopping list.", "I need to buy {quantity} of {item}. Put it on the list.", "Add {quantity} times {item} to the shopping list."),
         {"length": _whole(1, 30)}, "Your shopping list has {length} entries now.", "item"),
    Tool(("get_news", "news", "latest_news"), "Get the news about a topic", "look up the news", (Param(("topic", "subject", "about"), "string", "What the news are about", _one(words.TOPICS)),),
         ("What is the news about {topic}?", "News about {topic}?", "Tell me the latest news on {topic}.", "What happened in {topic}?"),
         {"headline": lambda rng: f"{words.full_name(rng)} wins the prize of {words.city(rng)}"}, "The news about {topic}: {headline}."),
    Tool(("book_table", "reserve_table", "restaurant_booking"), "Book a table in a restaurant", "book a table",
         (Param(("people", "guests", "persons"), "integer", "How many guests", _whole(1, 12)), Param(("time", "at"), "string", "The time as HH:MM", words.clock), CITY),
         ("Book a table for {people} at {time} in {city}.", "I need a table in {city} for {people} people at {time}.", "Reserve a table for {people} in {city} at {time}."),
         {"restaurant": words.made_up}, "There is a table for {people} at {time} in the restaurant {restaurant}."),
    Tool(("find_route", "get_route", "route", "directions"), "Find the way between two cities", "find a route",
         (Param(("origin", "start", "from"), "string", "Where the way begins", words.city), Param(("destination", "goal", "to"), "string", "Where the way ends", words.city)),
         ("How do I get from {origin} to {destination}?", "Find the way from {origin} to {destination}.", "Route from {origin} to {destination}?", "I am in {origin} and want to go to {destination}. Which way?"),
         {"distance_km": _whole(5, 999), "hours": _whole(1, 24)}, "From {origin} to {destination} it is {distance_km} km and takes {hours} hours."),
    Tool(("set_light", "switch_light", "light"), "Switch the light of a room", "switch the light",
         (Param(("room", "where"), "string", "The room", _one(words.ROOMS)), Param(("state", "power"), "string", "On or off", _one(("on", "off")), ("on", "off"))),
         ("Turn {state} the light in the {room}.", "Switch the {room} light {state}.", "Light {state} in the {room}, please."),
         {"ok": lambda rng: True}, "The light in the {room} is {state}.", "room"),
    Tool(("roll_dice", "roll_die", "dice"), "Roll a die", "roll a die", (Param(("sides", "faces"), "integer", "How many sides the die has", _one((4, 6, 8, 10, 12, 20))),),
         ("Roll a die with {sides} sides.", "Roll a {sides}-sided die.", "Throw a die of {sides} sides for me."), {"result": _whole(1, 20)}, "The die shows {result}."),
    Tool(("get_order", "order_status", "track_order"), "Get the status of an order", "look up an order", (Param(("order_id", "id", "number"), "integer", "The number of the order", _whole(1000, 99999)),),
         ("Where is order {order_id}?", "What is the status of order {order_id}?", "Track my order {order_id}.", "Has order {order_id} been sent?"),
         {"status": _one(("packed", "sent", "delivered", "lost", "paid"))}, "Order {order_id} is {status}."),
    Tool(("get_user", "find_user", "user_lookup"), "Find a user by name", "look up a user", (Param(("name", "user", "user_name"), "string", "The name of the user", words.full_name),),
         ("Find the user {name}.", "Look up the user {name}.", "Who is the user {name} in our system?", "Show me the account of {name}."),
         {"email": lambda rng: f"{words.made_up(rng).lower()}@mail.com", "active": lambda rng: rng.random() < 0.5}, "The user {name} has the address {email}."),
    Tool(("create_note", "take_note", "add_note", "remember"), "Write a note", "write a note", (Param(("text", "note", "content"), "string", "What the note says", _one(words.NOTES)),),
         ("Make a note: {text}.", "Note: {text}.", "Write a note that says {text}.", "Remind me to {text}."),
         {"note_id": _whole(1, 999)}, "I wrote the note with the number {note_id}.", "text"),
    Tool(("set_temperature", "thermostat", "set_heating"), "Set the heating of a room", "set the heating",
         (Param(("room", "where"), "string", "The room", _one(words.ROOMS)), Param(("degrees", "temperature", "target"), "integer", "Degrees wanted", _whole(12, 28))),
         ("Set the heating in the {room} to {degrees} degrees.", "Make the {room} {degrees} degrees warm.", "Heat the {room} to {degrees} degrees."),
         {"ok": lambda rng: True}, "The {room} will have {degrees} degrees."),
)  # fmt: skip
"""All of them."""
