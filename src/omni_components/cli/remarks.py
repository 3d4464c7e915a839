"""Libraries' remarks about themselves, kept from a person at a terminal; their warnings are shown."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

# transformers says so for each processor of images that it looks up: it has another, and uses it.
_SPEAKER = "transformers.utils.import_utils"
_REMARK = re.compile(r"`\w+` requires torchvision \(not installed\); falling back to `\w+`")


@contextmanager
def no_remarks() -> Iterator[None]:
    """Within it, nothing is said about libraries that are not needed; the library itself is not imported for it."""
    speaker = logging.getLogger(_SPEAKER)
    speaker.addFilter(_is_news)
    try:
        yield
    finally:
        speaker.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return _REMARK.match(record.getMessage()) is None
