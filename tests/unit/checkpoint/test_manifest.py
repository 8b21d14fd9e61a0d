"""manifest.json: what goes in comes out, and nothing in it is trusted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from legato.checkpoint.inspection import find_damage
from legato.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Slice,
    check_coverage,
    digest_of,
    finite_metrics,
    parse_manifest,
)
from legato.checkpoint.records import Committed
from legato.errors import FolderFormatError
from legato.storage import LocalStorage

MANIFEST = Manifest(
    run_id="abc",
    branch=1,
    step=500,
    kind="adapter",
    saved_at=1767225600.25,
    reason="final",
    metrics={"eval_loss": 1.25},
    world_size=2,
    files={
        "adapter_config.json": FileEntry.of_bytes(b"{}"),
        "adapter_model.safetensors": FileEntry(
            100, (Slice(40, 20, "aa"), Slice(60, 5, "bb", 4, 10)), header_digest="cc"
        ),
        "state/trainer.json": FileEntry.of_bytes(b"{}"),
    },
)


def edited(**changes: Any) -> bytes:
    """The manifest with fields replaced, and a digest that fits."""
    content = json.loads(MANIFEST.encode()) | changes
    content.pop("digest")
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(content | {"digest": xxhash.xxh3_128_hexdigest(canonical)}).encode()


def test_what_is_encoded_is_parsed_back() -> None:
    assert parse_manifest(MANIFEST.encode(), path="m") == MANIFEST
    assert MANIFEST.has_state
    assert MANIFEST.size_bytes == 104


def test_the_fields_on_disk_are_those_of_format_1() -> None:
    content = json.loads(MANIFEST.encode())
    assert content["format"] == 1
    assert content["files"]["adapter_model.safetensors"] == {
        "size_bytes": 100,
        "header_digest": "cc",
        "slices": [[40, 20, "aa"], [60, 5, "bb", 4, 10]],
    }
    assert content["files"]["adapter_config.json"]["slices"] == [
        [0, 2, xxhash.xxh3_128_hexdigest(b"{}")]
    ]


def test_every_damaged_byte_is_noticed() -> None:
    data = MANIFEST.encode()
    for i in range(len(data)):
        damaged = bytearray(data)
        damaged[i] ^= 1
        try:
            found = parse_manifest(bytes(damaged), path="m")
        except FolderFormatError:
            continue
        # White space and the case of an escape carry no meaning; whatever parses is the same.
        assert found == MANIFEST, (i, bytes(damaged))


@pytest.mark.parametrize("length", [0, 1, 10, 300])
def test_a_truncated_manifest_is_refused(length: int) -> None:
    with pytest.raises(FolderFormatError, match="not a valid manifest"):
        parse_manifest(MANIFEST.encode()[:length], path="m")


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/../b", "a/b/c", "..", ".", "", "a//b", "a/", "x\\y", "a/..",
     "a\0b", "manifest.json"],
)  # fmt: skip
def test_names_that_leave_the_folder_are_refused(name: str) -> None:
    entry = {"size_bytes": 0, "header_digest": None, "slices": []}
    with pytest.raises(FolderFormatError, match="isn't a name"):
        parse_manifest(edited(files={name: entry}), path="m")


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"step": "5"},
        {"kind": "other"},
        {"files": []},
        {"files": {"a": {"size_bytes": -1, "header_digest": None, "slices": []}}},
        {"files": {"a": {"size_bytes": 1, "header_digest": 5, "slices": []}}},
        {"files": {"a": {"size_bytes": 1, "header_digest": None, "slices": [[0, 1]]}}},
        {"files": {"a": {"size_bytes": 1, "header_digest": None, "slices": [[0, 2, "x"]]}}},
        {"files": {"a": {"size_bytes": 1, "header_digest": None, "slices": [[0, -2, "x"]]}}},
        {"files": {"a": {"size_bytes": 9, "header_digest": None, "slices": [[0, 0, "x", 9, 1]]}}},
        {"files": {"a": {"size_bytes": 9, "header_digest": None, "slices": [[9, 1, "x"]]}}},
        {"files": {"a": 3}},
        {"saved_at": "yesterday"},
    ],
)
def test_fields_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FolderFormatError, match="not a valid manifest"):
        parse_manifest(edited(**changes), path="m")


def test_a_newer_format_is_told_from_a_broken_one() -> None:
    with pytest.raises(FolderFormatError, match="newer Legato") as caught:
        parse_manifest(edited(format=2), path="m")
    assert caught.value.facts["newer"]
    with pytest.raises(FolderFormatError) as caught:
        parse_manifest(b"{}", path="m")
    assert not caught.value.facts["newer"]


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        ([(10, 90)], None),
        ([(10, 40), (50, 50)], None),
        ([(50, 50), (10, 40)], None),
        ([(10, 40), (51, 49), (99, 1)], "gap at byte 50"),
        ([(10, 41), (50, 49)], "overlap at byte 50"),
    ],
)
def test_slices_must_cover_every_byte_exactly_once(
    slices: list[tuple[int, int]], problem: str | None
) -> None:
    entry = FileEntry(100, tuple(Slice(start, length, "") for start, length in slices), "h")
    if problem is None:
        check_coverage("f", entry)
    else:
        with pytest.raises(FolderFormatError, match=problem):
            check_coverage("f", entry)


def test_a_gap_in_somebody_elses_manifest_is_found_by_verifying(tmp_path: Path) -> None:
    data = bytes(range(64))
    (tmp_path / "weights").write_bytes(data)
    ends = tuple(Slice(at, 16, digest_of(data[at : at + 16])) for at in (8, 48))
    manifest = dataclasses.replace(
        MANIFEST, files={"weights": FileEntry(64, ends, digest_of(data[:32]))}
    )
    read = parse_manifest(manifest.encode(), path="manifest.json")
    assert find_damage(LocalStorage(), Committed(str(tmp_path), read)) == [
        f"{tmp_path}/weights: the slices overlap at byte 8"
    ]


def test_column_slices_cover_by_their_runs() -> None:
    left = Slice(10, 4, "", num_runs=3, distance_bytes=10)
    right = Slice(14, 6, "", num_runs=3, distance_bytes=10)
    check_coverage("f", FileEntry(40, (left, right), "h"))
    shifted = Slice(15, 6, "", num_runs=3, distance_bytes=10)
    with pytest.raises(FolderFormatError, match="gap at byte 14"):
        check_coverage("f", FileEntry(40, (left, shifted), "h"))


def test_metrics_that_are_not_finite_numbers_are_left_out() -> None:
    found = finite_metrics({"a": 1, "b": float("nan"), "c": float("inf"), "d": "x", "e": None})
    assert found == {"a": 1.0}
    assert finite_metrics(None) == {}


def test_digests_are_xxh3_128() -> None:
    assert digest_of(b"legato") == xxhash.xxh3_128(b"legato").hexdigest()
