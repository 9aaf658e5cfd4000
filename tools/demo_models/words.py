"""Words that the generator draws from, and names it makes up."""

from __future__ import annotations

from random import Random

FIRST_NAMES = (
    "Ada Adam Aisha Alex Alice Amir Ana Anna Anton Ben Bruno Carla Carlos Chloe Clara Daniel David Diana Elena Eli "
    "Elsa Emil Emma Eric Eva Felix Fiona Frank George Grace Hana Hannah Hugo Ida Igor Ines Ivan Jack James Jana Jonas "
    "Julia Karl Kate Kenji Lara Lea Leo Lina Lisa Lucas Lucy Luis Maja Marco Maria Mark Marta Max Maya Mia Mila Mina "
    "Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Paul Pedro Petra Priya Rafael Rita Robert Rosa Ruth Sam Sara "
    "Simon Sofia Stella Sven Tara Theo Thomas Tina Tom Uma Vera Victor Wei Yara Yuki Zoe"
).split()
LAST_NAMES = (
    "Adams Alvarez Bauer Berg Brown Chen Costa Cruz Diaz Dubois Evans Fischer Fox Garcia Gray Gruber Hall Hansen Hill "
    "Ito Jansen Jones Kaya Keller Khan Kim King Klein Kovac Lang Larsen Lee Lopez Martin Meyer Miller Moreau Mori Murphy "
    "Nguyen Novak Olsen Park Patel Perez Popov Reed Rossi Roth Ruiz Sato Schmidt Silva Singh Smith Stone Suzuki Tanaka "
    "Taylor Torres Vogel Walker Wang Weber White Wilson Wolf Wong Wood Young"
).split()
CITIES = (
    "Amsterdam Athens Bangkok Barcelona Beijing Berlin Bern Bogota Boston Brussels Budapest Cairo Chicago Copenhagen "
    "Dakar Delhi Dublin Geneva Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Lyon Madrid "
    "Manila Melbourne Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo Paris Porto Prague Quito Rome Seattle "
    "Seoul Shanghai Singapore Sofia Stockholm Sydney Tallinn Tokyo Toronto Tunis Turin Venice Vienna Warsaw Zagreb Zurich"
).split()
ANIMALS = "bear bee cat cow dog duck fox frog goat hen horse lion mouse owl pig rabbit sheep tiger turtle wolf".split()
FRUITS = "apple banana cherry grape lemon mango melon orange peach pear plum tomato".split()
ITEMS = (
    "apple backpack ball banana bike blanket book bottle bowl box bread brush bucket cake camera candle carpet chair "
    "cheese clock coat coffee cup desk door drum fan flute fork guitar hammer hat jacket kettle key knife ladder lamp lemon "
    "map mask mirror mug notebook orange oven paper pen pencil phone piano pillow plate radio ring rope rug scarf shelf "
    "shirt shoe soap sofa spoon table tea teapot tent ticket towel toy train tray umbrella vase violin wallet watch wheel"
).split()
COLOURS = "black blue brown green grey orange pink purple red white yellow".split()
LANGUAGES = "Arabic Chinese Danish Dutch English French German Greek Italian Japanese Korean Polish Spanish Turkish".split()
CURRENCIES = "EUR USD GBP JPY CHF SEK INR AUD CAD NOK".split()
TOPICS = (
    "art birds books chess coffee cooking cycling dance energy farming fashion films football gardens health history "
    "maps markets maths medicine music painting physics robots rivers sailing science space stars tennis trains travel"
).split()
TITLES = (
    "team meeting|project review|dentist visit|birthday party|piano lesson|board meeting|yoga class|lunch with Anna|"
    "book club|garden day|city tour|chess evening|parents evening|summer concert|staff training|design workshop"
).split("|")
NOTES = (
    "buy milk|call the bank|water the plants|send the report|book a table|pay the rent|clean the kitchen|feed the cat|"
    "fix the bike|read the letter|wash the car|pack the bags|order new shoes|check the oven|print the tickets|charge the phone"
).split("|")
CONDITIONS = "sunny cloudy rainy windy foggy snowy stormy clear".split()
ROOMS = "kitchen bedroom bathroom office hall garage garden attic cellar".split()
TO_SPELL = sorted({*ITEMS, *ANIMALS, *FRUITS, *COLOURS, *TOPICS, *ROOMS, *CONDITIONS})
"""Words that the model learns to spell, count letters of and sort."""

_ONSETS = "b br c ch d dr f g gr h j k kl l m n p pr r s sh st t tr v w z".split()
_VOWELS = "a e i o u ai ea oo".split()
_ENDS = ["", "", "", "l", "n", "r", "s", "t", "x", "nd", "rk"]


def made_up(rng: Random) -> str:
    """A capitalised word that means nothing, so that copying is learned and not only known words."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(rng.randint(1, 3))]
    return "".join(parts).capitalize()


def first_name(rng: Random) -> str:
    """A first name, one in five made up."""
    return made_up(rng) if rng.random() < 0.2 else rng.choice(FIRST_NAMES)


def full_name(rng: Random) -> str:
    """First and last name."""
    return f"{first_name(rng)} {made_up(rng) if rng.random() < 0.2 else rng.choice(LAST_NAMES)}"


def city(rng: Random) -> str:
    """A city, one in five made up."""
    return made_up(rng) if rng.random() < 0.2 else rng.choice(CITIES)


def clock(rng: Random) -> str:
    """A time of day such as 09:30."""
    return f"{rng.randint(0, 23):02}:{rng.choice(('00', '05', '10', '15', '20', '30', '40', '45', '50'))}"


def date(rng: Random) -> str:
    """A day such as 2025-03-14."""
    return f"{rng.randint(2024, 2031)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def a(word: str) -> str:
    """The word with its article."""
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"


def listed(words: list[str]) -> str:
    """One, two and three."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
