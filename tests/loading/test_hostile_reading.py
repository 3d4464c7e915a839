"""What can go wrong while weights are read: interrupts, refusals, other threads, files that change, the end."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import omni_components
from omni_components import ResidencyWarning, TransferError, WeightsError, load_components, offload
from omni_components.components.tensors import own_slots
from omni_components.components.unread import Source, Unread
from omni_components.loading import readahead
from omni_components.loading.deferred import Deferred, Plan
from omni_components.loading.files import WeightsFile
from omni_components.loading.fill import awaited, fill, map_in
from omni_components.loading.readahead import ReadAhead
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.simulated.faults import every_fault
from omni_components.transfer import device, masters
from tests.diffusers import tiny
from tests.residency.interrupts import Interrupter

PACKAGE = Path(omni_components.__file__).parent
READING = tuple(str(PACKAGE / part) for part in ("transfer", "components/unread.py", "loading"))
NAMES = ("encoder", "transformer")
WIDTH = 48


class Body(nn.Module):
    """Weights that fill whole places, biases that do not, a tie, an empty one, a buffer."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.layers[-1].weight = self.layers[0].weight
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale[0]


class Pipe:
    """Two components that take turns."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("encoder",)
    _vae_modules = ()

    def __init__(self):
        self.encoder, self.transformer = Body(8), Body(5)


@pytest.fixture
def small_slabs(monkeypatch):
    """Each component here has several."""
    monkeypatch.setattr(masters, "SLAB_BYTES", 16 << 10)


@pytest.fixture
def place(tmp_path):
    return saved(tmp_path)


def saved(folder):
    torch.manual_seed(3)
    pipe = Pipe()
    for name in NAMES:
        body = getattr(pipe, name)
        tied = f"layers.{len(body.layers) - 1}.weight"
        state = {path: one for path, one in body.state_dict().items() if path != tied}
        save_file(state, folder / f"{name}.safetensors")
    return folder


def read_from(folder, *, later=True, dtype=torch.bfloat16):
    """Its weights are converted on the way, and so have to be read into slabs; in float32 they stay mapped."""
    pipe = Pipe()
    for name in NAMES:
        body, file = getattr(pipe, name), WeightsFile(folder / f"{name}.safetensors", name)
        file.pages()
        made = {}
        for path, module in body.named_modules():
            for slot in own_slots(path, module):
                key = slot.path if slot.path in file.entries else "layers.0.weight"
                if key not in made:
                    one = Deferred.of(file.entries[key]).to(dtype)
                    made[key] = one if slot.table is module._buffers else one.parameter(False)
                slot.put(made[key])
        rest = map_in(awaited(body), silent)
        fill(body, rest, silent, later=later)
    return pipe


def silent(count):
    """Nobody watches."""


def unread(module):
    return [one for one in module.parameters() if type(one) is Unread]


@pytest.fixture
def values(place):
    """What is to be found, by component and path."""
    pipe = read_from(place, later=False)
    return {name: dict(getattr(pipe, name).state_dict()) for name in NAMES}


def equal(body, wanted):
    found = body.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[key].cpu(), wanted[key]) for key in wanted)


def works(handle, pipe, values, sim):
    """I1 to I8: everything is there, pinned and counted once, as if nothing had happened."""
    for name in NAMES:
        with handle.scope(name):
            assert equal(getattr(pipe, name), values[name])
            assert unread(getattr(pipe, name)) == []
            handle.ledger.audit()
            handle.ledger.check()
    slabs = [slab for name in NAMES for slab in handle.ledger.mover.cargo(name).home.slabs]
    facts = handle.report().facts
    assert sim.stats().pinned == facts.pinned_bytes == sum(masters.pages(one.tensor.numel()) for one in slabs)
    assert facts.pageable_bytes == 0
    for name in NAMES:
        cargo = handle.ledger.mover.cargo(name)
        assert cargo.payload(pinned=True) == cargo.payload()
    assert sim.races == []


def at_rest(sim):
    assert (sim.stats().pinned, sim.stats().allocated) == (0, 0)


# --- interrupts and faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", ["lazy", "engine"])
def test_an_interrupt_at_any_place_of_a_load_that_reads(place, values, sim, small_slabs, copies):
    """I4, I6, I7, I8: between slab and slab, in a pin, in a file; the next load does what is left, once."""
    sim.copies = copies
    at, stride = 0, max(1, 1800 // settings().max_examples)
    while True:
        pipe = read_from(place)
        with offload(pipe, sim.device) as handle:
            interrupter = Interrupter(at, *READING)
            try:
                with interrupter:
                    for name in NAMES:
                        handle.load(name)
            except KeyboardInterrupt:
                pass
            handle.ledger.audit()
            handle.ledger.check()
            works(handle, pipe, values, sim)
        at_rest(sim)
        if not interrupter.place:
            return
        at += stride


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupt_at_the_pin_of_the_second_slab(place, values, sim, small_slabs, monkeypatch, when):
    """I8: it is pinned once, by the next load, and given back."""
    calls, plain = [], torch.sim.host_register

    def register(pointer, nbytes):
        calls.append(pointer)
        if when == "after" or len(calls) != 3:
            plain(pointer, nbytes)
        if len(calls) == 3:
            raise KeyboardInterrupt

    pipe = read_from(place)
    with offload(pipe, sim.device) as handle:
        monkeypatch.setattr(torch.sim, "host_register", register)
        with pytest.raises(KeyboardInterrupt):
            handle.load("encoder")
        assert sim.stats().pinned == handle.report().facts.pinned_bytes > 0
        works(handle, pipe, values, sim)
    at_rest(sim)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
@pytest.mark.parametrize("point", ["step", "pin", "copy"])
def test_a_fault_of_the_device_while_weights_are_read(place, values, sim, small_slabs, point, error):
    """I6, I7: what was read stays read, what was enqueued has ended, and nothing is left on the device."""
    fired = 0
    for trial in every_fault(sim, point, error=error):
        pipe = read_from(place)
        with offload(pipe, sim.device) as handle:
            sim.fail_at(point, trial.number, error=error)  # counted from here, not from enabling
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResidencyWarning)  # a pin that is refused
                with trial:
                    handle.load("encoder")
                    handle.load("transformer")
            fired += trial.fired
            handle.ledger.audit()
            handle.ledger.check()
            for name in NAMES:
                with handle.scope(name):
                    assert equal(getattr(pipe, name), values[name])
            assert sim.races == []
        at_rest(sim)
    assert fired > 3


def test_a_pin_that_is_refused_for_the_second_slab_of_three(place, values, sim, small_slabs):
    """I8: that one is pageable, which is said once; the runs say which, and the bytes arrive."""
    pipe = read_from(place)
    with offload(pipe, sim.device) as handle:
        sim.fail(pin=1)
        with pytest.warns(ResidencyWarning, match="could not be pinned") as said:
            handle.load("encoder")
        assert len(said) == 1
        cargo = handle.ledger.mover.cargo("encoder")
        plain = [one for one in cargo.home.slabs if not one.pinned and one.tensor.numel()]
        assert len(plain) == 1
        assert handle.report().facts.pageable_bytes == plain[0].tensor.numel()
        assert cargo.payload(pinned=False) == sum(one.numel() for _, one in plain[0].copies())
        for name in NAMES * 2:
            with handle.scope(name):
                assert equal(getattr(pipe, name), values[name])
        handle.ledger.audit()
    assert sim.races == []
    at_rest(sim)


def test_a_host_that_pins_less_than_one_component(place, values, sim, small_slabs):
    sim.pinned_capacity = 24 << 10
    pipe = read_from(place)
    with offload(pipe, sim.device) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore", ResidencyWarning)
        for name in NAMES * 2:
            with handle.scope(name):
                assert equal(getattr(pipe, name), values[name])
        facts = handle.report().facts
        assert facts.pinned_bytes == sim.stats().pinned <= 24 << 10
        assert facts.pageable_bytes > 0
    assert sim.races == []


# --- copies that are under way --------------------------------------------------------------------------------

ACTIONS = ("encoder", "transformer", "nested", "use", "write", "adopt", "release", "fail")


@settings(max_examples=min(20, settings().max_examples))
@given(data=st.data())
def test_copies_in_any_order_among_what_people_do(tmp_path_factory, data):
    """I1 to I8: weights used, written and replaced on the host before, between and after loads that read."""
    place = tmp_path_factory.getbasetemp() / "any_order"
    if not place.exists():
        place.mkdir()
        saved(place)
    with pytest.MonkeyPatch.context() as patch, SimulatedAccelerator() as sim:
        patch.setattr(masters, "SLAB_BYTES", 16 << 10)
        sim.copies = data.draw(
            st.sampled_from(["lazy", "eager", "engine", lambda n: data.draw(st.integers(0, n))])
        )
        pipe, plain = read_from(place), read_from(place, later=False)
        order = data.draw(st.sampled_from([False, NAMES]))
        with offload(pipe, sim.device, prefetch=order, device_memory=1 << 20 if order else None) as handle:
            for action in data.draw(st.lists(st.sampled_from(ACTIONS), max_size=6)):
                act(action, data, sim, handle, pipe, plain)
                handle.ledger.check()
                handle.ledger.audit()
            for name in NAMES:
                with handle.scope(name):
                    assert equal(getattr(pipe, name), getattr(plain, name).state_dict())
        for name in NAMES:
            assert equal(getattr(pipe, name), getattr(plain, name).state_dict())
        at_rest(sim)
    assert sim.races == []


def act(action, data, sim, handle, pipe, plain):
    if action in NAMES:
        with handle.scope(action):
            x = torch.ones(2, WIDTH, dtype=torch.bfloat16)
            found = getattr(pipe, action)(x.to(sim.device)).cpu()
        assert torch.equal(found, getattr(plain, action)(x))
    elif action == "nested":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResidencyWarning)
            with handle.scope("encoder"), handle.scope("transformer"):
                assert equal(pipe.transformer, plain.transformer.state_dict())
    elif action == "release":
        handle.release()
    elif action == "fail":
        sim.fail(step=data.draw(st.integers(0, 30)), error=KeyboardInterrupt)
        try:
            handle.load(data.draw(st.sampled_from(NAMES)))
        except KeyboardInterrupt:
            pass
        finally:
            sim.heal()
    else:
        name = data.draw(st.sampled_from(NAMES))
        index = data.draw(st.integers(0, 3))
        mine, other = getattr(pipe, name).layers[index], getattr(plain, name).layers[index]
        if action == "use":
            assert torch.equal(mine.bias.cpu(), other.bias)
        elif action == "write":
            # A copy made ahead may be reading the master: what is written there meanwhile is copied again.
            with handle.scope(name) if handle.policy.prefetch else nullcontext():
                mine.bias.mul_(2)
            other.bias.mul_(2)
        else:
            handle.release()  # what is found at a switch is adopted
            fresh = torch.full((WIDTH,), 0.5 + index)
            like = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
            memory = torch.zeros(WIDTH, dtype=torch.bfloat16)
            mine.bias = Source().promise(memory, like, lambda target: target.copy_(fresh))
            other.bias = nn.Parameter(fresh.bfloat16(), requires_grad=False)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_load_that_ends_early_has_its_copies_behind_it(place, values, sim, small_slabs, monkeypatch, after):
    """I6: nobody reads the masters, or writes to the device, once the error is out. Then both may be written to."""
    pipe = read_from(place)
    plain, left = masters.PinBudget.pin, [after]

    def pin(budget, slab):
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("no more")
        return plain(budget, slab)

    with offload(pipe, sim.device) as handle:
        monkeypatch.setattr(masters.PinBudget, "pin", pin)
        with pytest.raises(TransferError, match="no more"):
            handle.load("encoder")
        monkeypatch.undo()
        monkeypatch.setattr(masters, "SLAB_BYTES", 16 << 10)
        for slab in handle.ledger.mover.cargo("encoder").home.slabs:
            kept = slab.tensor.clone()
            slab.tensor.fill_(7)
            torch.accelerator.synchronize()  # a late copy would run now, and be found to have lost its source
            slab.tensor.copy_(kept)
        assert handle.ledger.present == ()
        works(handle, pipe, values, sim)
    assert sim.races == []


def test_weights_replaced_while_the_copy_that_followed_the_read_is_under_way(place, sim, small_slabs):
    """I8: their slab is unpinned at the next switch, and not before it has been read by the device."""
    pipe = read_from(place)
    with offload(pipe, sim.device) as handle:
        handle.load("encoder")
        before = sim.stats().pinned
        for layer in pipe.encoder.layers:
            for name in ("weight", "bias"):
                fresh = torch.ones(getattr(layer, name).shape, dtype=torch.bfloat16)
                setattr(layer, name, nn.Parameter(fresh, requires_grad=False))
        handle.release()
        assert sim.stats().pinned < before
        handle.ledger.audit()
    assert sim.races == []


def test_slabs_that_are_read_in_another_order_than_they_lie(place, sim, small_slabs, monkeypatch):
    """Files are read ahead from their start, and staging joins what follows each other."""
    pipe, read, fill = read_from(place), [], Plan.fill
    monkeypatch.setattr(
        Plan, "fill", lambda plan, target, told: read.append(target.data_ptr()) or fill(plan, target, told)
    )
    with offload(pipe, sim.device) as handle:
        handle.load("encoder")
        slabs = [one.tensor for one in handle.ledger.mover.cargo("encoder").home.slabs]
    order = [
        index
        for at in read
        for index, slab in enumerate(slabs)
        if slab.data_ptr() <= at < slab.data_ptr() + slab.numel()
    ]
    assert len(order) == len(read)
    assert order == sorted(order)
    assert order[-1] > 1


def test_a_device_without_streams(place, values, sim, small_slabs, monkeypatch):
    monkeypatch.setattr(device, "AcceleratorBackend", _refuses)
    pipe = read_from(place)
    with offload(pipe, sim.device) as handle:
        assert isinstance(handle.ledger.mover.backend, device.StreamlessBackend)
        works(handle, pipe, values, sim)
    at_rest(sim)


def _refuses(device):
    raise RuntimeError("no streams here")


def test_the_host_as_the_device(place, values, small_slabs):
    pipe = read_from(place)
    with offload(pipe, "cpu") as handle:
        for name in NAMES * 2:
            with handle.scope(name):
                assert unread(getattr(pipe, name)) == []
                assert equal(getattr(pipe, name), values[name])
        handle.ledger.audit()


# --- others who want the same ---------------------------------------------------------------------------------


def test_threads_that_use_what_a_load_is_reading(place, values, sim, small_slabs):
    """I2, I5: on the host, by their own operations, while both components are loaded in turns."""
    pipe = read_from(place)
    begun, faults = threading.Barrier(4), []

    def look(way):
        begun.wait()
        for name, key in itertools.product(NAMES, ("layers.3.bias", "layers.2.weight")):
            host = next(one.host for one in members[name] if one.path.endswith(key))
            if not torch.equal(way(host), values[name][key]):
                faults.append((name, key))

    def pickled(one):
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        return torch.load(file)

    with offload(pipe, sim.device) as handle:
        members = {name: list(handle.ledger.mover.cargo(name).members()) for name in NAMES}
        ways = (torch.clone, copy.deepcopy, pickled)
        threads = [threading.Thread(target=look, args=(one,)) for one in ways]
        for one in threads:
            one.start()
        begun.wait()
        for name in NAMES:
            with handle.scope(name):
                assert equal(getattr(pipe, name), values[name])
        for one in threads:
            one.join()
        assert faults == []
        works(handle, pipe, values, sim)
    at_rest(sim)


def test_two_pipelines_of_one_folder_under_two_ledgers(place, values, sim, small_slabs):
    """I3: each has its own masters; what one reads, or writes, the other does not see."""
    first, second = read_from(place), read_from(place)
    with offload(first, sim.device) as one, offload(second, sim.device) as other:
        with one.scope("encoder"):
            first.encoder.layers[1].bias.zero_()
        assert len(unread(second.encoder)) > 0
        works(other, second, values, SimpleRaces(sim, one))
        with one.scope("encoder"):
            assert first.encoder.layers[1].bias.eq(0).all()
        one.ledger.audit()
    assert sim.races == []
    at_rest(sim)


class SimpleRaces:
    """An accelerator as one of its two users sees it."""

    def __init__(self, sim, other):
        self.races = sim.races
        self._sim, self._other = sim, other

    def stats(self):
        found = self._sim.stats()
        pinned = found.pinned - self._other.report().facts.pinned_bytes
        return replace(found, pinned=pinned)


@pytest.mark.parametrize("used", ["one weight", "one slab", "a copy", "its state"])
def test_a_component_of_which_a_user_has_read_a_part(place, values, sim, small_slabs, used):
    """I5, I7: the load reads the rest; what was read stays what it is, and pins are as ever."""
    pipe = read_from(place)
    kept = None
    with offload(pipe, sim.device) as handle:
        if used == "one weight":
            pipe.encoder.layers[4].bias.sum()
        elif used == "one slab":
            first = handle.ledger.mover.cargo("encoder").home.slabs[0]
            for member in first.groups[0].members:
                member.host.sum()
            assert 0 < len(unread(pipe.encoder)) < len(list(pipe.encoder.parameters()))
        elif used == "a copy":
            kept = copy.deepcopy(pipe.encoder)
        else:
            kept = pickle.loads(pickle.dumps(pipe.encoder.state_dict()))
        works(handle, pipe, values, sim)
    if isinstance(kept, nn.Module):
        assert equal(kept, values["encoder"])
    elif kept is not None:
        assert all(torch.equal(kept[key], one) for key, one in values["encoder"].items())
    at_rest(sim)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two kinds of pipelines."""
    made = tmp_path_factory.mktemp("two")
    tiny.stable_diffusion().save_pretrained(made / "sd")
    tiny.wan().save_pretrained(made / "wan")
    return made / "sd", made / "wan"


