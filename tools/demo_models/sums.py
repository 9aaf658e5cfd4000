"""Arithmetic with written working, counting, spelling and sorting."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import words
from chat import Chat, assistant, opening, thinks, user

ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "Calculate {a} + {b}.",
    "What is {a} plus {b}?",
    "Add {a} and {b}.",
    "{a}+{b}=?",
    "How much is {a} + {b}?",
)
SUB = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "Calculate {a} - {b}.",
    "What is {a} minus {b}?",
    "Subtract {b} from {a}.",
    "{a}-{b}=?",
    "How much is {a} - {b}?",
)
MUL = (
    "What is {a} * {b}?",
    "{a} * {b}",
    "Calculate {a} * {b}.",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "{a}*{b}=?",
    "How much is {a} x {b}?",
)
STORIES_ADD = (
    "{n} has {a} {x}s and buys {b} more. How many {x}s does {n} have now?",
    "There are {a} {x}s in a box. {n} puts in {b} more. How many {x}s are there?",
)
STORIES_SUB = (
    "{n} has {a} {x}s and gives away {b}. How many {x}s are left?",
    "There were {a} {x}s in a shop. {n} bought {b} of them. How many are left?",
)


def add_working(a: int, b: int) -> list[str]:
    """Digit by digit from the right, with the carry."""
    lines, carry, place = [], 0, 0
    width = max(len(str(a)), len(str(b)))
    for place in range(width):
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        parts = f"{x} + {y}" + (f" + {carry}" if carry else "")
        carry = total // 10
        if place == width - 1:
            lines.append(f"{parts} = {total}")
        else:
            lines.append(f"{parts} = {total}, write {total % 10}" + (f", carry {carry}" if carry else ""))
    return lines


def subtract_working(a: int, b: int) -> list[str]:
    """Digit by digit from the right, with what is borrowed; a >= b."""
    lines, borrow = [], 0
    for place in range(len(str(a))):
        x, y = a // 10**place % 10, b // 10**place % 10
        need = y + borrow
        taken = f"{y} + {borrow} = {need}, " if borrow else ""
        borrow = int(x < need)
        lines.append(
            f"{taken}{x + 10 * borrow} - {need} = {x + 10 * borrow - need}" + (", borrow 1" if borrow else "")
        )
    return lines


def multiply_working(a: int, b: int) -> list[str]:
    """a of two digits times b of one, by the parts of a."""
    tens, ones = a // 10 * 10, a % 10
    if not ones:
        return [f"{a // 10} * {b} = {a // 10 * b}", f"{tens} * {b} = {a * b}"]
    return [f"{tens} * {b} = {tens * b}", f"{ones} * {b} = {ones * b}", *add_working(tens * b, ones * b)]


def arithmetic(rng: Random) -> Chat:
    """Sums and differences up to 999, products up to 12 x 12 and of two digits with one."""
    kind = rng.choice("++--*")
    if kind == "*":
        return _product(rng)
    top = rng.choice((10, 20, 100, 100, 1000, 1000))
    a, b = rng.randrange(top), rng.randrange(top)
    if kind == "-" and a < b:
        a, b = b, a
    result, small = (a + b if kind == "+" else a - b), max(a, b) <= 20
    if rng.random() < 0.2:
        forms = STORIES_ADD if kind == "+" else STORIES_SUB
        ask = rng.choice(forms).format(a=a, b=b, n=rng.choice(words.FIRST_NAMES), x=rng.choice(words.ITEMS))
    else:
        ask = rng.choice(ADD if kind == "+" else SUB).format(a=a, b=b)
    working = [] if small else (add_working(a, b) if kind == "+" else subtract_working(a, b))
    return _sum(rng, ask, f"{a} {kind} {b}", working, result, None if small else f"{a}{kind}{b}")


def _product(rng: Random) -> Chat:
    if rng.random() < 0.4:
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        working: list[str] = []
    else:
        a, b = rng.randint(13, 99), rng.randint(2, 9)
        working = multiply_working(a, b)
    x, y = (a, b) if working or rng.random() < 0.5 else (b, a)
    ask = rng.choice(MUL).format(a=x, b=y)
    return _sum(rng, ask, f"{x} * {y}", working, a * b, f"{a}*{b}" if working else None)


def _sum(rng: Random, ask: str, term: str, working: list[str], result: int, key: str | None) -> Chat:
    thinking = thinks(rng)
    said = f"{term} = {result}"
    thought = "\n".join([term, *working, said]) if thinking else ""
    answer = said if thinking or not working else "\n".join([term, *working, said])
    check = {"last_number": result}
    return Chat(
        "arithmetic", [*opening(rng), user(ask), assistant(answer, thought)], check, key, thinking=thinking
    )


def counting(rng: Random) -> Chat:
    """How often a thing is in a list, or how far one counts."""
    thinking = thinks(rng)
    if rng.random() < 0.3:
        first = rng.randint(1, 40)
        last = first + rng.randint(2, 12)
        ask = rng.choice(("Count from {a} to {b}.", "Please count from {a} to {b}.")).format(a=first, b=last)
        answer = ", ".join(map(str, range(first, last + 1)))
        said = [
            *opening(rng),
            user(ask),
            assistant(answer, f"I start at {first} and stop at {last}." if thinking else ""),
        ]
        return Chat("counting", said, {"contains": [answer]}, f"{first}-{last}", thinking=thinking)
    wanted = rng.choice(words.FRUITS)
    listed = [wanted if rng.random() < 0.4 else rng.choice(words.FRUITS) for _ in range(rng.randint(3, 9))]
    number, running, steps = listed.count(wanted), 0, []
    for word in listed:
        running += word == wanted
        steps.append(f"{word} {running}")
    ask = rng.choice(
        (
            "How many times is {w} in this list: {l}?",
            "Count the word {w}: {l}",
            "How often do you see {w} here: {l}?",
        )
    ).format(w=wanted, l=", ".join(listed))
    answer = f"The word {wanted} is there {number} time{'' if number == 1 else 's'}."
    said = [*opening(rng), user(ask), assistant(answer, ", ".join(steps) if thinking else "")]
    return Chat("counting", said, {"contains": [f" {number} time"]}, ask, thinking=thinking)


def spelling(rng: Random) -> Chat:
    """The letters of a word, forwards, backwards, or how many."""
    word, thinking = rng.choice(words.TO_SPELL), thinks(rng)
    spelled, backwards = "-".join(word), "-".join(reversed(word))
    forms: tuple[tuple[tuple[str, ...], str, str, str], ...] = (
        ((f"Spell {word}.", f"How do you spell {word}?", f"Spell the word {word}.", f"Spell '{word}', please."), spelled, spelled, ""),
        ((f"Spell {word} backwards.", f"Write {word} backwards, letter by letter."), backwards, backwards, f"{word} is {spelled}."),
        ((f"How many letters does {word} have?", f"How many letters are in the word {word}?", f"Count the letters of {word}."),
         f"The word {word} has {len(word)} letters: {spelled}.", f"has {len(word)} letters",
         ", ".join(f"{letter} {place}" for place, letter in enumerate(word, 1))),
    )  # fmt: skip
    asks, answer, check, thought = rng.choice(forms)
    ask = rng.choice(asks)
    thought = thought or f"I write {word} letter by letter."
    said = [*opening(rng), user(ask), assistant(answer, thought if thinking else "")]
    return Chat("spelling", said, {"contains": [check]}, ask, thinking=thinking)


def sorting(rng: Random) -> Chat:
    """Numbers by size, words by the alphabet."""
    thinking, order = thinks(rng), rng.choice(("up", "down"))
    things: list[str]
    by: Callable[[str], int | str]
    if rng.random() < 0.65:
        things = [str(n) for n in rng.sample(range(100), rng.randint(3, 6))]
        by, what = int, "numbers"
        how = {
            "up": ("from small to large", "in ascending order"),
            "down": ("from large to small", "in descending order"),
        }
    else:
        things = rng.sample(words.ANIMALS + words.FRUITS, rng.randint(3, 5))
        by, what = str, "words"
        how = {"up": ("by the alphabet", "in alphabetical order"), "down": ("in reverse alphabetical order",)}
    ask = rng.choice(("Sort these {w} {h}: {l}", "Put these {w} {h}: {l}", "Sort {h}: {l}")).format(
        w=what, h=rng.choice(how[order]), l=", ".join(things)
    )
    done = sorted(things, key=by, reverse=order == "down")
    steps = (
        "\n".join(f"next {one}" for one in done)
        if rng.random() < 0.5
        else f"I begin with {done[0]} and end with {done[-1]}."
    )
    said = [*opening(rng), user(ask), assistant(", ".join(done), steps if thinking else "")]
    return Chat("sorting", said, {"contains": [", ".join(done)]}, ask, thinking=thinking)
