"""``load_components``: a diffusers folder goes from its files straight into masters, or stays mapped."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..errors import ModelError, PolicyError, ResidencyWarning, WeightsError, format_bytes
from ..transfer.hostmemory import pinnable_bytes
from .build import diffusers_model, transformers_model
from .checkpoint import find_weights, has_variant
from .classes import INDEX, class_of, is_diffusers_model, meant, single_class, table, weights_name
from .deferred import Deferred, NotDeferrable
from .files import Entry
from .fill import Awaited, awaited, fill, map_in, stranded
from .readahead import ReadAhead, in_order, running_order

# Held while libraries construct: the default element type, the hooks that torch calls for parameters, what
# transformers puts in torch's place and the filters of warnings are the whole process's.
_CONSTRUCTING = threading.RLock()
Masters = Literal["auto", "pinned", "mapped"]
OnBytes = Callable[[int, int], None]


def load_components(
    source: str | os.PathLike[str] | type,
    folder: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    variant: str | None = None,
    masters: Masters = "auto",
    lazy: bool = False,
    on_bytes: OnBytes | None = None,
    local_files_only: bool = False,
    **passed: Any,
) -> Any:
    """A pipeline from files, its weights once in memory, as ``offload`` will use them; no device is touched.

    Values, element types and configuration are those of ``from_pretrained``.

    Args:
        source: A folder that ``save_pretrained`` of a pipeline, or of one model, has written; the id of a
            pipeline on the hub; or a pipeline's class, with ``folder``.
        folder: The folder or id, where ``source`` is a class.
        dtype: Of floating-point weights, applied while they are read; a table gives each component its own
            (``"default"`` the others'). ``None`` is the default of ``from_pretrained``.
        variant: Of the files, such as ``"fp16"``.
        masters: ``"pinned"`` reads weights into slabs, which ``offload`` pins where they are; ``"mapped"`` and
            ``"auto"`` leave them in their files' pages. From there ``offload`` pins, with ``masters="auto"``, what
            is used a second time. Weights that have to be converted are read into slabs in any case.
        lazy: Read what goes into slabs when its component is first used. Until then each weight has its type,
            shape and place, and any operation on it reads it first; only what goes around
            ``__torch_function__`` (``torch.func.vmap`` or ``grad`` over the weight itself, ``torch.jit``) would see
            zeros.
        on_bytes: Called with the bytes that are there, and the bytes in all.
        local_files_only: Never ask the hub.
        **passed: What else ``from_pretrained`` of the pipeline takes: components that are there already,
            ``None`` for one that is not wanted, options.

    Returns:
        The pipeline, or the one model that the folder holds.

    Raises:
        WeightsError: Files that are missing, corrupt, truncated or of another model; nothing was read.
        ModelError: No such folder.
        PolicyError: An argument that is not possible.
    """
    if masters not in ("auto", "pinned", "mapped"):
        raise PolicyError("masters", masters, "'auto', 'pinned' or 'mapped'")
    kind, place = _asked(source, folder)
    # Masters made under inference mode could not be written later.
    with torch.inference_mode(False), torch.no_grad():
        where = _folder(kind, place, variant, local_files_only)
        loader = _Loader(where, dtype, variant, masters, lazy, on_bytes)
        try:
            if not (where / INDEX).is_file():
                return loader.single(kind)
            return loader.pipeline(kind, passed)
        except BaseException:
            loader.stop()
            raise


@dataclass(slots=True, eq=False)
class _Built:
    """A model whose weights are still to be read."""

    name: str
    model: nn.Module
    waiting: list[Awaited]


class _Loader:
    """One call of ``load_components``: everything is checked before the first weight is read."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype | Mapping[str, torch.dtype] | None,
        variant: str | None,
        masters: Masters,
        lazy: bool,
        on_bytes: OnBytes | None,
    ) -> None:
        self._folder, self._dtype, self._variant = folder, dtype, variant
        self._masters, self._lazy, self._on_bytes = masters, lazy, on_bytes
        self._done = self._total = 0
        self._ahead: ReadAhead | None = None

    def pipeline(self, kind: Any, passed: Mapping[str, Any]) -> Any:
        """The whole pipeline: its models from here, the rest of it by its own library."""
        declared = table(self._folder / INDEX)
        instead = getattr(kind, "_loads_instead", {})  # a class that the pipeline would make of the saved one
        classes = {
            name: instead.get(found, found)
            for name, value in declared.items()
            if name not in passed and (found := class_of(value, self._folder / name)) is not None
        }
        self._refuse_unknown_variant(classes)
        kind = _pipeline_class(kind, declared)
        places = {name: (model_class, self._folder / name) for name, model_class in classes.items()}
        found = {one.name: one.model for one in self._loaded(places, running_order(kind))}
        return _assembled(kind, self._folder, self._dtype, self._variant, {**passed, **found})

    def single(self, kind: Any) -> Any:
        """The one model of a folder without an index of components."""
        config = self._folder / "config.json"
        if not config.is_file():
            problem = f"is a folder without {INDEX} or config.json: no pipeline or model was saved there."
            raise ModelError(str(self._folder), problem, "Write one with save_pretrained(folder).")
        facts = table(config)
        model_class = single_class(facts, self._folder) if kind is None else meant(kind, self._folder)
        if model_class is None:
            problem = "holds a model of an unknown class."
            raise ModelError(str(self._folder), problem, "Pass its class: load_components(Class, folder).")
        name = self._folder.resolve().name
        self._refuse_unknown_variant({name: model_class}, self._folder)
        for built in self._loaded({name: (model_class, self._folder)}, [name]):
            return built.model
        dtype = self._dtype_of(name)
        asked = {} if dtype is None else {_dtype_argument(model_class): dtype}
        with _CONSTRUCTING:
            return model_class.from_pretrained(str(self._folder), variant=self._variant, **asked)

    def stop(self) -> None:
        """Read no further ahead: nobody will use it."""
        if self._ahead is not None:
            self._ahead.stop()

    # --- checking -----------------------------------------------------------------------------------------

    def _refuse_unknown_variant(self, classes: Mapping[str, Any], only: Path | None = None) -> None:
        if self._variant is None or not classes:
            return
        folders = [(only or self._folder / name, kind) for name, kind in classes.items()]
        if not any(has_variant(place, weights_name(kind), self._variant) for place, kind in folders):
            problem = f"has no files of the variant {self._variant!r} in any component."
            advice = "Leave variant= out, or pass one that was saved."
            raise WeightsError(next(iter(classes)), str(self._folder), None, problem, advice)

    def _loaded(self, places: Mapping[str, tuple[Any, Path]], order: list[str]) -> list[_Built]:
        """Models by class and folder, read or promised; those that only their own loaders can do are left out."""
        entries: dict[str, dict[str, Entry]] = {}
        reasons: dict[str, str] = {}
        for name, (kind, folder) in places.items():
            reason = _exotic(kind, folder)
            if reason is None:
                entries[name] = find_weights(folder, weights_name(kind), self._variant, name)
            else:
                reasons[name] = reason
        self._ahead = ReadAhead(in_order(entries, order))
        built = {name: self._built(name, *places[name], found) for name, found in entries.items()}
        reasons |= {name: one for name, one in built.items() if isinstance(one, str)}
        done = [one for one in built.values() if isinstance(one, _Built)]
        for name, reason in reasons.items():
            text = (
                f"{name!r} is loaded by its own from_pretrained, which may need its weights twice: {reason}."
            )
            warnings.warn(text, ResidencyWarning, stacklevel=4)
        self._read(done)
        return done

    def _built(self, name: str, kind: Any, folder: Path, entries: dict[str, Entry]) -> _Built | str:
        """A model without its weights, or why only its own loader can do it."""
        try:
            model = self._model(name, kind, folder, entries)
        except NotDeferrable as error:
            return str(error)
        left = stranded(model)
        if left:
            return f"{left[0]} is made from weights while it is built"
        return _Built(name, model, awaited(model))

    def _model(self, name: str, kind: Any, folder: Path, entries: dict[str, Entry]) -> nn.Module:
        build = diffusers_model if is_diffusers_model(kind) else transformers_model
        if self._lazy:
            for entry in entries.values():
                entry.file.pages()  # what is read later is what is there now, whoever replaces the file
        state = {key: Deferred.of(entry) for key, entry in entries.items()}
        with _CONSTRUCTING:
            return build(kind, folder, state, self._dtype_of(name), name)

    def _dtype_of(self, name: str) -> torch.dtype | None:
        if self._dtype is None or isinstance(self._dtype, torch.dtype):
            return self._dtype
        return self._dtype.get(name, self._dtype.get("default", torch.float32))

    # --- reading ------------------------------------------------------------------------------------------

    def _read(self, built: list[_Built]) -> None:
        total = sum(one.nbytes for each in built for one in each.waiting)
        self._total = sum(one.stored for each in built for one in each.waiting)
        self._told(0)
        converted = 0
        for each in built:
            rest = each.waiting if self._masters == "pinned" else map_in(each.waiting, self._told)
            converted += sum(one.nbytes for one in rest)
            fill(each.model, rest, self._told, later=self._lazy)
        wanted = self._masters == "mapped" or (self._masters == "auto" and total > pinnable_bytes())
        if converted and wanted:
            text = (
                f"{format_bytes(converted)} of weights have to be converted and cannot stay in their files; "
            )
            warnings.warn(text + "save them in that dtype.", ResidencyWarning, stacklevel=5)

    def _told(self, count: int) -> None:
        self._done += count
        if self._on_bytes is not None:
            self._on_bytes(min(self._done, self._total), self._total)


