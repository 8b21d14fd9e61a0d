"""What tells contents from others in a word that people can compare."""

from __future__ import annotations

from collections.abc import Iterable

from legato.storage.base import Buffer

PREFIX = "xxh3_128:"


def fingerprint(parts: Iterable[Buffer]) -> str:
    """The digest of all bytes of ``parts``, one behind the other.

    Args:
        parts: Bytes, or what holds some: as one, however they are cut.

    Returns:
        ``xxh3_128:`` and 32 hexadecimal digits. Against mistakes, not against people.
    """
    from xxhash import xxh3_128

    digest = xxh3_128()
    for part in parts:
        digest.update(part)
    return PREFIX + digest.hexdigest()
