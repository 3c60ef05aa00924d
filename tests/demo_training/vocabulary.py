"""The closed lists of the first stage: words, kinds of values, attributes, and how a fact's key is made of them."""

import re


def words(text):
    return [w.strip().replace("_", " ") for w in text.split()]


NAMES = words("""Ada Alan Alice Amir Ana Anders Anika Anton Arthur Aisha Beatriz Ben Bianca Boris Bruno
Carla Carlos Cecil Chen Chloe Clara Cyrus Dana Daniel Dario Diana Dmitri Dora Edgar Elena Eli Elsa Emil
Emma Eric Esther Eva Farid Fatima Felix Fiona Frank Freya Gabriel Georg Gina Grace Greta Gustav Hana Hans
Harriet Hector Helen Henry Hilda Hiro Hugo Ian Ida Igor Ines Ingrid Irene Iris Ivan Jack Jana Jasper Jin
Joan Jonas Jorge Judith Julia Kai Karim Karla Kate Kenji Klara Lars Laura Lea Leo Lena Lin Louis Lucia
Luka Mabel Magnus Malik Mara Marco Maria Martin Maya Mei Milan Mina Mira Moritz Nadia Naomi Nina Noah
Nora Olaf Oleg Olga Omar Oscar Otto Pablo Paula Pedro Petra Quentin Rania Ravi Rita Robin Rosa Ruth Sam
Sara Selma Sergei Silas Simon Sofia Stefan Sven Tara Theo Tilda Tom Uma Ursula Vera Victor Viola Walter
Wanda Xavier Yara Yuki Yusuf Zara Zoe""")
COLOURS = words("""red blue green yellow orange purple pink brown black white grey silver gold turquoise
violet indigo crimson scarlet teal maroon navy beige ivory olive coral salmon amber lime mint lavender
magenta cyan khaki bronze copper cream peach plum ruby emerald sapphire mustard charcoal rust jade""")
CITIES = words("""Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Stockholm Helsinki
Copenhagen Warsaw Budapest Athens Zurich Geneva Brussels Amsterdam Hamburg Munich Milan Naples Venice
Turin Seville Porto Lyon Nice Bordeaux Krakow Riga Tallinn Vilnius Sofia Bucharest Belgrade Zagreb
Istanbul Ankara Cairo Tunis Casablanca Nairobi Accra Lagos Dakar Tokyo Osaka Kyoto Seoul Busan Beijing
Shanghai Taipei Hanoi Bangkok Manila Jakarta Singapore Delhi Mumbai Chennai Karachi Dhaka Colombo Sydney
Melbourne Perth Auckland Wellington Toronto Montreal Vancouver Boston Chicago Denver Dallas Houston
Seattle Portland Phoenix Miami Atlanta Havana Lima Quito Bogota Santiago Montevideo Brasilia Salvador""")
ANIMALS = words("""cat dog fox wolf bear otter badger hedgehog rabbit hare deer moose elk horse donkey
zebra giraffe lion tiger leopard panther lynx elephant rhino hippo camel llama goat sheep cow pig owl
eagle falcon hawk raven crow magpie sparrow robin finch swan goose duck heron stork penguin seal walrus
dolphin whale shark salmon trout octopus squid crab lobster turtle tortoise lizard gecko snake frog toad
newt beetle moth bee wasp ant spider squirrel beaver mole bat koala panda kangaroo wombat lemur gibbon""")
FOODS = words("""pizza pasta risotto curry ramen sushi tacos paella goulash lasagna pancakes waffles
porridge omelette salad soup stew dumplings falafel hummus cheesecake brownies tiramisu ice_cream
apple_pie chocolate strawberries mangoes cherries walnuts olives pretzels bagels noodles burritos
pierogi gnocchi quiche fondue couscous lentils mushrooms spinach potatoes""")
SPORTS = words("""tennis football basketball rugby cricket hockey golf swimming rowing sailing climbing
skiing boxing fencing archery judo karate cycling running surfing badminton volleyball handball chess
curling skating squash darts diving wrestling""")
MUSIC = words("""piano violin cello guitar flute drums trumpet saxophone clarinet harp accordion banjo oboe
trombone organ mandolin ukulele bassoon viola harmonica""")
MONTHS = words("""January February March April May June July August September October November December""")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
NATURE = words("""amber birch cedar cloud comet coral crystal dune ember fern flint frost glacier grove
harbor hazel island ivy lagoon lantern laurel maple marble meadow mesa mist moon moss nebula oak ocean
onyx opal orchid pebble pine planet prairie quartz rain reef ridge river rose sage shadow silver sky snow
spruce star stone storm summit sun thistle thunder tide tulip valley velvet willow wind winter""")
SYL = [
    c + v
    for c in [
        "b",
        "d",
        "f",
        "g",
        "h",
        "j",
        "k",
        "l",
        "m",
        "n",
        "p",
        "r",
        "s",
        "t",
        "v",
        "w",
        "z",
        "br",
        "dr",
        "fr",
        "gr",
        "kr",
        "pl",
        "st",
        "tr",
        "sh",
        "ch",
    ]
    for v in "aeiou"
]
CODA = ["", "", "", "n", "r", "l", "s", "k", "x", "m", "th", "ck"]


