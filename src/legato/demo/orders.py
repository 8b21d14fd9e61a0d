"""Orders in plain English and the JSON they mean, made from a seed.

Two held-out parts: new phrasings of combinations that training never saw, with items and cities
that it did see (what the model must learn); and the same with names that it never saw (what a small
model finds hard, shown for honesty).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path

INSTRUCTION = "Turn the order into JSON with item, color, quantity, city."

TRAINING_PHRASINGS = (
    "{quantity} {color} {item} to {city}, please.",
    "Please send {quantity} {color} {item} to {city}.",
    "I need {quantity} {color} {item} delivered to {city}.",
    "Ship {quantity} {item} in {color} to {city}.",
    "Could {city} get {quantity} {color} {item}?",
    "Our shop in {city} is out of {color} {item}; {quantity} would do.",
    "{city} office here: {quantity} {color} {item}, thanks.",
    "We'd like to order {quantity} {item}, all {color}, for {city}.",
    "Can you get {quantity} {color} {item} over to {city} by Friday?",
    "Order for {city}: {item}, {color}, {quantity} of them.",
    "Put me down for {quantity} {color} {item}. They go to {city}.",
    "The {city} branch wants {quantity} more {item}, the {color} ones.",
    "Hi! {quantity} {item} ({color}) for {city} if you have them.",
    "{color} {item}, {quantity} pieces, deliver to {city}.",
    "Make it {quantity} {color} {item} and send the lot to {city}.",
    "My sister in {city} asked for {quantity} {color} {item}.",
)
HELD_OUT_PHRASINGS = (
    "Would you mail {quantity} {color} {item} to my place in {city}?",
    "For {city}, {quantity} {color} {item} as soon as you can.",
    "A customer from {city} is asking for {quantity} {item}; they should be {color}.",
    "Let's have {quantity} {color} {item} brought to {city} next week.",
    "{quantity} {item} are wanted in {city}. Only {color} ones.",
    "Add {quantity} {color} {item} to the {city} delivery.",
    "Who can bring {city} {quantity} {color} {item}?",
    "We ran short in {city}, so {quantity} {color} {item} it is.",
)
ITEMS = (
    *("apples", "balls", "baskets", "blankets", "books", "boots", "bottles", "boxes"),
    *("candles", "chairs", "clocks", "cups", "gloves", "hats", "kites", "lamps"),
    *("mugs", "pens", "pillows", "plates", "ropes", "shirts", "tables", "umbrellas"),
)
CITIES = (
    *("Berlin", "Boston", "Cairo", "Chicago", "Dublin", "Kyoto", "Lima", "London"),
    *("Madrid", "Moscow", "Oslo", "Paris", "Rome", "Sydney", "Tokyo", "Vienna"),
)
UNSEEN_ITEMS = ("bells", "drums", "flutes", "helmets", "kettles", "rugs", "sails", "vases")
UNSEEN_CITIES = ("Athens", "Denver", "Leipzig", "Nairobi", "Porto", "Seoul")
COLORS = ("black", "blue", "brown", "green", "grey", "orange", "pink", "red", "white", "yellow")
NUMBER_WORDS = {
    2: "two",
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    8: "eight",
    9: "nine",
    10: "ten",
    11: "eleven",
    12: "twelve",
}


@dataclass(frozen=True)
class Order:
    """What one order asks for, and how it is said.

    Attributes:
        text: The order in plain English, one line.
        phrasing: The pattern that ``text`` was made from.
        item: Plural noun.
        color: Color word.
        quantity: From 2 to 12.
        city: City name.
    """

    text: str
    phrasing: str
    item: str
    color: str
    quantity: int
    city: str

    @property
    def answer(self) -> str:
        """The JSON that the model must produce, on one line."""
        return json.dumps(
            {
                "item": self.item,
                "color": self.color,
                "quantity": self.quantity,
                "city": self.city,
            }
        )

    @property
    def prompt_messages(self) -> list[dict[str, str]]:
        """What the model is given, as chat messages."""
        return [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": self.text},
        ]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The same with the right answer."""
        return [*self.prompt_messages, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True)
class OrderData:
    """The three parts of the demo's data."""

    train: tuple[Order, ...]
    held_out: tuple[Order, ...]
    unseen_names: tuple[Order, ...]


def make_orders(*, seed: int, num_train: int, num_held_out: int, num_unseen: int) -> OrderData:
    """Make the demo's orders: a pure function of its arguments.

    No (item, city) pair of a held-out order, and no phrasing of one, is in the training part.

    Args:
        seed: Root of the random choices.
        num_train: Orders to train on.
        num_held_out: Orders with known items and cities, at most 96: a quarter of all pairs.
        num_unseen: Orders with items and cities that training never names, at most 48.

    Returns:
        The three parts.
    """
    rng = random.Random(seed)
    pairs = list(product(ITEMS, CITIES))
    rng.shuffle(pairs)
    num_kept_back = len(pairs) // 4
    unseen_pairs = list(product(UNSEEN_ITEMS, UNSEEN_CITIES))
    rng.shuffle(unseen_pairs)
    return OrderData(
        train=_orders(rng, pairs[num_kept_back:], TRAINING_PHRASINGS, num_train),
        held_out=_orders(rng, pairs[:num_kept_back], HELD_OUT_PHRASINGS, num_held_out),
        unseen_names=_orders(rng, unseen_pairs, HELD_OUT_PHRASINGS, num_unseen),
    )


def write_messages(path: Path, orders: tuple[Order, ...]) -> None:
    """Write one ``{"messages": [...]}`` a line: a data file of type ``messages``."""
    lines = [json.dumps({"messages": order.messages}) + "\n" for order in orders]
    path.write_text("".join(lines), encoding="utf-8")


def _orders(
    rng: random.Random, pairs: list[tuple[str, str]], phrasings: tuple[str, ...], count: int
) -> tuple[Order, ...]:
    """Every phrasing, pair and color about equally often, in an order of the seed's."""
    orders = []
    for i in range(count):
        item, city = pairs[i % len(pairs)]
        color = COLORS[i % len(COLORS)]
        quantity = rng.choice(list(NUMBER_WORDS))
        said = rng.choice([str(quantity), NUMBER_WORDS[quantity]])
        phrasing = phrasings[i % len(phrasings)]
        text = phrasing.format(quantity=said, color=color, item=item, city=city)
        text = text[0].upper() + text[1:]
        orders.append(Order(text, phrasing, item, color, quantity, city))
    rng.shuffle(orders)
    return tuple(orders)
