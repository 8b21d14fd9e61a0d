"""Which keys a format of rows has no use for: where no data set reads a key, it is refused."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legato.config.schema import RunConfig


@dataclass(frozen=True)
class Unread:
    """``keys`` change nothing in rows of ``formats``."""

    keys: tuple[str, ...]
    formats: tuple[str, ...]
    reason: str

    def may_be_read(self, config: RunConfig) -> bool:
        """Whether any data set has another format, or one that only its rows tell."""
        datasets = [*config.datasets, *config.eval_datasets]
        return any(each.type not in self.formats for each in datasets)


UNREAD = (
    Unread(
        ("roles_to_train", "turns_to_train"),
        ("segments", "text"),
        "segments and plain text have no turns: a segment says itself whether it is trained, and "
        "plain text is trained from end to end",
    ),
    Unread(
        ("chat_template_kwargs",),
        ("segments", "text"),
        "segments and plain text go without a template",
    ),
    Unread(("train_on_inputs",), ("text",), "plain text is trained from end to end already"),
    Unread(
        ("special_tokens_in_text",),
        ("segments",),
        "the control tokens that stand in segments are meant as such",
    ),
)


def unread_keys(config: RunConfig, *, formats: Iterable[str]) -> list[str]:
    """What the rows say against a config that left it to them to tell their format.

    Args:
        config: The run.
        formats: Of all its data sets, as they were found.

    Returns:
        What is wrong, a key at a time. A key that only repeats its default is none: the resolved
        config of an earlier run names them all.
    """
    found = set(formats)
    return [
        f"{key}: {rule.reason}; and the rows are {' and '.join(sorted(found))}. Leave it out"
        for rule in UNREAD
        if found.issubset(rule.formats)
        for key in rule.keys
        if getattr(config, key) != type(config).model_fields[key].get_default()
    ]