# --- what was asked for -----------------------------------------------------------------------------------


def _asked(source: Any, folder: Any) -> tuple[Any, str]:
    if isinstance(source, type):
        if folder is None:
            raise PolicyError("folder", None, f"the folder or id to load {source.__name__} from")
        return source, os.fspath(folder)
    if folder is not None:
        raise PolicyError("folder", folder, "None: the first argument is the folder already")
    return None, os.fspath(source)


def _folder(kind: Any, place: str, variant: str | None, local_files_only: bool) -> Path:
    path = Path(place).expanduser()
    if path.is_dir():
        return path
    owner, slash, name = place.partition("/")
    if path.exists() or not (slash and owner and name) or "/" in name or owner.startswith((".", "~")):
        raise ModelError(place, "is neither a folder here nor a model id of the hub.", "Check the path.")
    from diffusers import DiffusionPipeline  # imported here: it takes seconds

    fetch: Any = kind if hasattr(kind, "download") else DiffusionPipeline
    return Path(fetch.download(place, variant=variant, local_files_only=local_files_only))


# --- classes ----------------------------------------------------------------------------------------------


def _exotic(kind: Any, folder: Path) -> str | None:
    """Why only the component's own loader can do it."""
    from diffusers.models.modeling_utils import LegacyModelMixin, ModelMixin
    from transformers import PreTrainedModel

    libraries: tuple[Any, ...] = (ModelMixin, LegacyModelMixin, PreTrainedModel)
    if kind.from_pretrained.__func__ not in [one.from_pretrained.__func__ for one in libraries]:
        return f"{kind.__name__} has a loader of its own"
    config = folder / "config.json"
    facts = table(config) if config.is_file() else {}
    if facts.get("quantization_config"):
        return "its config asks for quantisation"
    if facts.get("auto_map"):
        return "its config asks for code of its own"
    return None


def _dtype_argument(kind: Any) -> str:
    return "torch_dtype" if is_diffusers_model(kind) else "dtype"


def _pipeline_class(asked: Any, declared: Mapping[str, Any]) -> Any:
    """The saved class itself: asked of their common base, diffusers loads optional components a second time."""
    import diffusers

    base: Any = diffusers.DiffusionPipeline
    if asked not in (None, base):
        return asked
    name = declared.get("_class_name")
    found = getattr(diffusers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, base) else base


def _assembled(kind: Any, folder: Path, dtype: Any, variant: str | None, parts: dict[str, Any]) -> Any:
    asked = {} if dtype is None else {"torch_dtype": dict(dtype) if isinstance(dtype, Mapping) else dtype}
    with _CONSTRUCTING, _old_name_of_dtype():
        return kind.from_pretrained(str(folder), variant=variant, local_files_only=True, **asked, **parts)


@contextmanager
def _old_name_of_dtype() -> Any:
    with warnings.catch_warnings():
        # Newer diffusers call it dtype; this name is the one that all of them take.
        warnings.filterwarnings("ignore", ".*torch_dtype", FutureWarning)
        yield
