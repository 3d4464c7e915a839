"""Eight threads on one ledger, with the real mover on the simulated device."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import settings

from omni_components import Offload, ResidencyDeadlockError, offload
from omni_components.residency.book import State
from omni_components.testing import SimulatedAccelerator
from omni_components.testing.plugin import require_simulated_accelerator
from tests.residency.generation import PROMPTS, Pipeline, resident_results
from tests.residency.rigs import Actor
from tests.residency.test_arena import subject

pytestmark = pytest.mark.filterwarnings("ignore::omni_components.ResidencyWarning")

THREADS = 8
REQUESTS = {"default": 60}  # each thread's; other profiles do all 500
COMPONENTS = ("text", "reasoner", "generator", "vae")


def stage_of(pipe: Pipeline, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What one component computes by itself, without a hook or a context."""
    stages = {
        "text": pipe.text.forward,
        "reasoner": pipe.backbone.reason,
        "generator": pipe.backbone.generate,
        "vae": pipe.vae.forward,
    }
    return stages[name]


class Server:
    """A pipeline that several threads ask for several things at once."""

    def __init__(self, sim: SimulatedAccelerator, **policy: Any) -> None:
        self.pipe = Pipeline(counts=False)
        twin = Pipeline(counts=False)
        self.results = resident_results()
        with torch.no_grad():
            self.stages = {name: [stage_of(twin, name)(prompt) for prompt in PROMPTS] for name in COMPONENTS}
        self.handle: Offload = offload(self.pipe, sim.device, **policy)
        self.device = sim.device
        self.refused = 0

    def work(self, seed: int, requests: int) -> None:
        """Requests of one thread; every second thread computes on a stream of its own."""
        choose = random.Random(seed)
        with torch.Stream(device=self.device) if seed % 2 else nullcontext(), torch.no_grad():
            for _ in range(requests):
                act = choose.choices((self.request, self.phase, self.nested, self.chore), (4, 4, 2, 1))[0]
                act(choose)

    def request(self, choose: random.Random) -> None:
        prompt = choose.randrange(len(PROMPTS))
        assert torch.equal(self.pipe(PROMPTS[prompt]).cpu(), self.results[prompt])

    def phase(self, choose: random.Random) -> None:
        name = choose.choice(COMPONENTS)
        with self.handle.scope(name):
            self.compute(name, choose)
            self.handle.ledger.check()

    def nested(self, choose: random.Random) -> None:
        """A ring of threads is refused to one of them; it lets go, and asks again."""
        outer, inner = choose.choice(COMPONENTS), choose.choice(COMPONENTS)
        while True:
            try:
                with self.handle.scope(outer):
                    with self.handle.scope(inner):
                        self.compute(inner, choose)
                    self.compute(outer, choose)
                return
            except ResidencyDeadlockError:
                self.refused += 1

    def chore(self, choose: random.Random) -> None:
        if choose.random() < 0.5:
            self.handle.release()
        else:
            self.handle.load(choose.choice(COMPONENTS))

    def compute(self, name: str, choose: random.Random) -> None:
        prompt = choose.randrange(len(PROMPTS))
        assert self.handle.ledger.state(name) is State.DEVICE
        result = stage_of(self.pipe, name)(PROMPTS[prompt].to(self.device))
        assert torch.equal(result.cpu(), self.stages[name][prompt]), name


@pytest.mark.parametrize(
    "policy",
    [{"vae": "resident", "arena": "keep"}, {"vae": "exclusive", "arena": "fit"}],
    ids=["keep", "fit"],
)
def test_eight_threads_with_random_requests_get_what_a_resident_run_gives(
    sim: SimulatedAccelerator, policy: dict[str, Any], one_thread: None
) -> None:
    """I1, I2, I4, I5, I6, I8: no deadlock, no race, outputs bit for bit; rings of waits are refused."""
    requests = REQUESTS.get(settings.get_current_profile_name(), 500)
    start = time.perf_counter()
    server = Server(sim, **policy)
    actors = [Actor(f"worker {seed}").begin(partial(server.work, seed, requests)) for seed in range(THREADS)]
    for actor in actors:
        actor.end(120)
    server.handle.ledger.audit()
    assert all(server.handle.ledger.pins(name) == 0 for name in COMPONENTS)
    assert server.handle.ledger.history.peak <= server.handle.ledger.predicted_peak
    switches = sum(one.loads for one in server.handle.ledger.history.totals.values())
    print(
        f"{THREADS * requests} requests, {switches} loads, {server.refused} rings refused, "
        f"{time.perf_counter() - start:.1f} s"
    )
    server.handle.disable()
    assert sim.stats().allocated == 0


def test_a_ring_of_eight_threads_is_told_within_a_second_and_the_others_go_on(one_thread: None) -> None:
    """I4: each thread has one component and waits for the rival of its neighbour's; the last one is told."""
    require_simulated_accelerator()
    names = "abcdefgh"
    one = subject(names + names.upper(), " ".join(name + name.upper() for name in names))
    everyone = threading.Barrier(THREADS)
    told: list[tuple[float, int]] = []

    def work(place: int) -> None:
        with one.ledger.scope(names[place]):
            everyone.wait(10)
            start = time.perf_counter()
            try:
                with one.ledger.scope(names[(place + 1) % THREADS].upper()):
                    pass
            except ResidencyDeadlockError as error:
                told.append((time.perf_counter() - start, len(error.ring)))

    actors = [Actor(f"worker {place}").begin(partial(work, place)) for place in range(THREADS)]
    for actor in actors:
        actor.end(20)
    ((seconds, length),) = told
    assert seconds < 1
    assert length == THREADS + 1  # the ring comes back to where it began
    one.ledger.audit()
    assert one.violations() == []
    one.close()