def states(pipe):
    modules = {name: one for name, one in pipe.components.items() if isinstance(one, nn.Module)}
    return {name: {**one.state_dict(), **dict(one.named_buffers())} for name, one in modules.items()}


def alike(found, wanted):
    return found.keys() == wanted.keys() and all(
        one.dtype is other.dtype and torch.equal(one, other)
        for name in wanted
        for one, other in zip(found[name].values(), wanted[name].values(), strict=True)
    )


def test_eight_threads_that_load_at_once(folders):
    """Element types and hooks of torch are the process's: none may get another's, and all are as before."""
    asked = list(itertools.product(folders, (torch.bfloat16, None, torch.float16)))
    wanted = [states(load_components(folder, dtype=dtype)) for folder, dtype in asked]
    begun, faults = threading.Barrier(8), []

    def load(index):
        begun.wait()
        folder, dtype = asked[index % 6]
        try:
            pipe = load_components(folder, dtype=dtype, lazy=index % 2 == 1)
            if not alike(states(pipe), wanted[index % 6]):
                faults.append((index, dtype))
        except Exception as error:
            faults.append((index, error))

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(interval)
    assert faults == []
    assert torch.get_default_dtype() is torch.float32


# --- where copies come from -----------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are recognised on Linux only")
def test_a_slab_where_a_file_was_mapped(place, values, sim):
    """Its bytes are pinned, and no more pass through staging, which would hold twice as many."""
    pipe = read_from(place, dtype=torch.float32)
    with offload(pipe, sim.device) as handle:
        for name in NAMES:
            handle.load(name)
        staging = handle.ledger.mover.staging
        staging._mappings = Everything()  # as if all memory had been some file's when the system was asked
        handle.load("encoder")  # a second time: pinned
        assert sim.stats().pinned == handle.report().facts.pinned_bytes
        handle.load("transformer")
        assert staging.slabs == ()
        handle.load("encoder")
        assert staging.slabs == ()
    at_rest(sim)


