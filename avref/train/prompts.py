"""Prompts that the shipped drafters are trained on: a small grammar, never the prompts of `avref.workloads`.

A template names slots in braces. `{town}` is filled from the word list `town`, `{town2}` by a different town; an entry
may itself hold slots (a sentence, a code snippet), and some slots are made by a function (numbers, tables, paragraphs).
"""

import random
import re
from collections.abc import Callable

from avref.train.words import WORDS, split_entries

SLOT = re.compile(r"\{([a-z]+)(\d?)\}")


def _number(low: int, high: int, step: int = 1) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randrange(low, high, step))


def _join(separator: str, slots: list[str], rng: random.Random) -> str:
    return _fill(separator.join("{" + slot + "}" for slot in slots), rng)


def _table(rng: random.Random) -> str:
    columns = rng.sample("name town job mid price date hobby color email code year".split(), rng.randint(2, 4))
    separator = rng.choice([", ", "; ", " | ", " - ", ": "])
    return "\n".join(_join(separator, columns, rng) for _ in range(rng.randint(3, 7)))


def _list(rng: random.Random) -> str:
    kind = rng.choice("name town job things animal color food hobby subject topic".split())
    return ", ".join(rng.sample(WORDS[kind], rng.randint(3, 9)))


MADE: dict[str, Callable[[random.Random], str]] = {
    "small": _number(2, 13),
    "mid": _number(13, 100),
    "big": _number(100, 5000),
    "pct": _number(5, 95, 5),
    "year": _number(1890, 2025),
    "price": lambda rng: f"{rng.randint(1, 60)}.{rng.randrange(0, 100, 5):02d}",
    "clock": lambda rng: f"{rng.randint(6, 21)}:{rng.randrange(0, 60, 5):02d}",
    "date": lambda rng: f"{rng.randint(1, 28)} {rng.choice(['January', 'March', 'April', 'July', 'October'])}",
    "email": lambda rng: _join("@", ["name", "animal"], rng).lower() + ".example",
    "code": lambda rng: f"{rng.choice('ABCDEFGH')}{rng.choice('KLMNPQ')}-{rng.randint(100, 9999)}",
    "nums": lambda rng: ", ".join(str(rng.randint(1, 300)) for _ in range(rng.randint(4, 9))),
    "op": lambda rng: rng.choice("+-"),
    "list": _list,
    "rows": _table,
    "para": lambda rng: " ".join(_fill(text, rng) for text in rng.sample(WORDS["sentence"], rng.randint(2, 5))),
}

