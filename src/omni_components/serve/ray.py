"""The app as a Ray Serve deployment: several cards or machines, with one replica on each.

``serve run omni_components.serve.ray:app model=demo enable_cpu_offload=true num_replicas=2`` starts it, and so
does a config file. Every replica is a process with a pipeline, a queue and a ledger of its own; Ray starts and
watches them, and sends each request to one. It needs the extra ``ray``.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

try:
    from fastapi import FastAPI
    from ray import serve
    from ray.util.metrics import Gauge
except ModuleNotFoundError as missing:
    advice = "pip install 'omni-components[ray]'"
    raise ModuleNotFoundError(
        f"serving with Ray needs {missing.name}: {advice}", name=missing.name
    ) from missing

from ..errors import PolicyError, nearest
from ..omni import Omni, as_dtype
from ..policy import OffloadPolicy
from ..sizes import parse_bytes
from .app import create_app
from .settings import ServeSettings, read_keys

if TYPE_CHECKING:
    from .service import Service

_WATCHED = 60.0  # seconds: Ray lets a replica end only when its last stream has
_SPARE = 8  # requests besides those for pictures and streams: probes, scrapes, and the one that gets 429
_LAST = 10.0  # seconds to end, after the last request
_LOOKED_AFTER = 2.0  # seconds: how soon Ray notices that a replica is dead, and gets its metrics


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application, from the command line of ``serve run`` or the ``args`` of a config file.

    Args:
        args: ``model``, and what else is to differ from its default: arguments of ``Omni``
            (``enable_cpu_offload``, ``device``, ``dtype``, ``local_files_only``), fields of ``OffloadPolicy``
            and of ``ServeSettings`` (``timeout`` is of a request), ``served_model_name``, ``api_key_file``
            (read by each replica, on its machine), ``num_replicas``, ``num_cpus`` and ``num_gpus`` (for each).
            Texts, as a command line gives them, are read as what the field holds.

    Returns:
        For ``ray.serve.run``; what a config file says about the deployment ``Replica`` goes before it.

    Raises:
        PolicyError: It names the key, and the nearest one if there is no such.
    """
    return _deployment(read_plan(args)).bind()


class Replica:
    """One copy of the service, in a process of its own; Ray names it and watches its health."""

    app: FastAPI  # serve.ingress makes it, and gives it what HTTP brings

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def check_health(self) -> None:
        """Called by Ray now and then; also hands on the metrics, which Ray exports for all replicas.

        Raises:
            RuntimeError: It is not ready, and will not be: Ray starts another in its place.
            InvariantError: The ledger is untrue; likewise.
        """
        service: Service = self.app.state.service
        self._export(service)
        if service.status != "ok":
            raise RuntimeError(f"replica {service.settings.replica} is {service.status}")
        if service.ledger is not None:
            service.ledger.check()

    def _export(self, service: Service) -> None:
        for family in service.metrics.registry.collect():
            for one in family.samples:
                if not one.name.endswith("_created"):
                    self._gauge(one.name, family.documentation, one.labels).set(one.value, one.labels)

    def _gauge(self, name: str, says: str, labels: Mapping[str, str]) -> Gauge:
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, says, tuple(labels))
        return self._gauges[name]


