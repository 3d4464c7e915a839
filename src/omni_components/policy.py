"""OffloadPolicy: what the user may choose, validated once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from .errors import PolicyError, nearest

ROLE_ALIASES = {"text_encoder": "encoder", "transformer": "dit"}  # vLLM-Omni says text_encoder
PAIRS_WORDS = {"encoder": "text_encoder"}  # and whoever brings a pair of its own knows no other
# Of the free device memory, what stays free for the computing where only measuring can tell how much there is.
HEADROOM = 0.2


def left_for_weights(free: int) -> int:
    """Bytes of so much free device memory that weights may take where nobody said how many."""
    return int(free * (1 - HEADROOM))


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadPolicy:
    """How components take turns; every field has a value that suits most pipelines.

    Attributes:
        pin_memory: Pin the masters, so that copies run at the speed of the link. Where pinning fails the
            master is pageable, said once.
        pinned_limit: Most bytes to pin; ``None`` takes what the machine and its container allow.
        masters: ``"pinned"`` copies weights that are mapped from files into pinned slabs; ``"mapped"`` leaves them
            in their files, and each load passes through two pinned staging slabs; ``"auto"`` does the second at a
            component's first load and the first before its second, where all fit into what may be pinned.
        nesting: A rival scope inside an open one: ``"switch"`` moves the outer component out and back,
            ``"error"`` refuses.
        exclusive_encoders: Encoders exclude each other too.
        vae: ``"resident"`` keeps VAEs on the device, ``"exclusive"`` lets them take turns.
        mode: ``"swap"`` lets components take turns; ``"auto"`` keeps everything on the device where it fits
            with headroom. What a field says about who takes turns goes before that.
        offload_components: Roles that are swapped (``encoder``, ``dit``, and ``vae`` with
            ``vae="exclusive"``); the others stay on the device, and send these home when they are used.
            ``None``: all.
        arena: ``"keep"`` holds one device buffer, as large as the largest member, with stable addresses;
            ``"fit"`` takes and gives back the bytes of each component at each switch.
        device_memory: Bytes of the device that may be used for weights; more is refused before it moves.
        prefetch: Copy the component that comes next while the present one computes, where both have room:
            ``True`` learns the order from the loads so far, a sequence of component names declares it.
        timeout: Seconds to wait for a turn; ``None`` waits as long as it takes.
        entry_points: Methods besides ``forward`` that open a scope, per component name.
        history: Events kept; the totals in the report count all.
    """

    pin_memory: bool = True
    pinned_limit: int | None = None
    masters: Literal["auto", "pinned", "mapped"] = "auto"
    nesting: Literal["switch", "error"] = "switch"
    exclusive_encoders: bool = False
    vae: Literal["resident", "exclusive"] = "resident"
    mode: Literal["swap", "auto"] = "swap"
    offload_components: Collection[str] | None = None
    arena: Literal["keep", "fit"] | None = None
    device_memory: int | None = None
    prefetch: bool | Sequence[str] = False
    timeout: float | None = None
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    history: int = 100_000

    def __post_init__(self) -> None:
        _one_of("masters", self.masters, ("auto", "pinned", "mapped"))
        _one_of("nesting", self.nesting, ("switch", "error"))
        _one_of("vae", self.vae, ("resident", "exclusive"))
        _one_of("mode", self.mode, ("swap", "auto"))
        _one_of("arena", self.arena, ("keep", "fit", None))
        for name in ("device_memory", "pinned_limit", "timeout"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value >= 0):
                raise PolicyError(name, value, "a number that is not negative, or None")
        if not isinstance(self.history, int) or self.history < 1:
            raise PolicyError("history", self.history, "a whole number of events from 1 up")
        object.__setattr__(self, "offload_components", self._parsed_roles())
        object.__setattr__(self, "prefetch", _parsed_order(self.prefetch))
        object.__setattr__(self, "entry_points", _frozen_entry_points(self.entry_points))

    @classmethod
    def of(cls, policy: OffloadPolicy | str | None, overrides: Mapping[str, Any]) -> OffloadPolicy:
        """``policy`` with single fields replaced; a word is its ``mode``.

        Raises:
            PolicyError: No such field, with the nearest name, or a value that is not possible.
        """
        if isinstance(policy, str):
            policy = cls(mode=policy)  # type: ignore[arg-type]  # the value is looked at there
        known = [one.name for one in fields(cls)]
        for name in overrides:
            if name not in known:
                close = nearest(name, known)
                raise PolicyError(
                    name, overrides[name], f"one of {', '.join(close or known)} instead of {name!r}"
                )
        base = {name: getattr(policy, name) for name in known} if policy is not None else {}
        return cls(**{**base, **overrides})

    def who_takes_turns(self) -> str | None:
        """The field that says who takes turns, if one does; ``mode="auto"`` then decides nothing."""
        usual = OffloadPolicy()
        fields = ("offload_components", "vae", "exclusive_encoders")
        return next((name for name in fields if getattr(self, name) != getattr(usual, name)), None)

    def swaps(self, role: str) -> bool:
        """Whether components of this role take turns."""
        if role == "vae" and self.vae == "resident":
            return False
        if role == "resident":
            return False
        role = "dit" if role == "part" else role
        return self.offload_components is None or role in self.offload_components

    def _parsed_roles(self) -> frozenset[str] | None:
        if self.offload_components is None:
            return None
        choices = ("encoder", "dit", "vae") if self.vae == "exclusive" else ("encoder", "dit")
        if isinstance(self.offload_components, str):
            raise PolicyError("offload_components", self.offload_components, f"a set, such as {set(choices)}")
        roles = frozenset(ROLE_ALIASES.get(one, one) for one in self.offload_components)
        if not roles or not roles <= set(choices):
            advice = "" if "vae" in choices else " (a VAE only with vae='exclusive')"
            raise PolicyError(
                "offload_components", set(self.offload_components), f"from {', '.join(choices)}{advice}"
            )
        return roles


def _one_of(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise PolicyError(name, value, " or ".join(repr(one) for one in choices))


def _parsed_order(order: bool | Sequence[str]) -> bool | tuple[str, ...]:
    if isinstance(order, bool):
        return order
    names = () if isinstance(order, str) else tuple(order)
    if len(names) < 2 or len(set(names)) < len(names) or not all(isinstance(one, str) for one in names):
        choices = "True, False, or the names of at least two components in their order, each once"
        raise PolicyError("prefetch", order, choices)
    return names


def _frozen_entry_points(declared: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    parsed = {}
    for component, methods in declared.items():
        if isinstance(methods, str) or not all(isinstance(one, str) for one in methods):
            raise PolicyError(
                "entry_points", methods, f"a tuple of method names for {component!r}, such as ('encode',)"
            )
        parsed[component] = tuple(methods)
    return parsed
