#!/usr/bin/env python3
"""Writes ../instructions.jsonl: short questions about everyday units, with answers computed from units.py.

Needs nothing but Python. The output is the same on every run.
"""

import json
import random
from fractions import Fraction
from pathlib import Path

from units import FACTS, FITTING, INSTRUMENTS, NUMBER_WORDS, PREFIXES, QUANTITIES, STEPS, SYMBOLS

OUT = Path(__file__).resolve().parent.parent / "instructions.jsonl"
SEED = 7


def a(word: str) -> str:
    # "an hour", but "a unit".
    return f"an {word}" if word[0] in "aeio" or word == "hour" else f"a {word}"


def count(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


def conversions(rng: random.Random):
    """Between two neighbouring units, both ways, in several wordings."""
    for step in STEPS:
        numbers = rng.sample(range(2, 13), 6)
        for index, n in enumerate(numbers):
            big, small = count(n, step.big, step.bigs), count(n * step.factor, step.small, step.smalls)
            rule = f"one {step.big} is {step.factor} {step.smalls}"
            yield [
                (f"How many {step.smalls} are in {big}?", f"There are {small} in {big}."),
                (f"Convert {big} to {step.smalls}.", f"{big} is {small}."),
                (f"What is {big} in {step.smalls}?", f"{big} is {small}, because {rule}."),
                (f"Convert {small} to {step.bigs}.", f"{small} is {big}."),
                (f"How many {step.bigs} are {small}?", f"{small} is {big}, because {rule}."),
                (f"I have {small}. How many {step.bigs} is that?", f"That is {big}."),
            ][index]
        yield f"How many {step.smalls} are in {a(step.big)}?", f"There are {step.factor} {step.smalls} in {a(step.big)}."
        if step.factor % 2 == 0:
            yield f"How many {step.smalls} are in half {a(step.big)}?", (
                f"Half {a(step.big)} is {step.factor // 2} {step.smalls}."
            )


def fractions():
    for step in STEPS:
        for part in (Fraction(1, 4), Fraction(3, 4)):
            value = part * step.factor
            if value.denominator == 1 and step.kind in ("mass", "volume", "time", "length") and step.factor >= 60:
                words = f"{NUMBER_WORDS[part]} {a(step.big)}"
                yield f"What is {words} in {step.smalls}?", f"{words.capitalize()} is {value} {step.smalls}."


def comparisons(rng: random.Random):
    words = {"length": "longer", "mass": "heavier", "volume": "more", "time": "longer", "data": "more"}
    for step in STEPS:
        n = rng.randint(2, 9)
        whole, difference = n * step.factor, rng.randint(1, step.factor - 1)
        big = f"{n} {step.bigs}"
        less = count(whole - difference, step.small, step.smalls)
        more = count(whole + difference, step.small, step.smalls)
        word = words[step.kind]
        why = f"because {big} is {whole} {step.smalls}."
        yield f"Which is {word}, {big} or {less}?", f"{big} is {word}, {why}"
        yield f"Which is {word}, {more} or {big}?", f"{more} is {word}, {why}"


def temperatures():
    for celsius in range(-20, 45, 5):
        fahrenheit = celsius * 9 // 5 + 32
        c, f = (str(v).replace("-", "minus ") for v in (celsius, fahrenheit))
        question = f"What is {c} degrees Celsius in Fahrenheit?"
        answer = f"{c} degrees Celsius is {f} degrees Fahrenheit."
        yield question, answer[0].upper() + answer[1:]


def everyday(rng: random.Random):
    for litres, glass in ((1, 200), (1, 250), (2, 250), (2, 200), (3, 250), (1, 500), (3, 500)):
        glasses = litres * 1000 // glass
        bottle = count(litres, "litre", "litres")
        yield (
            f"A bottle holds {bottle}. How many glasses of {glass} millilitres does it fill?",
            f"It fills {glasses} glasses, because {bottle} is {litres * 1000} millilitres.",
        )
    for speed in (4, 5, 15, 30, 60, 90):
        hours = rng.randint(2, 5)
        yield (
            f"How far do I get in {hours} hours at {speed} kilometres per hour?",
            f"You get {speed * hours} kilometres far.",
        )
    for flour, people, more in ((200, 2, 4), (300, 3, 6), (250, 2, 6), (400, 4, 2), (150, 1, 3), (600, 6, 3)):
        yield (
            f"A recipe needs {flour} grams of flour for {count(people, 'person', 'people')}. "
            f"How much is needed for {more} people?",
            f"For {more} people it needs {flour * more // people} grams of flour.",
        )
    for start, length in (("9:00", 45), ("10:30", 30), ("14:15", 45), ("18:40", 20), ("20:00", 90), ("7:50", 15)):
        hour, minute = map(int, start.split(":"))
        end = hour * 60 + minute + length
        yield (
            f"A lesson starts at {start} and takes {length} minutes. When does it end?",
            f"It ends at {end // 60}:{end % 60:02}.",
        )
    months = (("January", 31), ("March", 31), ("April", 30), ("May", 31), ("June", 30), ("July", 31), ("August", 31),
              ("September", 30), ("October", 31), ("November", 30), ("December", 31))
    for month, days in months:
        yield f"How many days does {month} have?", f"{month} has {days} days."


def words():
    for prefix, meaning, example in PREFIXES:
        yield f"What does the prefix {prefix} mean?", f"The prefix {prefix} means {meaning}. {example}"
    for unit, symbol in SYMBOLS:
        yield f"What is the symbol for {unit}?", f"The symbol for {unit} is {symbol}."
        yield f"Which unit has the symbol {symbol}?", f"{symbol} stands for {unit}."
    for unit, quantity in QUANTITIES:
        yield f"What does the {unit} measure?", f"The {unit} measures {quantity}."
    for instrument, quantity in INSTRUMENTS:
        yield f"What does {a(instrument)} measure?", f"{a(instrument).capitalize()} measures {quantity}."
    for thing, unit, others, why in FITTING:
        choice = sorted([unit, *others])
        question = f"Which unit fits {thing} best: {choice[0]}, {choice[1]} or {choice[2]}?"
        yield question, f"{unit.capitalize()}, because {why}."


def examples() -> list[tuple[str, str]]:
    rng = random.Random(SEED)
    pairs = [*conversions(rng), *fractions(), *comparisons(rng), *temperatures(), *everyday(rng), *words(), *FACTS]
    # One answer per question: the first one wins.
    unique = list({question: (question, answer) for question, answer in reversed(pairs)}.values())
    unique.sort()
    rng.shuffle(unique)
    return unique


def main() -> None:
    with OUT.open("w") as out:
        for question, answer in examples():
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            out.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    print(f"{OUT.name}: {len(examples())} examples")


if __name__ == "__main__":
    main()
