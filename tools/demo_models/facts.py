"""What the demo models know: a few hundred facts, each as a relation, a subject and an answer."""

from __future__ import annotations

from dataclasses import dataclass

CAPITALS = """
Albania Tirana Europe|Algeria Algiers Africa|Angola Luanda Africa|Argentina Buenos_Aires South_America|Australia Canberra Oceania|
Austria Vienna Europe|Bangladesh Dhaka Asia|Belgium Brussels Europe|Bolivia Sucre South_America|Brazil Brasilia South_America|
Bulgaria Sofia Europe|Cambodia Phnom_Penh Asia|Canada Ottawa North_America|Chile Santiago South_America|China Beijing Asia|
Colombia Bogota South_America|Croatia Zagreb Europe|Cuba Havana North_America|Denmark Copenhagen Europe|Ecuador Quito South_America|
Egypt Cairo Africa|Estonia Tallinn Europe|Ethiopia Addis_Ababa Africa|Finland Helsinki Europe|France Paris Europe|
Germany Berlin Europe|Ghana Accra Africa|Greece Athens Europe|Hungary Budapest Europe|Iceland Reykjavik Europe|
India New_Delhi Asia|Indonesia Jakarta Asia|Iran Tehran Asia|Iraq Baghdad Asia|Ireland Dublin Europe|Italy Rome Europe|
Japan Tokyo Asia|Jordan Amman Asia|Kenya Nairobi Africa|Latvia Riga Europe|Lebanon Beirut Asia|Lithuania Vilnius Europe|
Madagascar Antananarivo Africa|Malaysia Kuala_Lumpur Asia|Mexico Mexico_City North_America|Mongolia Ulaanbaatar Asia|
Morocco Rabat Africa|Nepal Kathmandu Asia|Netherlands Amsterdam Europe|New_Zealand Wellington Oceania|Nigeria Abuja Africa|
Norway Oslo Europe|Pakistan Islamabad Asia|Paraguay Asuncion South_America|Peru Lima South_America|Philippines Manila Asia|
Poland Warsaw Europe|Portugal Lisbon Europe|Romania Bucharest Europe|Russia Moscow Europe|Senegal Dakar Africa|Serbia Belgrade Europe|
Slovakia Bratislava Europe|Slovenia Ljubljana Europe|South_Korea Seoul Asia|Spain Madrid Europe|Sudan Khartoum Africa|
Sweden Stockholm Europe|Switzerland Bern Europe|Syria Damascus Asia|Thailand Bangkok Asia|Tunisia Tunis Africa|Turkey Ankara Asia|
Uganda Kampala Africa|Ukraine Kyiv Europe|Uruguay Montevideo South_America|Venezuela Caracas South_America|Vietnam Hanoi Asia|
Zambia Lusaka Africa|Zimbabwe Harare Africa
"""
OPPOSITES = (
    "hot cold|big small|fast slow|high low|old young|rich poor|hard soft|light dark|early late|happy sad|open closed|full empty|"
    "long short|wide narrow|strong weak|clean dirty|wet dry|loud quiet|near far|up down|left right|day night|good bad|"
    "first last|true false|above below|inside outside|front back|safe dangerous|cheap expensive|deep shallow|thick thin|"
    "brave afraid|polite rude|sharp blunt|smooth rough|alive dead|awake asleep|begin end|buy sell|come go|"
    "give take|laugh cry|love hate|push pull|win lose|question answer|friend enemy|summer winter|north south|east west"
)
SYMBOLS = (
    "hydrogen H|helium He|lithium Li|carbon C|nitrogen N|oxygen O|fluorine F|neon Ne|sodium Na|magnesium Mg|aluminium Al|"
    "silicon Si|phosphorus P|sulfur S|chlorine Cl|argon Ar|potassium K|calcium Ca|iron Fe|nickel Ni|copper Cu|zinc Zn|"
    "silver Ag|tin Sn|iodine I|platinum Pt|gold Au|mercury Hg|lead Pb|uranium U"
)
YOUNG = (
    "dog puppy|cat kitten|cow calf|horse foal|sheep lamb|goat kid|pig piglet|hen chick|duck duckling|goose gosling|bear cub|"
    "frog tadpole|deer fawn|kangaroo joey|swan cygnet|owl owlet"
)
SOUNDS = "dog barks|cat meows|cow moos|sheep bleats|duck quacks|lion roars|wolf howls|pig oinks|bee buzzes|owl hoots|mouse squeaks|frog croaks"
LEGS = (
    "spider 8|ant 6|bee 6|dog 4|cat 4|cow 4|horse 4|hen 2|duck 2|owl 2|snake 0|fish 0|frog 4|crab 10|turtle 4"
)
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"
SIDES = "triangle 3|square 4|rectangle 4|pentagon 5|hexagon 6|heptagon 7|octagon 8"
AMOUNTS = (
    "minutes hour 60|seconds minute 60|hours day 24|days week 7|months year 12|weeks year 52|days year 365|years century 100|"
    "years decade 10|metres kilometre 1000|grams kilogram 1000|centimetres metre 100|cents euro 100|letters alphabet 26"
)
COLOUR_OF = (
    "sky blue|grass green|snow white|coal black|banana yellow|tomato red|carrot orange|chocolate brown|lemon yellow|milk white|"
    "cherry red|leaf green|elephant grey|pumpkin orange|night black"
)
PLACES = (
    "Eiffel_Tower Paris|Colosseum Rome|Big_Ben London|Acropolis Athens|Brandenburg_Gate Berlin|Statue_of_Liberty New_York|"
    "Taj_Mahal Agra|Opera_House_with_white_sails Sydney|Golden_Gate_Bridge San_Francisco|Kremlin Moscow|Sagrada_Familia Barcelona|"
    "Louvre Paris|Great_Sphinx Giza"
)
DRINKS = "milk cows|honey bees|eggs hens|wool sheep|silk silkworms|bread flour|cheese milk|wine grapes|paper wood|glass sand|butter cream|chocolate cocoa"


