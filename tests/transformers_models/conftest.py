from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.fixtures import seeded

__all__ = ["quiet", "seeded"]


@pytest.fixture(autouse=True, scope="package")
def quiet() -> Iterator[None]:
    """Its remarks on token ids that a tiny vocabulary does not have are not what is tested."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)
