"""What Prometheus reads is what the ledger's history and the requests add up to, to the last byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_components import Omni
from omni_components.serve.metrics import Metrics
from tests.serve.running import Running, demo, pictures, running, until

TAKES_TURNS = ("text_encoder", "reasoner", "generator")


@pytest.fixture
def fresh() -> Iterator[Running]:
    """A service that has done nothing yet, of a ledger whose history begins with it."""
    with demo() as omni, running(omni) as up:
        yield up


def scraped(up: Running) -> dict[tuple[str, str], float]:
    """By a sample's name and its component or status; both empty where it has none."""
    text = up.client.get("/metrics").text
    return {
        (
            sample.name.removeprefix("omni_components_"),
            sample.labels.get("component") or sample.labels.get("status", ""),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "_bucket" not in sample.name and "_created" not in sample.name
    }


def test_the_counters_are_the_ledgers_account(fresh: Running) -> None:
    """I8: three requests one after the other; each component crosses the link once for each."""
    for _ in range(3):
        assert len(pictures(fresh.draw())) == 1
    until(lambda: fresh.service.worker.tally.running == 0)
    seen, ledger = scraped(fresh), fresh.service.ledger
    assert ledger is not None
    events = list(ledger.history)
    for name in (*TAKES_TURNS, "vae"):
        loads = [one for one in events if (one.kind, one.component) == ("load", name)]
        evictions = [one for one in events if (one.kind, one.component) == ("evict", name)]
        assert seen["loads_total", name] == len(loads)
        assert seen["evictions_total", name] == len(evictions)
        assert seen["bytes_to_device_total", name] == sum(one.bytes for one in loads)
        assert seen["bytes_to_host_total", name] == 0  # weights do not change
        assert seen["move_seconds_total", name] == pytest.approx(
            sum(one.seconds for one in (*loads, *evictions)), rel=1e-9
        )
        assert seen["move_seconds_total", name] > 0
        assert seen["wait_seconds_total", name] == 0
        assert seen["present", name] == float(name in ledger.present)
    assert {name: seen["loads_total", name] for name in TAKES_TURNS} == dict.fromkeys(TAKES_TURNS, 3)
    assert {name: seen["evictions_total", name] for name in TAKES_TURNS} == {
        "text_encoder": 3,
        "reasoner": 3,
        "generator": 2,  # it is there yet
    }
    assert seen["device_bytes", ""] == ledger.device_bytes > 0
    assert seen["device_bytes_peak", ""] == max(one.device_bytes for one in events)
    assert seen["device_bytes_predicted_peak", ""] == ledger.predicted_peak >= seen["device_bytes_peak", ""]


def test_waits_for_a_turn_are_counted(fresh: Running) -> None:
    """I2: somebody else holds a component from another thread; the request waits, and the metric says how long."""
    ledger = fresh.service.ledger
    assert ledger is not None
    with ledger.scope("generator"):
        answer = fresh.aside()
        until(lambda: ledger._turns.waiters)  # to run is not yet to wait
    assert answer.result().status_code == 200
    until(lambda: fresh.service.worker.tally.running == 0)
    seen = scraped(fresh)
    waits = [one for one in ledger.history if one.kind == "wait"]
    assert len(waits) > 0
    total = sum(value for (name, _), value in seen.items() if name == "wait_seconds_total")
    assert total == pytest.approx(sum(one.seconds for one in waits), rel=1e-9)


def test_the_queue_and_what_is_drawn(omni: Omni) -> None:
    with running(omni, max_queue=5) as up:
        assert (up.draw().status_code, up.draw(n=2).status_code) == (200, 200)
        with up.holding() as hold:
            answers = [up.aside()]
            hold.wait()
            answers += [up.aside(), up.aside(num_inference_steps=3)]
            seen = scraped(up)
            assert seen["queue_length", ""] == 2
            assert seen["queue_limit", ""] == 5
            assert seen["requests_running", ""] == 1
            hold.let_go()
            assert [one.result().status_code for one in answers] == [200] * 3
        until(lambda: up.service.worker.tally.running == 0)
        seen = scraped(up)
    assert (seen["queue_length", ""], seen["requests_running", ""]) == (0, 0)
    assert (seen["pictures_total", ""], seen["batches_total", ""]) == (6, 5)


def test_answers_are_counted_by_status_the_refused_ones_too(omni: Omni) -> None:
    with running(omni, api_keys=(b"secret",), max_body=1000) as up:
        key = {"Authorization": "Bearer secret"}
        up.client.headers.update(key)
        path = "/v1/images/generations"
        assert up.draw().status_code == 200
        assert up.draw("a lighthouse").status_code == 400
        assert (
            up.client.post(path, content=b"{", headers={"Content-Type": "application/json"}).status_code
            == 400
        )
        assert up.draw(model="other").status_code == 404
        assert up.client.get(path).status_code == 405
        assert up.client.post(path, content=b"x" * 2000).status_code == 413
        assert up.client.post(path, headers={"Authorization": "Bearer x"}).status_code == 401
        up.service.queue.close()
        assert up.draw().status_code == 503
        for number in range(20):
            assert up.client.get(f"/nothing/{number}").status_code == 404  # no label for whatever comes
        seen = scraped(up)
    counted = {status: value for (name, status), value in seen.items() if name == "requests_total"}
    assert counted == {"200": 1, "400": 2, "401": 1, "404": 1, "405": 1, "413": 1, "503": 1}
    assert seen["request_seconds_count", ""] == 2  # the picture and the 503: a refusal takes no time
    assert seen["request_seconds_sum", ""] > 0


def test_the_replicas_name_is_on_every_sample() -> None:
    metrics = Metrics("first")
    metrics.answered(200, 0.5)
    lines = [one for one in metrics.text().decode().splitlines() if not one.startswith("#")]
    assert lines
    assert [one for one in lines if 'replica="first"' not in one] == []