# --- the deployment -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the application's arguments say, checked as far as it can be without the replicas' machines.

    Attributes:
        omni: Arguments of ``Omni``.
        settings: Of each replica, but for its keys and its name.
        key_file: Where each replica reads the keys; ``None`` lets everybody in.
        num_replicas: How many; ``"auto"`` leaves it to Ray, ``None`` is one.
        actor: What Ray reserves for each.
    """

    omni: Mapping[str, Any]
    settings: ServeSettings
    key_file: str | None = None
    num_replicas: int | str | None = None
    actor: Mapping[str, float] = field(default_factory=dict)


def _deployment(plan: Plan) -> serve.Deployment:
    limits = plan.settings
    options = serve.deployment(
        name=Replica.__name__,
        ray_actor_options=dict(plan.actor),
        # More than a replica takes: its own queue is the one that is bounded, and says 429.
        max_ongoing_requests=limits.max_queue + limits.max_batch + limits.max_watchers + _SPARE,
        # A request that was taken in is answered before its replica ends.
        graceful_shutdown_timeout_s=limits.timeout + _LAST,
        health_check_period_s=_LOOKED_AFTER,
    )
    made = options(serve.ingress(_builder(plan))(Replica))
    # Nothing unless it is said: a config file may say autoscaling_config instead.
    return made if plan.num_replicas is None else made.options(num_replicas=plan.num_replicas)


def _builder(plan: Plan) -> Callable[[], FastAPI]:
    """What makes the app: it is sent to the replicas, and the app is not."""

    def build() -> FastAPI:
        settings = replace(
            plan.settings,
            replica=serve.get_replica_context().replica_tag,
            api_keys=() if plan.key_file is None else read_keys(Path(plan.key_file)),
        )
        return create_app(Omni(**plan.omni), settings)

    return build


# --- its arguments ------------------------------------------------------------------------------------------

_OMNI: dict[str, Any] = {
    "model": str,
    "enable_cpu_offload": bool,
    "device": str | None,
    "dtype": str | None,
    "local_files_only": bool,
}
_RAY: dict[str, Any] = {"num_replicas": int | str, "num_cpus": float, "num_gpus": float}
_INSTEAD: dict[str, Any] = {"served_model_name": str | None, "api_key_file": str | None}
_NOT_GIVEN = ("name", "api_keys", "replica")  # of the settings: said in the line above, and by Ray

_SIZES = ("device_memory", "pinned_limit", "max_body")
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_SIMPLE = {bool: "true or false", str: "a text"}
_LISTS = (Collection, Sequence, tuple)


def read_plan(args: Mapping[str, Any]) -> Plan:
    """Parse and check the application's arguments.

    Raises:
        PolicyError: It names the key.
    """
    limits, policy = get_type_hints(ServeSettings), get_type_hints(OffloadPolicy)
    limits = {name: kind for name, kind in limits.items() if name not in _NOT_GIVEN}
    kinds = {**policy, **limits, **_OMNI, **_RAY, **_INSTEAD}
    given = {name: _read(name, value, kinds) for name, value in args.items()}
    settings = {"watch_timeout": _WATCHED, "name": given.get("served_model_name"), **_of(given, limits)}
    return Plan(
        omni=_checked_omni(_of(given, _OMNI), _of(given, policy.keys() - limits.keys())),
        settings=ServeSettings(**settings),
        key_file=given.get("api_key_file"),
        num_replicas=_checked_replicas(given.get("num_replicas")),
        actor=_checked_actor(_of(given, ("num_cpus", "num_gpus"))),
    )


def _of(given: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def _read(name: str, value: Any, kinds: Mapping[str, Any]) -> Any:
    """A value as its field holds it; what is left wrong, the field's owner refuses in its own words."""
    if name not in kinds:
        shown = "(not shown)" if "key" in name else value
        raise PolicyError(
            name, shown, f"one of {', '.join(nearest(name, kinds) or kinds)} instead of {name!r}"
        )
    is_union = get_origin(kinds[name]) in (Union, types.UnionType)
    taken = get_args(kinds[name]) if is_union else (kinds[name],)
    if isinstance(value, str):
        value = _from_text(name, value, taken)
    for kind, choices in _SIMPLE.items():
        if {*taken} <= {kind, type(None)} and not isinstance(value, taken):
            raise PolicyError(name, value, choices)
    if any(get_origin(one) is Mapping for one in taken) and not isinstance(value, Mapping):
        raise PolicyError(name, value, "a mapping, in a config file")
    return value


def _from_text(name: str, text: str, taken: Collection[Any]) -> Any:
    word = _WORDS.get(text.lower(), text)
    if type(word) in taken and word is not text:
        return word
    try:
        if name in _SIZES:
            return parse_bytes(text)
        for kind in (int, float):
            if kind in taken:
                return kind(text)
    except ValueError:
        return text
    if any(get_origin(one) in _LISTS for one in taken):
        return tuple(text.split(","))
    return text


def _checked_omni(arguments: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    if not arguments.get("model"):
        raise PolicyError(
            "model", arguments.get("model"), "a folder of a diffusers pipeline, a hub id, or demo"
        )
    as_dtype(arguments.get("dtype"))
    OffloadPolicy.of(None, policy)
    if policy and not arguments.get("enable_cpu_offload"):
        name, value = next(iter(policy.items()))
        raise PolicyError(name, value, "enable_cpu_offload=true with it: without offload nothing takes turns")
    return {**arguments, **policy}


def _checked_replicas(number: int | str | None) -> int | str | None:
    if number not in (None, "auto") and (
        not isinstance(number, int) or isinstance(number, bool) or number < 1
    ):
        raise PolicyError("num_replicas", number, "a whole number from 1 up, or auto")
    return number


def _checked_actor(reserved: dict[str, Any]) -> dict[str, float]:
    for name, value in reserved.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise PolicyError(name, value, "a number that is not negative")
    return reserved