class Everything:
    """All addresses."""

    def __contains__(self, pointer):
        return True


# --- files ----------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path):
    """Hundreds of files."""
    for index in range(300):
        save_file({"w": torch.full((2048,), float(index))}, tmp_path / f"{index:03}.safetensors")
    return [WeightsFile(one, "encoder") for one in sorted(tmp_path.glob("*.safetensors"))]


@pytest.fixture
def pieces(monkeypatch):
    """Small ones, and what was asked for."""
    monkeypatch.setattr(readahead, "PIECE", 4096)


def test_some_files_of_hundreds_that_cannot_be_read(many, monkeypatch):
    """A file that is deleted, cut short or replaced does not keep the others from being read ahead."""
    asked, plain = [], readahead.bring_in
    for index, one in enumerate(many[:60]):
        if index % 3 == 0:
            one.path.unlink()
        elif index % 3 == 1:
            os.truncate(one.path, 100)
        else:
            one.path.unlink()
            one.path.mkdir()

    def noted(path, *place):
        asked.append(path)
        if path in leaving:
            path.unlink()
        plain(path, *place)

    leaving = {one.path for one in many[60:80]}

    monkeypatch.setattr(readahead, "bring_in", noted)
    ReadAhead(many).wait()
    assert set(asked) >= {one.path for one in many[60:]}


