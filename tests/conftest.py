"""Hypothesis profiles and markers for the whole suite.

Choose a profile with ``--hypothesis-profile NAME`` or the environment variable ``HYPOTHESIS_PROFILE``:

* ``default``: the same examples every time, few enough for every run;
* ``ci``: random examples, more of them; a failure prints how to repeat it;
* ``nightly``: as many as a night holds.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

_NO_CLOCK = (HealthCheck.too_slow, HealthCheck.data_too_large)  # these machines are shared and slow at times

settings.register_profile(
    "default",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=_NO_CLOCK,
)
settings.register_profile(
    "ci",
    deadline=None,
    max_examples=100,
    stateful_step_count=50,
    print_blob=True,
    suppress_health_check=_NO_CLOCK,
)
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=5000,
    stateful_step_count=80,
    print_blob=True,
    suppress_health_check=_NO_CLOCK,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts background jobs so, CI among them; the tests of Ctrl-C need what a terminal gives.
        signal.signal(signal.SIGINT, signal.default_int_handler)
