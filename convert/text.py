"""A few pages of plain text, a table and code, on which a conversion is compared with its source. Written for this project."""

TEXT = """\
The ferry leaves at ten past six, before the bakery opens, so the first passengers bring their own coffee. Most of them
know each other. There is the surveyor with her folded maps, two boys who cross for school, and a man who has carried the
same grey parrot to the mainland every Thursday for as long as anyone remembers. "It likes the wind," he says, if asked.

A recurrent network reads a text as a traveller reads a road: it keeps no copy of the miles behind, only what they did to
it. Attention keeps the copy and looks things up. Each has its price. The first can forget; the second grows with every
word. A hybrid does both, and the question for its maker is how few of the expensive layers are enough.

How to keep a sourdough starter alive
1. Once a week, throw away all but a spoonful.
2. Add 50 g of flour and 50 g of water at about 24 degrees.
3. Leave it on the counter until it has doubled, usually four to six hours.
4. Put it back in the fridge. If a grey liquid stands on top, pour it off; if it turns pink, start anew.

def moving_average(values, width):
    \"\"\"The mean of each ``width`` neighbours; shorter than the input by width - 1.\"\"\"
    if width < 1:
        raise ValueError(f"width is {width}, expected at least 1")
    total, result = 0.0, []
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        if i >= width - 1:
            result.append(total / width)
    return result

for name, count in sorted(counts.items(), key=lambda pair: -pair[1])[:10]:
    print(f"{name:<20} {count:>6}")

| river   | length (km) | mouth         |
|---------|-------------|---------------|
| Danube  | 2,850       | Black Sea     |
| Rhine   | 1,233       | North Sea     |
| Tagus   | 1,007       | Atlantic      |

In 1821 the harbour froze for nineteen days. The town council met in the schoolhouse, resolved to buy forty sacks of
barley from the monastery, and then spent most of the evening arguing about who should fetch them. The minutes, which
survive, record eleven speeches and one song. Oats were fetched in the end, by the abbot's nephew, at a price that nobody
wrote down. What the record does show is the order of things: first the cold, then the talk, and only then the food.

Q: If a train travels 84 km in 70 minutes, how far does it go in two hours at the same speed?
A: 84 km in 70 minutes is 1.2 km a minute, and two hours are 120 minutes, so it goes 1.2 x 120 = 144 km.

Liebe Frau Seidel, vielen Dank für Ihren Brief vom 3. Mai. Der Schlüssel liegt wie besprochen beim Nachbarn.
Le musée est fermé le mardi ; les autres jours, il ouvre à dix heures et l'entrée est gratuite après dix-sept heures.

{"id": 4711, "name": "Pump house 3", "state": "running", "pressure_bar": 4.2, "alarms": [], "checked": "2024-11-05"}
"""