@dataclass(frozen=True, slots=True)
class Fact:
    """`answer` is what a right answer holds; `questions` ask for it in several ways; `sentence` says it."""

    relation: str
    subject: str
    answer: str
    questions: tuple[str, ...]
    sentence: str


def _pairs(text: str) -> list[list[str]]:
    return [[word.replace("_", " ") for word in entry.split()] for entry in text.replace("\n", "").split("|")]


def _countries() -> list[Fact]:
    facts = []
    for country, capital, continent in _pairs(CAPITALS):
        name = f"the {country}" if country in ("Netherlands", "Philippines") else country
        asks = (
            f"What is the capital of {name}?",
            f"Which city is the capital of {name}?",
            f"Name the capital of {name}.",
            f"Do you know the capital of {name}?",
            f"Tell me {name}'s capital.",
            f"capital of {name}",
        )
        facts.append(Fact("capital", country, capital, asks, f"The capital of {name} is {capital}."))
        where = (
            f"On which continent is {name}?",
            f"Where in the world is {name}?",
            f"Which continent does {name} belong to?",
            f"What continent is {name} in?",
        )
        facts.append(
            Fact("continent", country, continent, where, f"{name[0].upper()}{name[1:]} is in {continent}.")
        )
        back = (
            f"Which country has the capital {capital}?",
            f"{capital} is the capital of which country?",
            f"Of which country is {capital} the capital?",
            f"What country is {capital} the capital of?",
        )
        facts.append(Fact("country", capital, country, back, f"{capital} is the capital of {name}."))
    return facts


def _opposites() -> list[Fact]:
    both = [pair for one, other in _pairs(OPPOSITES) for pair in ((one, other), (other, one))]
    return [
        Fact(
            "opposite", word, other,
            (
                f"What is the opposite of {word}?", f"Give me the opposite of {word}.", f"Opposite of {word}?",
                f"Which word is the opposite of '{word}'?", f"What is the contrary of {word}?",
            ),
            f"The opposite of {word} is {other}.",
        )
        for word, other in both
    ]  # fmt: skip


def _simple(relation: str, table: str, questions: tuple[str, ...], sentence: str) -> list[Fact]:
    """Facts of pairs (s, a); questions and sentence mention {s}, {S}, {an_s} and {a}."""
    facts = []
    for s, a in _pairs(table):
        an = f"{'an' if s[0].lower() in 'aeio' else 'a'} {s}"
        fill = {"s": s, "S": s[0].upper() + s[1:], "an_s": an, "An_s": an[0].upper() + an[1:], "a": a}
        asks = tuple(question.format(**fill) for question in questions)
        facts.append(Fact(relation, s, a, asks, sentence.format(**fill)))
    return facts


