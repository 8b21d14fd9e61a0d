"""How a step is deleted: of a link to one only the link, and what no save wrote into it stays."""

from __future__ import annotations

import logging
import posixpath
import re

from legato.checkpoint.manifest import (
    MANIFEST_NAME,
    RESERVED_NAMES,
    STATE_FOLDER,
    parse_manifest,
)
from legato.errors import FolderFormatError
from legato.storage import Storage

logger = logging.getLogger(__name__)

# The large files of a step, all that takes up room; see `legato.checkpoint.plan.MODEL_STEMS`.
_TENSORS = re.compile(r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors")


def delete_step(storage: Storage, path: str, *, strangers_to: str) -> None:
    """Delete a folder that is a step's no more.

    Args:
        storage: Where it is.
        path: The folder, under a name that no step has; an absent one is fine. Of a link that
            somebody put in its place only the link goes.
        strangers_to: Where files that somebody else put into it go; made if there are any.

    Raises:
        OSError: It isn't deleted, or not all of it.
    """
    if storage.atomic_rename:  # an object store has no links
        try:
            storage.remove_file(path)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):  # macOS says the second of a folder
            pass
        else:
            logger.info("%s was a link: what it leads to is left as it is", path)
            return
    move_strangers(storage, path, to=strangers_to)
    storage.remove_tree(path)


def move_strangers(storage: Storage, path: str, *, to: str) -> None:
    """Move what no save wrote out of a step folder.

    The manifest says what a save wrote. Where there is none, no save came to its end, and nothing
    is moved; where it can't be read, all is but the tensors.

    Args:
        storage: Where it is.
        path: The folder of the step.
        to: The folder to move it to, made if there is anything.

    Raises:
        OSError: Something can't be moved.
    """
    manifest_path = posixpath.join(path, MANIFEST_NAME)
    names = storage.list_folder(path)
    try:
        manifest = parse_manifest(storage.read_bytes(manifest_path), path=manifest_path)
        own = {name.split("/")[0] for name in manifest.files}
    except FileNotFoundError:
        return
    except FolderFormatError:
        own = {name for name in names if _TENSORS.fullmatch(name)}
    strangers = [name for name in names if name not in own | RESERVED_NAMES | {STATE_FOLDER}]
    if not strangers:
        return
    storage.make_folder(to)
    for name in strangers:
        storage.rename(posixpath.join(path, name), posixpath.join(to, name))
    # Durable before the rest is deleted.
    storage.sync_folder(to)
    pruned = posixpath.dirname(to)
    storage.sync_folder(pruned)
    storage.sync_folder(posixpath.dirname(pruned))  # it may have been made just now
    logger.warning(
        "what no save had written into a step that is deleted is in %s: %s",
        to, ", ".join(strangers),
    )  # fmt: skip
