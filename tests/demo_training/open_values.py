"""Values of the second stage: a function for each kind, from an OpenVocabulary ``o`` and a random source ``r``."""

from vocabulary import DAYS, MONTHS, words

STREET = words("Street Road Lane Avenue Square Hill Park Way Court Bridge")
DOMAIN = words("com org net io co.uk de fr info dev")
LINK = ["the", "of", "and", "with", "for", "a", "in", "on", "to", "by", "from"]
TITLES = [""] * 6 + ["Dr ", "Mrs ", "Mr ", "Dr. ", "Mr. ", "Ms. ", "St. ", "J. ", "A. K. "]
UNITS = ["", " kg", " m", " cm", "%", " km", " litres", " hours", " miles", " grams", " degrees", " GB", "cm", "kg"]
SIGNS = "!@#$%&*"
DIGITS, UPPER, LOWER = "0123456789", "ABCDEFGHJKLMNPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz"


def letters(r, n, of=DIGITS):
    return "".join(r.choice(of) for _ in range(n))


def word(o, r):
    return o.any(r)


def phrase(o, r):
    many = range(r.choice([1, 1, 2, 3]))
    return " ".join(r.choice(o.adjs) if r.random() < 0.4 else o.noun(r) for _ in many) + " " + o.noun(r)


def proper(o, r):
    return o.proper(r)


def fullname(o, r):
    return r.choice(TITLES) + o.proper(r) + " " + o.proper(r)


def place(o, r):
    ways = [
        lambda: o.proper(r),
        lambda: r.choice(["Port ", "New ", "Saint ", "Upper ", "East ", "Mount ", "Lake "]) + o.proper(r),
        lambda: f"{r.randint(1, 250)} {o.proper(r)} {r.choice(STREET)}",
        lambda: f"{o.proper(r)} {r.choice(STREET)} {r.randint(1, 250)}",
    ]
    return r.choice(ways)()


def pseudo(o, r):
    return o.made_up(r)


def digits(o, r):
    return letters(r, r.choice([1, 2, 3, 4, 4, 4, 5, 6, 6, 7, 8]))


def alnum(o, r):
    ways = [
        lambda: letters(r, r.randint(1, 3), UPPER) + letters(r, r.randint(1, 4)),
        lambda: letters(r, r.randint(1, 3), UPPER) + "-" + letters(r, r.randint(1, 5)),
        lambda: letters(r, r.randint(3, 8), UPPER + "23456789"),
        lambda: letters(r, r.randint(4, 8), LOWER + DIGITS),
        lambda: letters(r, r.randint(4, 8), UPPER + LOWER + "23456789"),
        lambda: letters(r, r.randint(1, 3)) + r.choice(UPPER),
        lambda: "-".join(letters(r, r.randint(2, 4), UPPER + DIGITS) for _ in range(r.randint(2, 3))),
    ]
    return r.choice(ways)()


def hyphen(o, r):
    separator = r.choice("----__..+/")
    parts = [o.any(r) for _ in range(r.choice([1, 2, 2, 2, 3]))]
    if r.random() < 0.2:
        parts = [p.capitalize() for p in parts]
    if len(parts) == 1 or r.random() < 0.6:
        parts.append(letters(r, r.randint(1, 4)))
    return separator.join(parts)


def password(o, r):
    ways = [
        lambda: o.any(r) + letters(r, r.randint(1, 4)),
        lambda: o.any(r).capitalize() + letters(r, r.randint(1, 4)),
        lambda: " ".join(o.any(r) for _ in range(4)),
        lambda: o.any(r).capitalize() + r.choice(SIGNS) + letters(r, r.randint(1, 3)),
        lambda: o.any(r).capitalize() + o.any(r).capitalize() + letters(r, r.randint(0, 2)),
        lambda: letters(r, 2) + o.any(r) + r.choice(SIGNS) + o.any(r),
    ]
    return r.choice(ways)()


def phone(o, r):
    ways = [
        lambda: f"{letters(r, 3)}-{letters(r, 4)}",
        lambda: f"{letters(r, 3)} {letters(r, 3)} {letters(r, 4)}",
        lambda: f"+{letters(r, 2)} {letters(r, 3)} {letters(r, 6)}",
        lambda: "0" + letters(r, 9),
    ]
    return r.choice(ways)()


def measure(o, r):
    amount = r.choice([letters(r, 1) + "." + letters(r, r.randint(1, 3)), str(r.randint(1, 999))])
    return amount + r.choice([*UNITS, " " + o.noun(r) + "s"])