def _ordered() -> list[Fact]:
    facts = []
    planets = PLANETS.split()
    ranks = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
    for rank, planet in zip(ranks, planets, strict=False):
        asks = (
            f"Which planet is the {rank} from the Sun?",
            f"Name the {rank} planet.",
            f"What is the {rank} planet from the Sun?",
        )
        facts.append(Fact("planet", rank, planet, asks, f"The {rank} planet from the Sun is {planet}."))
    months = "January February March April May June July August September October November December".split()
    days = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
    for rank, month in zip(ranks, months, strict=True):
        asks = (
            f"What is the {rank} month of the year?",
            f"Which month is the {rank}?",
            f"Name the {rank} month.",
        )
        facts.append(Fact("month", rank, month, asks, f"The {rank} month of the year is {month}."))
    for names, kind in ((months, "month"), (days, "day")):
        for name, after in zip(names, [*names[1:], names[0]], strict=True):
            next_one = (
                f"Which {kind} comes after {name}?",
                f"What comes after {name}?",
                f"What {kind} follows {name}?",
                f"After {name} comes which {kind}?",
            )
            facts.append(Fact("after", name, after, next_one, f"After {name} comes {after}."))
            before = (
                f"Which {kind} comes before {after}?",
                f"What comes before {after}?",
                f"What {kind} is just before {after}?",
                f"Before {after} comes which {kind}?",
            )
            facts.append(Fact("before", after, name, before, f"Before {after} comes {name}."))
    return facts


def _amounts() -> list[Fact]:
    return [
        Fact(
            "amount", f"{many} {one}", number,
            (
                f"How many {many} are in {'an' if one[0] in 'aeh' and one != 'half' else 'a'} {one}?",
                f"How many {many} does {'an' if one[0] in 'aeh' else 'a'} {one} have?",
                f"Tell me how many {many} make {'an' if one[0] in 'aeh' else 'a'} {one}.",
                f"{'An' if one[0] in 'aeh' else 'A'} {one} is how many {many}?",
            ),
            f"{'An' if one[0] in 'aeh' else 'A'} {one} has {number} {many}.",
        )
        for many, one, number in _pairs(AMOUNTS)
    ]  # fmt: skip


FACTS: tuple[Fact, ...] = (
    *_countries(),
    *_opposites(),
    *_ordered(),
    *_amounts(),
    *_simple("symbol", SYMBOLS, ("What is the chemical symbol of {s}?", "Which symbol does {s} have?", "Chemical symbol for {s}?", "How do chemists write {s}?"), "The chemical symbol of {s} is {a}."),
    *_simple("young", YOUNG, ("What is a young {s} called?", "What do you call a baby {s}?", "Name for a baby {s}?", "How is a young {s} called?"), "A young {s} is called a {a}."),
    *_simple("sound", SOUNDS, ("What sound does {an_s} make?", "What does {an_s} do to make noise?", "Which noise does {an_s} make?", "How does {an_s} sound?"), "{An_s} {a}."),
    *_simple("legs", LEGS, ("How many legs does {an_s} have?", "Number of legs of {an_s}?", "Tell me how many legs {an_s} has.", "{An_s} has how many legs?"), "{An_s} has {a} legs."),
    *_simple("sides", SIDES, ("How many sides does a {s} have?", "Number of sides of a {s}?", "Tell me how many sides a {s} has.", "A {s} has how many sides?"), "A {s} has {a} sides."),
    *_simple("colour", COLOUR_OF, ("What colour is {s}?", "Which colour has {s}?", "Tell me the colour of {s}.", "What is the colour of {s}?"), "The colour of {s} is {a}."),
    *_simple("place", PLACES, ("Where is the {s}?", "In which city is the {s}?", "Which city has the {s}?", "In what city can I see the {s}?"), "The {s} is in {a}."),
    *_simple("source", DRINKS, ("What does {s} come from?", "Where does {s} come from?", "What is {s} made from?", "From what do we get {s}?"), "We get {s} from {a}."),
)  # fmt: skip
"""All of them."""
