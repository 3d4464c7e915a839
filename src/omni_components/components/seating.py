"""Who may stand beside whom: encoders that fit together, and roles that stay although others are offloaded."""

from __future__ import annotations

from collections.abc import Iterable

from ..policy import OffloadPolicy
from .component import Role
from .declaration import Declaration, Found
from .grouping import extents, overlapping, span
from .unmovable import refuse_unmovable_if_real


def seat_encoders(found: Iterable[Found], room: int = 0) -> None:
    """Let the encoders that take turns stand beside each other if all fit into the room of the largest member.

    Guidance asks all encoders for the prompt, then all of them again: one at a time, each would be loaded twice.
    Together they never need more than the largest member does, and the peak stays what it was.

    Args:
        found: Those that take turns.
        room: Bytes that they may have, if that is more.
    """
    turns = [one for one in found if one.exclusive and not one.resident]
    encoders = [one for one in turns if one.role is Role.ENCODER]
    if len(encoders) < 2:
        return  # nobody to stand beside
    sizes = {id(one): _device_bytes(one) for one in turns}
    if sum(sizes[id(one)] for one in encoders) <= max(*sizes.values(), room):
        for one in encoders:
            one.beside = [other for other in encoders if other is not one]


def room_for(turns: Iterable[Found], declaration: Declaration, policy: OffloadPolicy) -> int:
    """Of the bytes that the policy says may be used, those that are left beside all who are not in these turns."""
    if policy.device_memory is None:
        return 0
    taking = {id(one) for one in turns}
    return policy.device_memory - sum(
        _device_bytes(one) for one in declaration.found if id(one) not in taking
    )


def clear_for_those_who_stay(declaration: Declaration, policy: OffloadPolicy) -> None:
    """Where only some roles are offloaded, the others send these home when they are used, and stand beside them.

    So they leave although nobody of the other roles needs their room, as in vLLM-Omni, where a DiT that is not
    selected evicts the encoders that are, and the other way round.
    """
    if policy.offload_components is None:
        return  # whoever could take turns does
    took_turns = {Role.ENCODER, Role.DIT, Role.PART}
    if declaration.everything or policy.vae == "exclusive":
        took_turns.add(Role.VAE)
    offloaded = [one for one in declaration.found if not one.resident]
    for one in declaration.found:
        if one.resident and one.role in took_turns:
            one.clears = list(offloaded)


def _device_bytes(found: Found) -> int:
    """What a component takes on the device: its bytes, each once, every group of them aligned."""
    slots = list(found.area.slots())
    for slot in slots:
        refuse_unmovable_if_real(found.name, slot)  # a plan's, on meta, has a size, too
    return sum(span(run) for run in overlapping(extents(slots)))
