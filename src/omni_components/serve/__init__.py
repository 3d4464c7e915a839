"""An HTTP service around ``Omni``: OpenAI's image endpoint, metrics, and a page that shows the components move.

>>> from omni_components import Omni
>>> from omni_components.serve import ServeSettings, create_app
>>> app = create_app(Omni("demo", enable_cpu_offload=True), ServeSettings(max_queue=16))
>>> app.title
'omni-components: demo'

It needs the extra ``serve``; the settings need nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .settings import ServeSettings, read_keys

if TYPE_CHECKING:
    from .app import create_app
    from .server import serve

__all__ = ["ServeSettings", "create_app", "read_keys", "serve"]

EXTRA = ("fastapi", "uvicorn", "prometheus_client", "starlette", "pydantic")
_HOMES = {"create_app": ".app", "serve": ".server"}


def __getattr__(name: str) -> Any:
    """Import what needs the extra when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_HOMES[name], __name__)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        advice = "pip install 'omni-components[serve]'"
        raise ModuleNotFoundError(f"serving needs {error.name}: {advice}", name=error.name) from error
    value = getattr(module, name)
    globals()[name] = value
    return value
