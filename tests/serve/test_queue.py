"""Waiting, drawing together, giving up: what happens between a request and its picture."""

from __future__ import annotations

import threading
import time

import httpx
import pytest
import torch

from omni_components import Omni
from omni_components.serve.jobs import Job, JobQueue, QueueClosedError, QueueFullError, Sampling
from tests.serve.running import LONG, STEPS, Running, asked, is_right, pictures, running, until

FAST, SLOW = Sampling(steps=2), Sampling(steps=50)


def job(sampling: Sampling = FAST, pictures: int = 1) -> Job:
    return Job("seven", tuple(range(pictures)), sampling)


def queue_of(*jobs: Job, limit: int = 10) -> JobQueue:
    queue = JobQueue(limit)
    for one in jobs:
        queue.put(one)
    return queue


# --- the queue by itself ----------------------------------------------------------------------------------


def test_what_can_be_drawn_with_the_first_goes_with_it_the_rest_keeps_its_order() -> None:
    fast, slow = [job(), job(), job()], [job(SLOW), job(SLOW)]
    queue = queue_of(fast[0], slow[0], fast[1], slow[1], fast[2])
    assert queue.take(8, 0) == fast
    assert queue.take(8, 0) == slow
    assert queue.take(8, 0) == []


def test_pictures_that_do_not_fit_wait_for_the_next_run() -> None:
    big, small = job(pictures=3), job(pictures=1)
    queue = queue_of(job(pictures=2), big, small)
    assert [len(one.seeds) for one in queue.take(4, 0) or ()] == [2, 1]
    assert queue.take(4, 0) == [big]


def test_a_request_for_more_than_a_run_comes_alone() -> None:
    big = job(pictures=9)
    assert queue_of(big, job()).take(4, 0) == [big]


def test_a_place_is_free_again_at_once_when_somebody_gives_up() -> None:
    first, second = job(), job()
    queue = queue_of(first, limit=1)
    with pytest.raises(QueueFullError):
        queue.put(second)
    queue.discard(first)
    queue.put(second)
    assert first.abandoned
    assert queue.take(8, 0) == [second]


def test_a_closed_queue_gives_what_it_has_and_takes_nothing() -> None:
    first = job()
    queue = queue_of(first)
    queue.close()
    with pytest.raises(QueueClosedError):
        queue.put(job())
    assert queue.take(8, None) == [first]
    assert queue.take(8, None) is None


def test_closing_wakes_who_waits() -> None:
    queue, got = JobQueue(1), []
    waiting = threading.Thread(target=lambda: got.append(queue.take(8, None)))
    waiting.start()
    queue.close()
    waiting.join(10)
    assert got == [None]


# --- drawing together -------------------------------------------------------------------------------------


def test_requests_that_wait_are_drawn_together_and_each_gets_its_own(omni: Omni) -> None:
    prompts = ["one", "two four", "bold 3", "thin 8"]
    with running(omni) as up:
        up.draw()  # the pace of the first run is no measure
        before, batches = _loads(up), up.service.worker.tally.batches
        with up.holding() as hold:
            first = up.aside("seven")
            hold.wait()
            others = [up.aside(prompt, seed=at) for at, prompt in enumerate(prompts)]
            hold.let_go()
            assert is_right(pictures(first.result())[0])
            for at, (prompt, answer) in enumerate(zip(prompts, others, strict=True)):
                assert is_right(pictures(answer.result())[0], prompt, at), prompt
        assert up.service.worker.tally.batches == batches + 2
        after = _loads(up)
        assert {name: after[name] - before[name] for name in after} == {
            "text_encoder": 2,
            "reasoner": 2,
            "generator": 2,
            "vae": 0,
        }
        up.check()


def test_what_is_asked_for_differently_is_not_drawn_together(omni: Omni) -> None:
    with running(omni) as up, up.holding() as hold:
        batches = up.service.worker.tally.batches
        answers = [up.aside()]
        hold.wait()
        answers += [up.aside(), up.aside(guidance_scale=1.0), up.aside(num_inference_steps=STEPS + 1)]
        hold.let_go()
        assert [one.result().status_code for one in answers] == [200] * 4
        assert up.service.worker.tally.batches == batches + 4


def test_one_request_for_more_pictures_than_a_run_has(omni: Omni) -> None:
    with running(omni, max_batch=2) as up:
        drawn = pictures(up.draw(n=5, seed=1))
        assert [is_right(one, seed=1 + at) for at, one in enumerate(drawn)] == [True] * 5
        assert up.service.worker.tally.batches == 3