def time(o, r):
    h, m = r.randint(0, 23), r.randint(0, 59)
    half = ["am", "pm"]
    ways = [
        f"{h}:{m:02d}",
        f"{h:02d}:{m:02d}",
        f"{1 + h % 12}:{m:02d} {r.choice(half)}",
        f"{1 + h % 12}{r.choice(half)}",
        f"half past {r.choice(['six', 'two', 'nine', 'eleven', 'four'])}",
        f"{1 + h % 12} {r.choice(['am', 'pm', 'in the morning', 'in the evening'])}",
        f"{1 + h % 12}:{m:02d}{r.choice(half)}",
        f"{1 + h % 12}{r.choice(half)} on {r.choice(DAYS)}",
        f"{h}:{m:02d} on {r.choice(DAYS)}",
    ]
    return r.choice(ways)


def date(o, r):
    month, day, year = r.choice(MONTHS), r.randint(1, 28), r.randint(1940, 2049)
    ways = [
        f"{month} {day}",
        f"{day} {month}",
        f"{month} {day}, {year}",
        f"{day} {month} {year}",
        f"{year}-{r.randint(1, 12):02d}-{day:02d}",
        f"{r.randint(1, 12)}/{day}/{year}",
        r.choice(DAYS),
        "next " + r.choice(DAYS),
        f"{r.choice(DAYS)} at {r.randint(1, 12)}",
        f"{month} {year}",
        f"the {day}th of {month}",
        str(year),
    ]
    return r.choice(ways)


def price(o, r):
    ways = [str(r.randint(1, 9999)), f"{r.randint(1, 99)},{letters(r, 3)}", f"{r.randint(0, 999)}.{letters(r, 2)}"]
    x = r.choice(ways)
    return r.choice([f"${x}", f"€{x}", f"£{x}", f"{x} euros", f"{x} dollars", f"{x} EUR", f"{x} {o.noun(r)}s"])


def quoted(o, r):
    return '"' + " ".join(o.any(r) for _ in range(r.randint(2, 4))) + '"'


def web(o, r):
    ways = [
        lambda: f"{o.any(r)}@{o.any(r)}.{r.choice(DOMAIN)}",
        lambda: f"{o.any(r)}.{o.any(r)}@{o.any(r)}.{r.choice(DOMAIN)}",
        lambda: f"{o.any(r)}.{r.choice(DOMAIN)}",
        lambda: "@" + o.any(r) + letters(r, r.randint(0, 2)),
        lambda: f"{letters(r, 3)}.{letters(r, 3)}.{letters(r, 1)}.{letters(r, 2)}",
    ]
    return r.choice(ways)()


def series(o, r):
    form = r.choice(["{}, {} and {}", "{} and {}", "{} or {}", "{} with {}"])
    return form.format(*(o.noun(r) for _ in range(3)))


def where(o, r):
    preposition = r.choice(["in", "under", "behind", "near", "next to", "on", "inside"])
    ways = [
        f"{preposition} the {r.choice([o.noun(r), r.choice(o.adjs) + ' ' + o.noun(r)])}",
        f"in {o.proper(r)}",
        f"at {o.proper(r)} {r.choice(STREET)}",
        f"in room {letters(r, r.choice([1, 2, 3]))}",
        f"on {r.choice(['floor', 'level', 'shelf', 'page'])} {letters(r, r.choice([1, 2]))}",
        f"at the {o.noun(r)}",
    ]
    return r.choice(ways)


def sentence(o, r):
    start = r.choice(["", "", "to ", "the ", "a ", "all "])
    many = range(r.randint(2, 5))
    return start + " ".join(o.any(r) if r.random() < 0.65 else r.choice(LINK) for _ in many) + " " + o.noun(r)


MAKE = {
    "word": word,
    "phrase": phrase,
    "proper": proper,
    "fullname": fullname,
    "place": place,
    "pseudo": pseudo,
    "digits": digits,
    "alnum": alnum,
    "hyphen": hyphen,
    "pass": password,
    "phone": phone,
    "measure": measure,
    "time": time,
    "date": date,
    "price": price,
    "quoted": quoted,
    "web": web,
    "series": series,
    "where": where,
    "sentence": sentence,
}
# How often each kind is drawn; "known" is a kind of the closed lists.
WEIGHTS = {
    "word": 10,
    "phrase": 9,
    "proper": 11,
    "fullname": 5,
    "place": 5,
    "pseudo": 5,
    "digits": 9,
    "alnum": 7,
    "hyphen": 10,
    "pass": 4,
    "phone": 3,
    "measure": 4,
    "time": 4,
    "date": 4,
    "price": 3,
    "quoted": 2,
    "web": 2,
    "series": 2,
    "where": 3,
    "known": 6,
    "sentence": 4,
}
