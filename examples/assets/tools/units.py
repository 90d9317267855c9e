"""Facts about units: every number in the data set is computed from these tables."""

from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Step:
    """One `big` unit is `factor` of the `small` unit, exactly."""

    kind: str
    big: str
    bigs: str
    small: str
    smalls: str
    factor: int


STEPS = [
    Step("length", "kilometre", "kilometres", "metre", "metres", 1000),
    Step("length", "metre", "metres", "centimetre", "centimetres", 100),
    Step("length", "metre", "metres", "millimetre", "millimetres", 1000),
    Step("length", "centimetre", "centimetres", "millimetre", "millimetres", 10),
    Step("length", "foot", "feet", "inch", "inches", 12),
    Step("length", "yard", "yards", "foot", "feet", 3),
    Step("mass", "kilogram", "kilograms", "gram", "grams", 1000),
    Step("mass", "gram", "grams", "milligram", "milligrams", 1000),
    Step("mass", "tonne", "tonnes", "kilogram", "kilograms", 1000),
    Step("mass", "pound", "pounds", "ounce", "ounces", 16),
    Step("volume", "litre", "litres", "millilitre", "millilitres", 1000),
    Step("volume", "litre", "litres", "decilitre", "decilitres", 10),
    Step("volume", "gallon", "gallons", "pint", "pints", 8),
    Step("volume", "cubic metre", "cubic metres", "litre", "litres", 1000),
    Step("time", "minute", "minutes", "second", "seconds", 60),
    Step("time", "hour", "hours", "minute", "minutes", 60),
    Step("time", "day", "days", "hour", "hours", 24),
    Step("time", "week", "weeks", "day", "days", 7),
    Step("time", "year", "years", "month", "months", 12),
    Step("data", "byte", "bytes", "bit", "bits", 8),
    Step("data", "kilobyte", "kilobytes", "byte", "bytes", 1000),
]

PREFIXES = [
    ("kilo", "one thousand", "A kilogram is 1000 grams."),
    ("mega", "one million", "A megawatt is 1000000 watts."),
    ("giga", "one billion", "A gigabyte is 1000 megabytes."),
    ("hecto", "one hundred", "A hectolitre is 100 litres."),
    ("deca", "ten", "A decametre is 10 metres."),
    ("deci", "one tenth", "A decilitre is one tenth of a litre."),
    ("centi", "one hundredth", "A centimetre is one hundredth of a metre."),
    ("milli", "one thousandth", "A millimetre is one thousandth of a metre."),
    ("micro", "one millionth", "A microsecond is one millionth of a second."),
    ("nano", "one billionth", "A nanometre is one billionth of a metre."),
]

SYMBOLS = [
    ("metre", "m"),
    ("kilometre", "km"),
    ("centimetre", "cm"),
    ("millimetre", "mm"),
    ("gram", "g"),
    ("kilogram", "kg"),
    ("milligram", "mg"),
    ("tonne", "t"),
    ("litre", "L"),
    ("millilitre", "mL"),
    ("second", "s"),
    ("minute", "min"),
    ("hour", "h"),
    ("kelvin", "K"),
    ("hertz", "Hz"),
    ("watt", "W"),
    ("joule", "J"),
    ("newton", "N"),
    ("pascal", "Pa"),
    ("volt", "V"),
    ("ampere", "A"),
    ("hectare", "ha"),
]

QUANTITIES = [
    ("metre", "length"),
    ("kilogram", "mass"),
    ("second", "time"),
    ("ampere", "electric current"),
    ("kelvin", "temperature"),
    ("newton", "force"),
    ("joule", "energy"),
    ("watt", "power"),
    ("pascal", "pressure"),
    ("hertz", "frequency"),
    ("volt", "voltage"),
    ("litre", "volume"),
    ("hectare", "area"),
    ("byte", "an amount of data"),
]

INSTRUMENTS = [
    ("thermometer", "temperature"),
    ("kitchen scale", "mass"),
    ("ruler", "length"),
    ("stopwatch", "time"),
    ("measuring jug", "volume"),
    ("barometer", "air pressure"),
    ("speedometer", "speed"),
    ("voltmeter", "voltage"),
    ("protractor", "angles"),
    ("electricity meter", "electric energy"),
]

# What, the unit that fits, two that do not, and why.
FITTING = [
    ("the height of a door", "metres", ("millimetres", "kilometres"), "a door is about 2 metres high"),
    ("the distance between two cities", "kilometres", ("centimetres", "metres"), "cities are many thousand metres apart"),
    ("the thickness of a coin", "millimetres", ("metres", "kilometres"), "a coin is about 2 millimetres thick"),
    ("the length of a pencil", "centimetres", ("metres", "kilometres"), "a pencil is about 18 centimetres long"),
    ("the mass of an apple", "grams", ("kilograms", "tonnes"), "an apple is about 150 grams"),
    ("the mass of an adult", "kilograms", ("milligrams", "tonnes"), "an adult is about 70 kilograms"),
    ("the mass of a truck", "tonnes", ("grams", "milligrams"), "a truck is many thousand kilograms"),
    ("the mass of a pinch of salt", "milligrams", ("kilograms", "tonnes"), "a pinch of salt is less than a gram"),
    ("the water in a bathtub", "litres", ("millilitres", "cubic kilometres"), "a bathtub holds about 150 litres"),
    ("a spoon of medicine", "millilitres", ("litres", "cubic metres"), "a teaspoon holds about 5 millilitres"),
    ("the water in a swimming pool", "cubic metres", ("millilitres", "teaspoons"), "a pool holds many thousand litres"),
    ("the length of a film", "minutes", ("days", "years"), "a film takes about 100 minutes"),
    ("a short sprint", "seconds", ("hours", "weeks"), "100 metres take about 10 to 20 seconds"),
    ("the age of an adult", "years", ("minutes", "seconds"), "an adult is at least 18 years old"),
    ("a night of sleep", "hours", ("seconds", "weeks"), "most people sleep about 8 hours"),
    ("the area of a farm", "hectares", ("square centimetres", "square millimetres"), "one hectare is 10000 square metres"),
]