def pseudo(r, lo=2, hi=3):
    return "".join(r.choice(SYL) for _ in range(r.randint(lo, hi))) + r.choice(CODA)


def digits(n):
    return lambda r: "".join(r.choice("0123456789") for _ in range(n))


VALUES = {
    "code": digits(4),
    "code6": digits(6),
    "room": lambda r: str(r.randint(2, 999)),
    "seat": lambda r: f"{r.randint(1, 60)}{r.choice('ABCDEF')}",
    "flight": lambda r: "".join(r.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(2)) + str(r.randint(100, 9999)),
    "name": lambda r: r.choice(NAMES) if r.random() < 0.7 else pseudo(r).capitalize(),
    "fullname": lambda r: r.choice(NAMES) + " " + pseudo(r).capitalize(),
    "colour": lambda r: r.choice(["", "", "", "dark ", "light "]) + r.choice(COLOURS),
    "city": lambda r: r.choice(CITIES) if r.random() < 0.85 else pseudo(r).capitalize(),
    "date": lambda r: f"{r.choice(MONTHS)} {r.randint(1, 28)}",
    "day": lambda r: r.choice(DAYS),
    "time": lambda r: f"{r.randint(0, 23)}:{r.randint(0, 59):02d}",
    "animal": lambda r: r.choice(ANIMALS),
    "password": lambda r: f"{r.choice(NATURE)}-{r.choice(ANIMALS + NATURE)}-{r.randint(10, 99)}",
    "amount": lambda r: r.choice(["${}", "{} euros", "${}", "{} pounds"]).format(r.randint(5, 9999)),
    "number": lambda r: str(r.randint(1, 99)),
    "word": lambda r: pseudo(r),
    "Word": lambda r: pseudo(r).capitalize(),
    "food": lambda r: r.choice(FOODS),
    "sport": lambda r: r.choice(SPORTS),
    "music": lambda r: r.choice(MUSIC),
    "phone": lambda r: f"{digits(3)(r)}-{digits(4)(r)}",
}

PLACES = words("""locker garage shed cabin studio boat attic cellar office gym pool lab workshop barn
archive vault greenhouse bike gate mailbox desk safe suitcase elevator flat kitchen library storage
parking alarm laptop router tablet phone printer server camera scooter trailer van""")
RELATIONS = words("""mother father sister brother aunt uncle cousin grandmother grandfather wife husband son
daughter niece nephew neighbour boss colleague friend best_friend teacher doctor dentist landlord
roommate manager coach lawyer plumber gardener cat dog parrot horse baby partner flatmate""")
THINGS = words("""office hotel museum school hospital library station harbour airport bakery theatre
garage clinic village club team company farm embassy castle market cinema warehouse studio factory""")