def test_a_file_that_is_cut_and_grown_while_it_is_read_ahead(tmp_path, pieces):
    """No page past its end is touched: the system would end the process."""
    save_file({"w": torch.zeros(1 << 20)}, tmp_path / "w.safetensors")
    file = WeightsFile(tmp_path / "w.safetensors", "encoder")
    ahead = [ReadAhead([file] * 8) for _ in range(2)]
    while any(reader.is_alive() for one in ahead for reader in one._readers):
        os.truncate(file.path, 4096)
        os.truncate(file.path, file.size)
    for one in ahead:
        one.wait()


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm to write to")
def test_a_folder_in_memory(folders):
    place = Path("/dev/shm") / f"omni-{os.getpid()}"
    try:
        shutil.copytree(folders[0], place)
        found = states(load_components(place, dtype=torch.bfloat16, lazy=True))
        assert alike(found, states(load_components(folders[0], dtype=torch.bfloat16)))
    finally:
        shutil.rmtree(place, ignore_errors=True)


def mapped(folder):
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
@pytest.mark.parametrize("asked", [{"lazy": True}, {"masters": "pinned"}, {}])
def test_a_pipeline_that_is_dropped_while_its_files_are_read_ahead(folders, pieces, asked):
    """I8: once the readers are done, no page of its files is left in the process."""
    before = set(threading.enumerate())
    pipe = load_components(folders[0], dtype=torch.bfloat16, **asked)
    readers = [one for one in threading.enumerate() if one not in before]
    del pipe
    gc.collect()
    for one in readers:
        one.join()
    gc.collect()
    assert mapped(folders[0]) == []