def test_a_request_that_fails_among_others_fails_alone(omni: Omni, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = omni.generate

    def generate(prompt, **arguments):
        if "nine" in prompt:
            raise ValueError("nine is not possible")
        return draw(prompt, **arguments)

    with running(omni) as up, up.holding() as hold:
        monkeypatch.setattr(omni, "generate", generate)
        first = up.aside()
        hold.wait()
        good, bad, also_good = up.aside("one"), up.aside("nine"), up.aside("two")
        hold.let_go()
        assert is_right(pictures(first.result())[0])
        assert is_right(pictures(good.result())[0], "one")
        assert is_right(pictures(also_good.result())[0], "two")
        assert bad.result().status_code == 400
        assert (
            bad.result().json()["error"]["message"] == "The model refuses this request: nine is not possible"
        )
        assert up.service.worker._most == 8  # it was not their number


def test_pictures_that_fail_together_and_work_alone_are_not_so_many_the_next_time(
    omni: Omni, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = omni.generate

    def generate(prompt, **arguments):
        if not isinstance(prompt, str) and len(prompt) > 2:
            raise torch.OutOfMemoryError("too many")
        return draw(prompt, **arguments)

    with running(omni, max_batch=4) as up, up.holding() as hold:
        monkeypatch.setattr(omni, "generate", generate)
        answers = [up.aside()]
        hold.wait()
        answers += [up.aside() for _ in range(4)]
        hold.let_go()
        assert all(is_right(pictures(one.result())[0]) for one in answers)
        assert len(pictures(up.draw(n=4))) == 4
        assert up.service.worker._most == 2


# --- giving up ------------------------------------------------------------------------------------------------


def test_the_time_of_a_request_is_over_while_it_waits(omni: Omni) -> None:
    with running(omni, timeout=0.3) as up:
        with up.holding() as hold:
            first, second = up.aside(), up.aside()
            hold.wait()
            for late in (first.result(), second.result()):
                assert late.status_code == 503
                assert late.json()["error"]["code"] == "timeout"
                assert "retry-after" in late.headers
            assert len(up.service.queue) == 0  # it does not keep its place
        until(lambda: up.service.worker.tally.running == 0)
        assert is_right(pictures(up.draw())[0])


def test_a_client_that_leaves_while_it_waits_is_not_drawn_for(service: Running) -> None:
    drawn = service.service.worker.tally.pictures
    with service.holding() as hold:
        first = service.aside()
        hold.wait()
        _ask_and_leave(service)
        until(lambda: len(service.service.queue) == 0)
        hold.let_go()
        assert is_right(pictures(first.result())[0])
    until(lambda: service.service.worker.tally.running == 0)
    assert service.service.worker.tally.pictures == drawn + 1


def test_a_client_that_leaves_between_two_steps_ends_the_run(omni: Omni) -> None:
    with running(omni, max_steps=100_000) as up:
        _ask_and_leave(up, num_inference_steps=100_000)  # minutes, if nobody stopped it
        start = time.monotonic()
        until(lambda: up.service.worker.tally.running == 0)
        assert time.monotonic() - start < 10
        assert up.service.worker.tally.pictures == 0
        assert 'requests_total{replica="",status="499"} 1.0' in up.client.get("/metrics").text
        up.check()


def test_the_others_of_a_run_are_drawn_though_one_leaves(omni: Omni) -> None:
    with running(omni, max_steps=LONG) as up:
        with up.holding() as hold:
            first = up.aside()
            hold.wait()
            stays = up.aside("one", num_inference_steps=STEPS)
            _ask_and_leave(up)
            hold.let_go()
            assert is_right(pictures(first.result())[0])
            assert is_right(pictures(stays.result())[0], "one")
        up.check()


def _ask_and_leave(up: Running, **more: object) -> None:
    before = up.present
    with httpx.Client() as client:
        asking = threading.Thread(target=_sent_and_cut, args=(up, client, more))
        asking.start()
        until(lambda: up.present > before)
        asking.join()


def _sent_and_cut(up: Running, client: httpx.Client, more: dict) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post(
            f"{up.url}/v1/images/generations", json=asked(**more), timeout=httpx.Timeout(10, read=0.5)
        )


# --- idle -----------------------------------------------------------------------------------------------------


def test_a_service_that_is_idle_for_long_gives_the_device_back(omni: Omni) -> None:
    with running(omni, idle_release=0.2) as up:
        assert is_right(pictures(up.draw())[0])
        until(lambda: up.service.ledger.present == ("vae",))  # the resident stays
        up.check()


def _loads(up: Running) -> dict[str, int]:
    return {one["name"]: one["loads"] for one in up.client.get("/v1/residency").json()["components"]}