# Questions with one fixed answer.
FACTS = [
    ("At what temperature does water freeze?", "At sea level water freezes at 0 degrees Celsius, which is 32 degrees Fahrenheit."),
    ("At what temperature does water boil?", "At sea level water boils at 100 degrees Celsius, which is 212 degrees Fahrenheit."),
    ("What is normal body temperature?", "Normal body temperature is about 37 degrees Celsius."),
    ("What is absolute zero in degrees Celsius?", "Absolute zero is minus 273.15 degrees Celsius."),
    ("How do I convert Celsius to Fahrenheit?", "Multiply by 9, divide by 5, then add 32."),
    ("How do I convert Fahrenheit to Celsius?", "Subtract 32, multiply by 5, then divide by 9."),
    ("How long is an inch in centimetres?", "One inch is exactly 2.54 centimetres."),
    ("How long is a foot in centimetres?", "One foot is exactly 30.48 centimetres."),
    ("How long is a yard in centimetres?", "One yard is exactly 91.44 centimetres."),
    ("How long is a mile in metres?", "One mile is about 1609 metres."),
    ("How many feet are in a mile?", "There are 5280 feet in one mile."),
    ("How long is a nautical mile?", "One nautical mile is exactly 1852 metres."),
    ("How heavy is a pound in grams?", "One pound is about 454 grams."),
    ("How heavy is an ounce in grams?", "One ounce is about 28 grams."),
    ("How heavy is one litre of water?", "One litre of water is about one kilogram."),
    ("How heavy is a cubic metre of water?", "One cubic metre of water is about one tonne."),
    ("Which is heavier, a pound or a kilogram?", "A kilogram is heavier: it is about 2.2 pounds."),
    ("Which is longer, a mile or a kilometre?", "A mile is longer: it is about 1.6 kilometres."),
    ("Which is longer, a metre or a yard?", "A metre is longer: a yard is about 91 centimetres."),
    ("Which is longer, an inch or a centimetre?", "An inch is longer: it is 2.54 centimetres."),
    ("How many millilitres are in a metric teaspoon?", "A metric teaspoon holds 5 millilitres."),
    ("How many millilitres are in a metric cup?", "A metric cup holds 250 millilitres."),
    ("How many tablespoons are in an American cup?", "There are 16 tablespoons in an American cup."),
    ("How many teaspoons are in an American tablespoon?", "There are 3 teaspoons in an American tablespoon."),
    ("How many cups are in an American pint?", "There are 2 cups in an American pint."),
    ("How many eggs are in a dozen?", "There are 12 eggs in a dozen."),
    ("How many eggs are in half a dozen?", "There are 6 eggs in half a dozen."),
    ("How many items are in a gross?", "There are 144 items in a gross, which is 12 dozen."),
    ("How many days are in a year?", "A common year has 365 days and a leap year has 366."),
    ("How many weeks are in a year?", "A year has 52 weeks and one or two days."),
    ("How many days does February have?", "February has 28 days, and 29 in a leap year."),
    ("How often is there a leap year?", "Almost always every 4 years."),
    ("How many years are in a decade?", "There are 10 years in a decade."),
    ("How many years are in a century?", "There are 100 years in a century."),
    ("How many years are in a millennium?", "There are 1000 years in a millennium."),
    ("How many seconds are in an hour?", "There are 3600 seconds in an hour."),
    ("How many seconds are in a day?", "There are 86400 seconds in a day."),
    ("How many minutes are in a day?", "There are 1440 minutes in a day."),
    ("How many hours are in a week?", "There are 168 hours in a week."),
    ("How many degrees are in a circle?", "There are 360 degrees in a circle."),
    ("How many degrees are in a right angle?", "There are 90 degrees in a right angle."),
    ("How many square metres are in a hectare?", "There are 10000 square metres in a hectare."),
    ("How many square centimetres are in a square metre?", "There are 10000 square centimetres in a square metre."),
    ("How many millimetres are in a kilometre?", "There are 1000000 millimetres in a kilometre."),
    ("How many bytes are in a kibibyte?", "There are 1024 bytes in a kibibyte."),
    ("What does the word percent mean?", "Percent means parts per hundred."),
    ("What is the unit of mass in the metric system?", "The base unit of mass is the kilogram."),
    ("What is the unit of length in the metric system?", "The base unit of length is the metre."),
    ("What is the difference between mass and weight?", "Mass is an amount of matter; weight is the force of gravity on it."),
    ("What does 5 km/h mean?", "It means that 5 kilometres are covered in one hour."),
    ("How far does light travel in one second?", "Light travels about 300000 kilometres in one second."),
    ("How fast is sound in air?", "Sound in air covers about 340 metres per second."),
    ("What is a light year?", "A light year is the distance that light travels in one year."),
    ("How long is a marathon?", "A marathon is 42.195 kilometres."),
]

NUMBER_WORDS = {Fraction(1, 2): "half", Fraction(1, 4): "a quarter of", Fraction(3, 4): "three quarters of"}
