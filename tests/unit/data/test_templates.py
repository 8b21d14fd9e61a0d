"""Variables that a checkpoint's template carries, rendered by transformers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from legato.data.templates import variables_of, with_variables
from legato.errors import ConfigError

TEMPLATE = """  {%- macro mark(text) %}{{ text }}{{ mood }}{% endmacro %}
    {% for message in messages %}
{{ mark(message['content']) }}{% if think is defined and think is false %} [no]{% endif %}
    {% endfor %}
"""


def rendered(template: str, **variables: Any) -> str:
    messages = [[{"role": "user", "content": "two"}, {"role": "user", "content": "three"}]]
    return render_jinja_template(messages, chat_template=template, **variables)[0][0]


@pytest.mark.parametrize(
    "variables",
    [
        {"mood": "!", "think": False},
        {"mood": 'it\'s {% endif %} "so"\n\u00e9 \U0001f600', "think": True},
        {"mood": None},
        {"mood": {"a": [1, -2.5, None, True], "b": {}}},
        {"think": False, "unread": 1},
        {},
    ],
)
def test_a_template_that_carries_variables_renders_as_if_they_were_given(
    variables: dict[str, Any],
) -> None:
    carrying = with_variables(TEMPLATE, variables)
    assert rendered(carrying) == rendered(TEMPLATE, **variables)
    assert list(variables_of(carrying)) == list(variables)


def test_whoever_renders_it_has_the_last_word_and_the_newest_come_first() -> None:
    older = with_variables(TEMPLATE, {"mood": "old", "think": False})
    newer = with_variables(older, {"mood": "new"})
    assert rendered(older, mood="mine") == rendered(TEMPLATE, mood="mine", think=False)
    assert rendered(newer) == rendered(TEMPLATE, mood="new", think=False)
    assert variables_of(newer) == {"mood": "'new'", "think": "False"}
    assert variables_of("{% if a is not defined %}{% set b = 1 %}{% endif %}\n") == {}


@pytest.mark.parametrize("name", ["a-b", "if", "none", "", "a b"])
def test_a_name_that_no_template_could_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="isn't a name that a template could read"):
        with_variables(TEMPLATE, {name: 1})
