"""Which class a component's configuration names, and how its library calls its weights."""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import ModelError

INDEX = "model_index.json"
# Every library's name for its weights.
_DIFFUSERS, _TRANSFORMERS = "diffusion_pytorch_model", "model"
_LIBRARIES = ("diffusers", "transformers", __name__.partition(".")[0])


def table(file: Path) -> dict[str, Any]:
    """A JSON file that holds a table.

    Raises:
        ModelError: It cannot be read, or is no table.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(str(file), f"cannot be read: {error}.", "Copy or download it again.") from error
    if not isinstance(found, dict):
        raise ModelError(str(file), "is no table.", "Copy or download it again.")
    return found


def class_of(value: Any, folder: Path) -> Any:
    """The class of a component that this package can build; ``None`` leaves it to the pipeline's own loader."""
    if not (
        isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(one, str) for one in value)
    ):
        return None
    library, name = value
    if not folder.is_dir() or (folder / f"{library}.py").is_file():
        return None  # kept elsewhere, or code of the folder's own: its loader asks whether to trust it
    from diffusers import pipelines  # imported here: it takes seconds

    home: Any = getattr(pipelines, library, None)
    if home is None and library.partition(".")[0] in _LIBRARIES:
        with suppress(ModuleNotFoundError):  # of another release: the pipeline's own loader says so
            home = import_module(library)
    return _model_class(home, name, folder)


def single_class(facts: dict[str, Any], folder: Path) -> Any:
    """The class of a model saved by itself, from its configuration; ``None`` if it is of no known library."""
    import diffusers
    import transformers

    names = facts.get("architectures") or []
    home, name = (
        (diffusers, facts["_class_name"]) if "_class_name" in facts else (transformers, next(iter(names), ""))
    )
    return _model_class(home, str(name), folder)


def _model_class(home: Any, name: str, folder: Path) -> Any:
    found = getattr(home, name, None)
    known = isinstance(found, type) and weights_name(found) is not None
    return meant(found, folder) if known else None


def meant(kind: Any, folder: Path) -> Any:
    """The class itself; for an old name of several classes of diffusers, the one that a configuration means."""
    from diffusers.models import model_loading_utils, modeling_utils

    if not issubclass(kind, modeling_utils.LegacyModelMixin):
        return kind
    remapped: Any = model_loading_utils._fetch_remapped_cls_from_config
    return remapped(table(folder / "config.json"), kind)


def weights_name(kind: Any) -> Any:
    """How a model's library calls its weights; ``None`` for what is no model of a known library."""
    from diffusers import ModelMixin
    from transformers import PreTrainedModel

    if issubclass(kind, ModelMixin):
        return _DIFFUSERS
    return _TRANSFORMERS if issubclass(kind, PreTrainedModel) else None


def is_diffusers_model(kind: Any) -> bool:
    """Whether a class is a model of diffusers."""
    return bool(weights_name(kind) == _DIFFUSERS)
