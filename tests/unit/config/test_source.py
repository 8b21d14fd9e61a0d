"""YAML as text with places."""

from __future__ import annotations

from pathlib import Path

import pytest

from legato.config.load import load_config
from legato.config.source import Override, read_override, read_yaml


def test_plain_words_stay_what_was_typed() -> None:
    text = "a: 012\nb: 1:30\nc: off\nd: yes\ne: 1_000\nf: 2e-5\ng: 2020-01-01\nh: 0x10\n"
    assert read_yaml(text, name="my.yaml").data == {
        "a": "012",
        "b": "1:30",
        "c": "off",
        "d": "yes",
        "e": "1_000",
        "f": "2e-5",
        "g": "2020-01-01",
        "h": "0x10",
    }


def test_null_words_are_null_unless_quoted() -> None:
    layer = read_yaml('a: null\nb: None\nc: ~\nd:\ne: "null"\nf: "None"\n', name="my.yaml")
    assert layer.data == {"a": None, "b": None, "c": None, "d": None, "e": "null", "f": "None"}


def test_free_form_mappings_read_scalars_as_yaml_1_2() -> None:
    text = 'chat_template_kwargs: {think: false, n: 3, x: 1.5, v: "1.0", s: off, z: 007}\n'
    assert read_yaml(text, name="my.yaml").data["chat_template_kwargs"] == {
        "think": False,
        "n": 3,
        "x": 1.5,
        "v": "1.0",
        "s": "off",
        "z": "007",
    }


def test_every_key_and_entry_has_its_line() -> None:
    layer = read_yaml("a: 1\nb:\n  - c: 1\n\n  - d: 1\n", name="my.yaml")
    assert layer.lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", 0): 3,
        ("b", 0, "c"): 3,
        ("b", 1): 5,
        ("b", 1, "d"): 5,
    }
    assert layer.place(("b", 1, "e")) == "my.yaml:5"
    assert layer.place(("nowhere",)) == "my.yaml"


@pytest.mark.parametrize(
    ("text", "name", "problem"),
    [
        ("a: 1\na: 2\n", "my.yaml", "a: set twice, on lines 1 and 2"),
        ("a: !!python/name:os.system x\n", "my.yaml", "a: YAML tags"),
        ("a: !mine {b: 1}\n", "my.yaml", "a: YAML tags (!mine) aren't read"),
        ("a: &x 1\nb: *x\n", "my.yaml:1", "anchors and aliases (x) aren't read"),
        ("a: b: c\n", "my.yaml:1", "not readable as YAML: mapping values are not allowed here"),
        ("a: 1\n\tb: 2\n", "my.yaml:2", "not readable as YAML: found character '\\t'"),
        ("- a\n- b\n", "my.yaml", "expected keys and values"),
        ("", "my.yaml", "the file holds no keys"),
        ("# only a comment\n", "my.yaml", "the file holds no keys"),
        ("a: 1\n---\nb: 2\n", "my.yaml:2", "not readable as YAML"),
        ("a: " + "[" * 5000, "my.yaml", "nested too deeply"),
        ("a: " + "[" * 33 + "]" * 33, "my.yaml", "a: nested too deeply: more than 32 levels"),
        ("a: {b: " + "[" * 300 + "]" * 300 + "}", "my.yaml", "a: nested too deeply"),
        ("? [a, b]\n: 1\n", "my.yaml", "a key must be a word"),
    ],
)
def test_what_is_not_a_plain_tree_is_a_problem(text: str, name: str, problem: str) -> None:
    layer = read_yaml(text, name="my.yaml")
    assert layer.name == name
    assert problem in str(layer.problems[0])


def test_what_comes_after_reading_takes_as_many_levels_as_are_read(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "recipe: full_finetune_single_device\nmodel: m\noptimizer: {lr: 1}\ndataset: a.jsonl\n"
        f"chat_template_kwargs: {{b: {'[' * 31}{']' * 31}}}\n"
    )
    deepest = ".".join("a" * 31) + "=" + "[" * 32 + "]" * 32
    load_config(str(tmp_path / "my.yaml"), [f"chat_template_kwargs.{deepest}"])


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("a=b=c", ("a",), "b=c"),
        ("a.b=1", ("a", "b"), "1"),
        ("datasets.0.path=x.json", ("datasets", 0, "path"), "x.json"),
        ("device=cuda:0", ("device",), "cuda:0"),
        ("model=C: x", ("model",), "C: x"),
        ("epochs=None", ("epochs",), None),
        ("epochs=", ("epochs",), None),
        ("betas=[0.9, 0.95]", ("betas",), ["0.9", "0.95"]),
        ("columns={prompt: q}", ("columns",), {"prompt": "q"}),
        ("split='train[:10]'", ("split",), "train[:10]"),
        ('name="null"', ("name",), "null"),
        ("chat_template_kwargs.think=false", ("chat_template_kwargs", "think"), False),
        ("chat_template_kwargs={n: 3}", ("chat_template_kwargs",), {"n": 3}),
    ],
)
def test_an_override_is_everything_after_the_first_equals_sign(
    argument: str, path: tuple[str | int, ...], value: object
) -> None:
    assert read_override(argument) == Override(argument, path, value)


def test_a_tilde_removes() -> None:
    assert read_override("~a.b") == Override("~a.b", ("a", "b"), remove=True)


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("word", "word: expected key=value or ~key"),
        ("=3", "=3: expected key=value or ~key"),
        ("a..b=3", "a..b=3: expected key=value or ~key"),
        ("~a=3", "~a=3: expected ~key, which removes a key"),
        ("~", "~: expected ~key, which removes a key"),
        (".".join("a" * 3000) + "=1", "a." * 20 + "...: nested too deeply: more than 32 levels"),
        (
            "~" + ".".join("a" * 33),
            "~" + "a." * 19 + "a...: nested too deeply: more than 32 levels",
        ),
        ("a={b: 1", "a={b: 1: not readable as YAML: expected ',' or '}', but got '<stream end>'"),
    ],
)
def test_what_is_no_override_is_a_problem(argument: str, problem: str) -> None:
    assert str(read_override(argument)) == problem