TEMPLATES = {
    kind: split_entries(text)
    for kind, text in {
        "low_entropy": r"""
Replace "{name}" with "{name2}": {name} told me that {name} would be in {town} by {clock}, and {name} was right.
Answer from the note. Note: {name} parks at {code}, {name2} parks at {code2}. Where does {name2} park?
Add a full stop and capitals where needed: we saw {name} in {town} on {day} she had {small} {things}
Read this and answer with the {job}'s town.\nThe {job} lives in {town}. The {job2} lives in {town2}.
Fix the spelling and change nothing else: teh {job} recieved {small} {things} form {name} yesturday
Keep only the lines with a {color} thing.\n{color} {things}\n{color2} {things2}\n{color} {box}
Here are some notes.\n{para}\n{para2}\nGive every date and time in them, one per line. || Count from {small} to {mid}.
Fill the form.\nName:\nTown:\nJob:\nText: {name} is a {job} from {town}. || List the people named in this text.\n{para}
Convert to YAML:\nname {name}, town {town}, age {mid}, job {job} || Which of these words come twice? {list}, {list2}
Which towns are mentioned here? Give only their names.\n{para} || Quote the first sentence of this text: {para}
Join these lines into one line, separated by commas:\n{rows} || Make a CSV file with a header from these lines:\n{rows}
Echo this command and nothing else: move {code} to {code2} || Write this sentence {small} times: {sentence}
Write the text in capital letters: {sentence} || Sort the numbers from small to large: {nums}
Repeat the following text exactly:\n\n{para} || Extract all numbers from the text.\n{para}
Put each sentence on its own line: {para} || Extract the email address, if any: {para}
Wrap every item in double quotes: {list} || Format this as a Markdown table:\n{rows} || {list}\nSort these from A to Z.
Give the list in reverse order: {list} || Copy this without any change: {para} || Convert these rows to JSON:\n{rows}
Print the second line only:\n{rows} || Number the following items: {list} || {rows}\n\nShow the first column.
Turn into bullet points: {list}
""",
        "math": r"""
{name} buys {small} {things} at {price} each and {small2} {things2} at {price2} each. What is the total bill?
The {job} shares {big} {things} equally among {small} friends. How many does each get and how many remain?
{name} reads {mid} pages on {day}, twice as many the next day, then {small}. How many pages in total?
A bag has {small} {color} and {small2} {color2} balls. What is the chance of drawing a {color} one?
A tank holds {big} litres and loses {small} litres an hour. How much is left after {mid} hours?
{name} is {mid} years old and {name2} is {small} years younger. What is the sum of their ages?
{name} has {big} {things} and gives {mid} to {name2}. How many are left? Show your steps. || Find the median of {nums}.
{name} has {small} times as many {things} as {name2}, who has {mid}. How many together? || Add up these numbers: {nums}
{name} walks {small} km a day. How far is that in {mid} days? Think step by step. || What is {pct}% of {big}? Explain.
A recipe for {small} people needs {big} g of flour. How much for {small2} people? || What is the average of {nums}?
A shop sold {mid} {things} on {day} and {mid2} on {day2}. What is the difference? || What is {big} {op} {mid}?
{name} earns {mid} dollars an hour. How much for {small} hours, less {pct}% tax? || Factor {big} into primes.
There are {small} {box} with {mid} {things} in each. How many {things} is that? || Divide {big} by {small}.
{small} workers paint a wall in {mid} hours. How long do {small2} workers need? || Compute {mid} x {mid2}.
{big} dollars grow by {small}% a year. How much after 2 years? Show each year. || Solve for x: {small}x + {mid} = {big}
A rectangle is {mid} m long and {small} m wide. Find its area and perimeter.
A coat costs {big} dollars and is reduced by {pct}%. What is the new price?
{name} puts {big} {things} into {box} of {small}. How many {box} are full?
How many ways can {name}, {name2} and {name3} stand in a line? List them.
Work out ({mid} + {mid2}) x {small} - {small2}, one operation at a time.
A ticket to {town} costs {price} dollars. What do {small} tickets cost? || What is {small} squared plus {small2} cubed?
{name} saves {mid} dollars a week. When will that make {big} dollars?
A film starts at {clock} and lasts {mid} minutes. When does it end? || What is the remainder of {big} divided by {mid}?
A car uses {small} litres per 100 km. How much for {big} km?
Two numbers add to {big} and differ by {mid}. What are they?
A train goes {big} km in {small} hours. What is its speed?
{name} packs {small} {box} of {mid} {things}. On the way to {town}, {small2} {things} break and {name2} takes \
{small3} more. How many arrive?
On {day} {name} drives {mid} km, on {day2} {mid2} km and on {day3} half of that total. The car uses {small} litres \
per 100 km. How much fuel is used?
""",
        "code": r"""
Build a {app} in {lang}. It stores {table}, lets the user add, list and delete them, and saves them to a file.
Complete this function:\ndef {func}({var}, limit={mid}):\n    # keep only what is below the limit
Write a {lang} function `{func}` that takes {data} and returns how many values exceed {mid}.
Write HTML for a page about {topic} with a heading, a list and a {color} button. || Make this code shorter:\n{snippet}
Simulate {big} dice rolls in {lang} and print how often each face comes up. || Explain {concept} with a {lang} example.
Write a {lang} function that draws a triangle of stars, {small} rows high. || Write a regex for codes such as {code}.
Write an SQL query for the {small} most expensive {table}, cheapest first. || When should I use {concept} in {lang}?
Design the functions of a {app}; give only their signatures in {lang}. || {concept} or {concept2}: show both in {lang}.
My {lang} program that {verb} {data} is slow. How can I speed it up? || Write unit tests for this function:\n{snippet}
Read a CSV of {table} in {lang} and print the sum of one column. || What is the running time of this code?\n{snippet}
Write a bash command that finds files larger than {mid} MB. || Show a {lang} program that {verb} {data} {limit}.
Parse lines like "{name};{mid};{town}" in {lang}. || Write a class for a {app} in {lang}.
Write a function that {verb} {data} {limit}. || Write a {lang} function that {verb} {data}. || Write a {app} in {lang}.
Find the bug, if there is one:\n\n{snippet} || What does this code do?\n\n{snippet} || Explain line by line:\n{snippet}
Rewrite this in {lang}:\n{snippet} || Add error handling:\n{snippet} || What is {concept}? Show code.
Add type hints:\n{snippet} || Add comments:\n{snippet}
I have this code in my {app}:\n\n{snippet}\n\nIt gives a wrong answer for {nums}. Explain what happens and give a \
corrected version.
""",
        "chat": r"""
I got this message: {para} What should I answer? Write a {tone} reply. || Plan a dinner with {food} for {small} people.
I want to {task} but have only {mid} minutes a day. What should I do? || What is the link between {topic} and {topic2}?
Write a {tone} message to {person} about meeting on {day} at {clock}. || What should I ask a {job} before hiring one?
Is {town} or {town2} better for a holiday in {audience}'s eyes? || Write a {tone} email to {person} because {problem}.
Hi! I am {name} from {town} and I like {hobby}. What about you? || My friend says: "{problem}." What should I answer?
I have to give a talk on {topic} on {day}. Outline it. || What is a polite way to tell {person} that {problem}?
{food} or {food2} for lunch? Decide and say why. || Give me a shopping list for {food} and {food2}. || How do I {task}?
Compare {hobby} and {hobby2} for {audience}. || What should I see in {town} in {small} days? || Tell me about {topic}.
What gift suits a {job} who likes {hobby}? || Reply to {person} who asks about {topic}. || How does one become a {job}?
Would you rather be a {job} or a {job2}? || Ask me {small} questions about {topic}. || Make a weekly plan for {hobby}.
What are common mistakes about {topic}? || Is it hard to {task}? Answer {length}. || Summarise {length}: {para} {para2}
Help, {problem}. Any advice {length}? || How do {animal} and {animal2} differ? || I am new to {hobby}. What do I need?
Give me {small} tips to {task}. || Explain {topic} to {audience}. || What can I do when {problem}?
Explain {topic} {length}. || How do I make {food}?
I live in {town}, work as a {job} and spend my evenings on {hobby}. Lately {problem}. How can I change that? Give me \
a plan for {small} weeks.
""",
        "high_entropy": r"""
Here is the start of my {genre}: {para} Write the next part, {mood} in tone, and bring in {subject}.
Describe the colour {color} to somebody who has never seen it, in a {mood} voice. || Write a {mood} {form} on {topic}.
Continue this {mood} story: {name} opened the {color} door of {setting}. || Begin a novel with {subject} in {setting}.
Write a {mood} scene in which {name} and {name2} argue over {things}. || Write a {mood} letter from {name} to {name2}.
Write a story of {mid} words in which {name} finds {small} {things}. || Invent a proverb about {things} and its origin.
Write a {form} with the words {things}, {color} and {animal}. || Invent a new animal, half {animal} and half {animal2}.
A {job} and a {animal} meet in {setting}. What happens? || Write a {genre} that ends with the words "{sentence}"
Write a speech that a {animal} gives to {big} humans. || Compose a {form} for a {job} who dreams of {hobby}.
Describe {setting} through the eyes of a {animal}. || Write a dialogue between {subject} and {subject2}.
Create a hero for a {genre} and describe a flaw. || Write a villain's {mood} farewell in {setting}.
Write the diary of a {job} lost in {setting}. || Make up a {mood} advertisement for {food}. || Continue: {sentence}
What would {topic} say if it could speak? || Write a {mood} {genre} about {subject}. || Write a {form} about {subject}.
Write a {genre} about {subject}. || Tell a {genre} set in {setting}. || Invent a legend about {town}.
Retell {topic} as a {genre}. || Turn {subject} into a {form}.
Write a {mood} {genre} set in {setting}. It should feature {subject}, a {animal} called {name}, and a promise that is \
broken on {day}.
""",
    }.items()
}


