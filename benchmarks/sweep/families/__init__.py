"""The cases, a file for each family of pipelines."""

from __future__ import annotations

import importlib
import pkgutil

from ..case import Case


def cases() -> dict[str, Case]:
    """All cases by the name of their class."""
    known: dict[str, Case] = {}
    for info in pkgutil.iter_modules(__path__):
        for one in importlib.import_module(f"{__name__}.{info.name}").CASES:
            assert one.name not in known, f"two cases for {one.name}"
            known[one.name] = one
    return known
