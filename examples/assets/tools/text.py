"""Plain text for the short pre-training of the tiny model: prose about measuring, and sentences from units.py."""

import random

from units import FACTS, FITTING, INSTRUMENTS, PREFIXES, QUANTITIES, STEPS, SYMBOLS

PROSE = """
To measure is to compare. Somebody picks a length, calls it one, and counts how often it fits. For a long time every
town had its own choice, and a merchant who carried cloth from one market to the next had to calculate at every gate.
The metric system ended this trouble: it has one unit for each quantity, and every larger or smaller unit is ten, one
hundred or one thousand times that unit.

A kitchen is a small laboratory. Flour is weighed in grams, milk is poured in millilitres, and the oven is set in degrees
Celsius. A baker who weighs everything gets the same bread every day. A cook who trusts the spoon gets another soup each
time, and may like it.

Time is the quantity that refuses to be decimal. A minute has 60 seconds and an hour has 60 minutes, because people long
ago liked to count in sixties. A day has 24 hours, a week has 7 days, and the months do not agree on their length.

A ruler shows centimetres with long lines and millimetres with short lines. To read it, put the zero at one end of the
pencil and look at the other end. If the pencil ends seven short lines after the number 14, it is 14 centimetres and 7
millimetres long, which is 147 millimetres.

Water is a good way to remember units. One litre of water has a mass of about one kilogram. It freezes at 0 degrees
Celsius and boils at 100 degrees Celsius. A cube with sides of 10 centimetres holds exactly one litre.

When the unit gets smaller, the number gets larger. A table that is 2 metres long is also 200 centimetres long, and the
table has not changed. To go from a large unit to a small one, multiply. To go from a small unit to a large one, divide.

The words for large and small units are built from prefixes. Kilo means one thousand, so a kilogram is 1000 grams and a
kilometre is 1000 metres. Milli means one thousandth, so a thousand millimetres make a metre. Centi means one hundredth,
as a cent is one hundredth of a euro.

Some countries measure roads in miles, people in feet and inches, and meat in pounds and ounces. A foot has 12 inches and
a yard has 3 feet. A pound has 16 ounces. These units are now defined by the metric ones: an inch is exactly 2.54
centimetres.

Temperature has two popular scales. On the Celsius scale water freezes at 0 and boils at 100. On the Fahrenheit scale it
freezes at 32 and boils at 212. Between these points there are 100 steps on one scale and 180 steps on the other, so one
degree Celsius is as large as 1.8 degrees Fahrenheit.

Speed is distance divided by time. Someone who walks 5 kilometres in one hour walks at 5 kilometres per hour. In 2 hours
that makes 10 kilometres, if there is no hill and no bakery on the way.

A computer counts in bits, and 8 bits make a byte. A letter in English text takes one byte. A kilobyte is 1000 bytes, and a
kibibyte is 1024 bytes, because computers like powers of two.

A good guess saves a bad mistake. A door is about 2 metres high, an apple is about 150 grams, a teaspoon holds about 5
millilitres, and a film takes about 100 minutes. If the result of a calculation says that the apple has 150 kilograms,
something went wrong with the units.

An area grows faster than its sides. A square with sides of 1 metre has sides of 100 centimetres, and so an area of 100
times 100, which is 10000 square centimetres. A field of 100 metres by 100 metres is one hectare.

Mass and weight are not the same. Mass tells how much matter there is, and it is the same everywhere. Weight is the force
of gravity on that mass. On the moon an apple keeps its mass but has only about one sixth of its weight.

The calendar follows the sun. The earth needs about 365 days and 6 hours for one way around the sun. After 4 years the
extra hours make one day, and so February gets 29 days in a leap year.

A recipe is a list of ratios. If it is for 2 people and 4 people come, everything is doubled. If it is for 6 people and
only 3 come, everything is halved. Only the time in the oven does not follow this rule.
"""


def worked(rng: random.Random) -> str:
    """A calculation that names number and units twice, so that the model learns to look back."""
    step = rng.choice(STEPS)
    n = rng.randint(2, 20)
    big, small = f"{n} {step.bigs}", f"{n * step.factor} {step.smalls}"
    one = f"one {step.big} is {step.factor} {step.smalls}"
    return rng.choice(
        [
            f"To turn {big} into {step.smalls}, multiply {n} by {step.factor}: {big} is {small}.",
            f"To turn {small} into {step.bigs}, divide by {step.factor}: {small} is {big}.",
            f"Because {one}, {big} is {small}.",
            f"How long, heavy or large is {big}? Since {one}, there are {small} in {big}.",
            f"Somebody has {small}. That is {big}, because {one}.",
            f"{big} and {small} are the same.",
        ]
    )


def sentences() -> list[str]:
    out = [f"One {step.big} is {step.factor} {step.smalls}." for step in STEPS]
    out += [f"The prefix {prefix} stands for {meaning}. {example}" for prefix, meaning, example in PREFIXES]
    out += [f"The symbol {symbol} is short for {unit}, and {unit} is written {symbol}." for unit, symbol in SYMBOLS]
    out += [f"The {unit} is used for {quantity}: {quantity} is measured in {unit}." for unit, quantity in QUANTITIES]
    out += [f"With a {instrument} people measure {quantity}." for instrument, quantity in INSTRUMENTS]
    out += [f"For {thing} people use {unit}, because {why}." for thing, unit, _, why in FITTING]
    out += [answer for _, answer in FACTS]
    return out


def documents(rng: random.Random) -> list[str]:
    """One epoch: paragraphs of prose, of facts, and of freshly drawn calculations."""
    prose = [" ".join(p.split()) for p in PROSE.strip().split("\n\n")]
    facts = sentences()
    rng.shuffle(facts)
    facts = [" ".join(facts[i : i + 4]) for i in range(0, len(facts), 4)]
    calculations = [" ".join(worked(rng) for _ in range(4)) for _ in range(200)]
    out = prose + facts + calculations
    rng.shuffle(out)
    return out