def test_a_pipeline_that_cannot_be_put_together_reads_no_further(folders, pieces, monkeypatch):
    """I6: its models were built, and nobody will use them."""
    asked, made, failed = [], [], threading.Event()

    class Noted(ReadAhead):
        def __init__(self, *files):
            made.append(self)
            super().__init__(*files)

    def bring_in(*piece):
        asked.append(piece)
        failed.wait(60)

    def fails(*parts):
        raise KeyboardInterrupt

    monkeypatch.setattr(readahead, "bring_in", bring_in)
    monkeypatch.setattr("omni_components.loading.load.ReadAhead", Noted)
    monkeypatch.setattr("omni_components.loading.load._assembled", fails)
    with pytest.raises(KeyboardInterrupt):
        load_components(folders[0])
    failed.set()
    made[0].wait()
    assert len(asked) <= readahead.READERS


# --- the process ----------------------------------------------------------------------------------------------


def test_a_system_that_starts_no_more_threads(many, monkeypatch):
    """Files are read when they are needed, as before."""
    plain, started = threading.Thread.start, []

    def start(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    ahead = ReadAhead(many)
    ahead.wait()
    assert len(ahead._readers) == 1


LIMITS = {
    "files": (resource.RLIMIT_NOFILE, lambda: len(os.listdir("/proc/self/fd")) + 6),
    "addresses": (resource.RLIMIT_AS, lambda: _size("VmSize") + (48 << 20)),
    "locked": (resource.RLIMIT_MEMLOCK, lambda: 0),
}


def _size(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits are set by what Linux tells")
@pytest.mark.parametrize("limit", LIMITS)
def test_a_process_with_hardly_any_room(folders, limit):
    """Reading ahead goes without, in silence; a load works, or says what is missing."""
    load_components(folders[0], dtype=torch.bfloat16, lazy=True)  # so that what it imports is there
    kind, most = LIMITS[limit]
    assert _in_a_child(lambda: _limited(folders[0], kind, most())) == 0


def _limited(folder, kind, most):
    unhandled = []
    threading.excepthook = unhandled.append
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    before = set(threading.enumerate())
    try:
        states(load_components(folder, dtype=torch.bfloat16, lazy=True))
    except (WeightsError, OSError, RuntimeError, MemoryError):
        assert kind is not resource.RLIMIT_MEMLOCK
    for one in threading.enumerate():
        if one not in before:
            one.join(20)
    assert unhandled == []


def _in_a_child(act):
    """Its exit status, of a process that ends as an interpreter does; it may take a minute."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    for _ in range(6000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"


def test_a_process_that_forks_while_files_are_read_ahead(many, folders, pieces):
    """The child has none of the readers, and may have been forked while one of them held their lock."""
    ahead = ReadAhead(many * 5)
    with ahead._lock:
        status = _in_a_child(lambda: (ahead.stop(), ahead.wait(), states(load_components(folders[0]))))
    ahead.stop()
    ahead.wait()
    assert status == 0


ENDING = """
import os, sys, time
from pathlib import Path
import torch
from omni_components.loading import readahead
from omni_components.loading.files import WeightsFile

readahead.PIECE = 4096
files = [WeightsFile(one, "encoder") for one in Path(sys.argv[1]).glob("*.safetensors")] * 40
children = []
for turn in range(4):
    child = os.fork()
    if child == 0:
        readahead.ReadAhead(files)
        time.sleep(turn / 500)
        sys.exit(0)
    children.append(child)
raise SystemExit(max(os.waitpid(child, 0)[1] for child in children) != 0)
"""


def test_an_interpreter_that_ends_while_files_are_read_ahead(many):
    """A reader that torch had let go of the interpreter's lock would take the process down with an abort."""
    found = subprocess.run(
        [sys.executable, "-c", ENDING, str(many[0].path.parent)], timeout=120, capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (0, "")


class Collected(dict):
    """As if a collection came while somebody goes through it: then finalizers take entries out."""

    def items(self):
        for one in super().items():
            yield one
            self.pop(next(reversed(self)), None)


def test_slabs_of_a_dropped_pipeline_that_are_collected_while_those_of_the_next_are_looked_for(monkeypatch):
    """Modules are cycles: their slabs go at any allocation."""
    slabs = [masters.ready_slab(4096) for _ in range(3)]
    monkeypatch.setattr(masters, "_READY", Collected(masters._READY))
    assert len(slabs) <= len(masters._READY)
    assert masters.laid_out([]) == ([], [])
