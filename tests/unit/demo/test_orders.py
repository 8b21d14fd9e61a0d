"""The demo's data: the same from the same seed, and honest about what is held out."""

from __future__ import annotations

import json
import re
from pathlib import Path

from legato.demo.orders import (
    NUMBER_WORDS,
    UNSEEN_CITIES,
    UNSEEN_ITEMS,
    Order,
    make_orders,
    write_messages,
)

DATA = make_orders(seed=0, num_train=384, num_held_out=80, num_unseen=24)


def test_an_order_and_its_answer_read_like_this() -> None:
    order = Order(
        text="Six red mugs to Oslo, please.",
        phrasing="{quantity} {color} {item} to {city}, please.",
        item="mugs",
        color="red",
        quantity=6,
        city="Oslo",
    )
    assert order.messages == [
        {
            "role": "system",
            "content": "Turn the order into JSON with item, color, quantity, city.",
        },
        {"role": "user", "content": "Six red mugs to Oslo, please."},
        {
            "role": "assistant",
            "content": '{"item": "mugs", "color": "red", "quantity": 6, "city": "Oslo"}',
        },
    ]


def test_a_seed_gives_the_same_orders_and_another_seed_others() -> None:
    again = make_orders(seed=0, num_train=384, num_held_out=80, num_unseen=24)
    other = make_orders(seed=1, num_train=384, num_held_out=80, num_unseen=24)
    assert again == DATA
    assert other.train != DATA.train
    assert [len(part) for part in (DATA.train, DATA.held_out, DATA.unseen_names)] == [384, 80, 24]


def test_held_out_phrasings_and_combinations_are_never_trained_on() -> None:
    trained_pairs = {(order.item, order.city) for order in DATA.train}
    trained_phrasings = {order.phrasing for order in DATA.train}
    assert trained_pairs.isdisjoint((order.item, order.city) for order in DATA.held_out)
    assert trained_phrasings.isdisjoint(order.phrasing for order in DATA.held_out)


def test_held_out_items_and_cities_are_trained_on_and_unseen_ones_are_not() -> None:
    items = {order.item for order in DATA.train}
    cities = {order.city for order in DATA.train}
    assert {order.item for order in DATA.held_out} <= items
    assert {order.city for order in DATA.held_out} <= cities
    assert items.isdisjoint(UNSEEN_ITEMS)
    assert cities.isdisjoint(UNSEEN_CITIES)
    assert {order.item for order in DATA.unseen_names} <= set(UNSEEN_ITEMS)
    assert {order.city for order in DATA.unseen_names} <= set(UNSEEN_CITIES)


def test_every_text_says_what_its_answer_holds_and_leaves_nothing_open() -> None:
    for order in (*DATA.train, *DATA.held_out, *DATA.unseen_names):
        words = re.findall(r"[a-z0-9]+", order.text.lower())
        said = {str(order.quantity), NUMBER_WORDS[order.quantity]} & set(words)
        assert len(said) == 1, order.text
        assert {order.item, order.color, order.city.lower()} <= set(words), order.text
        assert "{" not in order.text
        assert order.text[0] == order.text[0].upper()


def test_numbers_are_said_in_words_and_in_digits() -> None:
    in_digits = sum(any(char.isdigit() for char in order.text) for order in DATA.train)
    assert 130 < in_digits < 254  # a third to two thirds of 384


def test_the_data_file_has_one_conversation_a_line(tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    write_messages(path, DATA.train[:3])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["messages"] for row in rows] == [order.messages for order in DATA.train[:3]]