def _fill(template: str, rng: random.Random) -> str:
    """Fill every slot: the same slot gets the same value throughout, a slot with another digit a different value."""
    chosen: dict[str, str] = {}
    for match in SLOT.finditer(template):
        slot, kind = match.group(0), match.group(1)
        for _ in range(20 if slot not in chosen else 0):
            chosen[slot] = MADE[kind](rng) if kind in MADE else _fill(rng.choice(WORDS[kind]), rng)
            if list(chosen.values()).count(chosen[slot]) == 1:
                break
    return SLOT.sub(lambda match: chosen[match.group(0)], template)


def _prompt(kind: str, rng: random.Random) -> str:
    """One prompt: a template, in a third of the cases with an opening or a closing sentence, and right articles."""
    text = _fill(rng.choice(TEMPLATES[kind]), rng)
    frame = rng.random()
    if kind != "low_entropy" and frame < 0.18:
        text = _fill("{opening}. ", rng) + text[0].upper() + text[1:]
    elif kind != "low_entropy" and frame < 0.36 and "\n" not in text:
        text += ("" if text[-1] in ".?!" else ".") + _fill(" {closing}.", rng)
    text = re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)
    return text[0].upper() + text[1:] if rng.random() < 0.9 or kind == "low_entropy" else text[0].lower() + text[1:]


def training_prompts(num: int, seed: int = 0) -> list[str]:
    """Return `num` different prompts, the five kinds in equal shares and shuffled.

    The same seed gives the same list, and a longer list starts with the shorter one. Raises ValueError
    when `num` is negative.
    """
    if num < 0:
        raise ValueError(f"num is {num}; it must be 0 or more")
    rng = random.Random(seed)
    prompts: dict[str, None] = {}  # a set that keeps the order
    while len(prompts) < num:
        for kind in rng.sample(list(TEMPLATES), len(TEMPLATES)):
            size = len(prompts)
            while len(prompts) == size:
                prompts[_prompt(kind, rng)] = None
    return list(prompts)[:num]
