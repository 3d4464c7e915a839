from __future__ import annotations

from tests.helpers.fixtures import seeded, sim

__all__ = ["seeded", "sim"]
