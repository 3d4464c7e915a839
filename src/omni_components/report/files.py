"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def written_whole(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """Names of empty files beside ``paths`` to write to; at the end of the block they take their places.

    If the block raises, whatever it raises, they are removed and ``paths`` are as before. They are made at once,
    so that a folder which cannot be written to is found before the work, not after it.

    Raises:
        OSError: A folder is missing or cannot be written to, or a path is a folder or a read-only file.
    """
    with ExitStack() as undo:
        # Through a link to the file itself: os.replace would put a file in the link's place.
        targets = [Path(os.path.realpath(path)) for path in paths]
        drafts = [_draft(target, undo) for target in targets]
        yield tuple(drafts)
        for draft, target in zip(drafts, targets, strict=True):
            os.replace(draft, target)


def _draft(target: Path, undo: ExitStack) -> Path:
    exists = _is_writable_file(target)
    # In the same folder: a file cannot be replaced from another file system.
    draft = target.with_name(f".omni-{secrets.token_hex(6)}{target.suffix}")
    undo.callback(draft.unlink, missing_ok=True)
    with draft.open("xb"):
        pass  # with the permissions that the user's other new files get
    if exists:
        shutil.copymode(target, draft)
    return draft


def _is_writable_file(target: Path) -> bool:
    """Whether there is a file already; a folder and a read-only file refuse to be opened."""
    try:
        with target.open("r+b"):
            return True
    except FileNotFoundError:
        return False
