"""Numbers as a person reads them in a sentence."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """``1 row``, ``2,000 rows``, ``1 process``, ``2 processes``.

    Args:
        number: How many.
        noun: Of what, one of them.
        plural: Several of them; left out: with an s.

    Returns:
        Both, the number with a comma before each three digits.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