def attributes():
    out = []
    for p in PLACES:
        for noun, kind in [("code", "code"), ("password", "password"), ("key number", "room"), ("pin", "code")]:
            out.append((f"{p} {noun}", kind, ""))
    for p in words("car bike front_door coat tent jacket backpack kitchen bedroom umbrella scarf boat van sofa hat"):
        out.append((f"{p} colour", "colour", ""))
    for t in ["colour", "city", "animal", "food", "sport", "number", "name", "day", "word"]:
        noun = {"sport": "sport", "word": "word", "day": "day of the week"}.get(t, t)
        out += [(f"favourite {noun}", t, ""), (f"least favourite {noun}", t, ""), (f"lucky {noun}", t, "")]
    for e in words("""dentist_appointment exam wedding job_interview concert flight_home graduation party
                      check-up driving_test house_move trial rehearsal audition"""):
        out += [(e, "date", "on "), (f"{e} time", "time", ""), (f"{e} date", "date", "")]
    for e in words("train bus ferry meeting lunch yoga_class piano_lesson shift taxi doctor_visit dinner"):
        out += [(f"next {e}", "time", "at "), (f"{e} time", "time", "")]
    for n in words("order ticket case member invoice account badge passport policy tracking booking"):
        out += [(f"{n} number", "code6" if n != "badge" else "code", "")]
    for n in words("doctor dentist teacher boss landlord lawyer plumber tutor therapist barber coach"):
        out += [(f"{n}'s name", "name", ""), (f"{n}'s phone number", "phone", ""), (f"{n}'s surname", "Word", "")]
    for n in words("rent budget phone_bill salary electricity_bill deposit train_fare gas_bill allowance refund"):
        out.append((n, "amount", ""))
    for n in words("code_word project_name username safe_word street_name nickname middle_name screen_name"):
        out.append((n, "Word" if "name" in n and n not in ("username", "screen name") else "word", ""))
    out += [
        ("name", "name", ""),
        ("full name", "fullname", ""),
        ("age", "number", ""),
        ("shoe size", "number", ""),
        ("home town", "city", ""),
        ("birthplace", "city", ""),
        ("home city", "city", ""),
        ("holiday destination", "city", ""),
        ("next stop", "city", ""),
        ("birthday", "date", "on "),
        ("instrument", "music", ""),
        ("spirit animal", "animal", ""),
        ("pet", "animal", ""),
        ("mascot", "animal", ""),
        ("house number", "room", ""),
        ("room number", "room", ""),
        ("seat number", "seat", ""),
        ("seat", "seat", ""),
        ("flight number", "flight", ""),
        ("licence plate", "flight", ""),
        ("phone number", "phone", ""),
        ("postcode", "code6", ""),
        ("wifi password", "password", ""),
        ("email password", "password", ""),
        ("day off", "day", "on "),
        ("alarm time", "time", ""),
        ("bedtime", "time", "at "),
        ("deadline", "date", "on "),
        ("height in cm", "room", ""),
        ("table number", "number", ""),
        ("bus line", "number", ""),
        ("platform", "number", ""),
        ("partner", "name", ""),
        ("best friend", "name", ""),
        ("wine", "word", ""),
        ("favourite instrument", "music", ""),
        ("breakfast", "food", ""),
        ("pizza topping", "food", ""),
        ("tea", "word", ""),
        ("hair colour", "colour", ""),
        ("eye colour", "colour", ""),
    ]
    return out


ATTRIBUTES = attributes()


def draw_key(r, attrs=None, relations=None, names=None, things=None):
    """A fact key as the user says it, e.g. "my sister's locker code", with its value kind."""
    attr, kind, prep = r.choice(attrs or ATTRIBUTES)
    u = r.random()
    if u < 0.32:
        who = "my "
    elif u < 0.42:
        who = "the "
    elif u < 0.72:
        who = f"my {r.choice(relations or RELATIONS)}'s "
    elif u < 0.90:
        who = f"{r.choice(names or NAMES)}'s "
    elif u < 0.95:
        who = f"the {r.choice(things or THINGS)}'s "
    else:
        who = "our "
    return who + attr, kind, prep


def yours(key):
    """The same key as the assistant says it."""
    return re.sub(r"(?:(?<=^)|(?<= ))(my|our) ", "your ", key)


def cap(s):
    return s[:1].upper() + s[1:]
