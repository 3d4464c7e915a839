"""The app under Ray Serve: replicas on one machine, requests spread over them, one of them killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import yaml

from omni_components import ModelError, Omni
from omni_components.errors import InvariantError, PolicyError
from omni_components.serve import ServeSettings, create_app
from tests.diffusers import tiny
from tests.serve.running import PATIENCE, asked, is_right, pictures, until
from tests.serve.test_refused_options import refused_at_last

pytest.importorskip("ray", reason="Ray is not installed: pip install 'omni-components[ray]'")

with warnings.catch_warnings():  # Ray's own, about how it calls pydantic
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field` is deprecated")
    from ray import serve
    from ray.serve.schema import ServeDeploySchema

    from omni_components.serve.ray import Replica, _builder, app, read_plan

pytestmark = pytest.mark.xdist_group("ray")  # one cluster, however the tests are shared out

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "ray_serve.yaml"


# --- its arguments ------------------------------------------------------------------------------------------


def test_texts_of_a_command_line_become_what_the_fields_hold() -> None:
    plan = read_plan(
        {
            "model": "demo",
            "enable_cpu_offload": "true",
            "dtype": "none",
            "device_memory": "24GiB",
            "offload_components": "encoder,dit",
            "max_queue": "16",
            "timeout": "60",
            "idle_release": "none",
            "max_body": "1MiB",
            "hosts": "pictures.example,localhost",
            "served_model_name": "digits",
            "api_key_file": "/run/secrets/keys",
            "num_replicas": "auto",
            "num_gpus": "0.5",
        }
    )
    assert plan.omni == {
        "model": "demo",
        "enable_cpu_offload": True,
        "dtype": None,
        "device_memory": 24 << 30,
        "offload_components": ("encoder", "dit"),
    }
    assert plan.settings == ServeSettings(
        hosts=("pictures.example", "localhost"),
        name="digits",
        max_queue=16,
        timeout=60.0,
        idle_release=None,
        max_body=1 << 20,
        watch_timeout=60.0,
    )
    assert (plan.key_file, plan.num_replicas, plan.actor) == ("/run/secrets/keys", "auto", {"num_gpus": 0.5})


def test_values_of_a_config_file_stay_what_they_are() -> None:
    given = {
        "model": "demo",
        "enable_cpu_offload": True,
        "entry_points": {"vae": ("decode",)},
        "prefetch": False,
    }
    plan = read_plan({**given, "num_replicas": 3, "max_steps": 50})
    assert (plan.omni, plan.num_replicas, plan.settings.max_steps) == (given, 3, 50)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "model=None is not possible; choose a folder of a diffusers pipeline, a hub id, or demo."),
        ({"model": 5}, "model=5 is not possible; choose a text."),
        ({"max_queu": "4"}, "max_queu='4' is not possible; choose one of max_queue"),
        ({"api_keys": "sesame"}, "api_keys='(not shown)' is not possible; choose one of api_key_file"),
        ({"replica": "one"}, "replica='one' is not possible; choose one of "),
        ({"max_queue": "many"}, "max_queue='many' is not possible; choose a whole number from 1 up."),
        ({"max_queue": "0"}, "max_queue=0 is not possible; choose a whole number from 1 up."),
        ({"timeout": "nan"}, "timeout=nan is not possible; choose seconds, more than 0."),
        ({"enable_cpu_offload": "ja"}, "enable_cpu_offload='ja' is not possible; choose true or false."),
        ({"enable_cpu_offload": 1}, "enable_cpu_offload=1 is not possible; choose true or false."),
        ({"vae": "exclusive"}, "vae='exclusive' is not possible; choose enable_cpu_offload=true with it"),
        (
            {"vae": "there", "enable_cpu_offload": "true"},
            "vae='there' is not possible; choose 'resident' or ",
        ),
        ({"device_memory": "much"}, "device_memory='much' is not possible; choose a number"),
        ({"entry_points": "vae"}, "entry_points='vae' is not possible; choose a mapping, in a config file."),
        (
            {"dtype": "int8"},
            "dtype='int8' is not possible; choose one of float32, bfloat16, float16, or None.",
        ),
        ({"num_replicas": "0"}, "num_replicas=0 is not possible; choose a whole number from 1 up, or auto."),
        ({"num_gpus": "-1"}, "num_gpus=-1.0 is not possible; choose a number that is not negative."),
    ],
)
def test_an_argument_that_is_refused_is_named(given: dict[str, Any], told: str) -> None:
    with pytest.raises(PolicyError) as caught:
        app({"model": "demo", **given} if given else {})
    assert str(caught.value).startswith(told)


def test_the_documented_config_is_one_for_ray_and_for_us() -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load(CONFIG.read_text(encoding="utf-8")))
    [application] = config.applications
    [deployment] = application.deployments
    assert application.import_path == f"{app.__module__}:{app.__name__}"
    settings = read_plan(application.args).settings
    assert deployment.name == app(application.args)._bound_deployment.name  # or Ray would refuse it
    assert deployment.max_ongoing_requests > settings.max_queue + settings.max_batch  # or nobody gets 429
    assert deployment.graceful_shutdown_timeout_s > settings.timeout  # or requests are lost at an end
    assert config.http_options.request_timeout_s > settings.timeout


def test_the_config_on_the_page_is_the_one_in_the_examples() -> None:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert yaml.safe_load(shown) == yaml.safe_load(CONFIG.read_text(encoding="utf-8"))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "omni_components.serve.ray")
    with pytest.raises(
        ModuleNotFoundError, match=r"needs ray: pip install 'omni-components\[ray\]'"
    ) as caught:
        import_module("omni_components.serve.ray")
    assert caught.value.name == "ray"


@pytest.mark.parametrize("name", ["", "a\nb", "für", 7])
def test_a_replica_whose_name_no_header_can_hold(name: Any) -> None:
    with pytest.raises(PolicyError, match="replica"):
        ServeSettings(replica=name)


def test_a_replica_of_a_model_that_needs_more_than_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails as it is made, with what the program says."""
    tiny.stable_diffusion_control_net().save_pretrained(tmp_path)
    monkeypatch.setattr(serve, "get_replica_context", lambda: SimpleNamespace(replica_tag="one"))
    build = _builder(read_plan({"model": str(tmp_path), "device": "cpu"}))
    with pytest.raises(ModelError) as caught:
        build()
    assert str(caught.value) in refused_at_last(tmp_path, "--device", "cpu", "--port", "0")


# --- its health ---------------------------------------------------------------------------------------------


@pytest.fixture
def replica(omni: Omni) -> Iterator[Replica]:
    """As in its process, but without Ray around it."""
    made = Replica()
    made.app = create_app(omni, ServeSettings(replica="one"))
    made.check_health()
    yield made
    asyncio.run(made.app.state.service.close())


def test_a_replica_whose_worker_is_gone_is_not_healthy(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = replica.app.state.service
    monkeypatch.setattr(service.queue, "take", lambda *_: None)
    service.worker.start()
    until(lambda: not service.worker.alive)
    with pytest.raises(RuntimeError, match="replica one is stopped"):
        replica.check_health()


def test_a_replica_whose_ledger_is_untrue_is_not_healthy(replica: Replica) -> None:
    """I8."""
    book = replica.app.state.service.ledger._book
    book.held += 1
    try:
        with pytest.raises(InvariantError, match="I8"):
            replica.check_health()
    finally:
        book.held -= 1
    replica.check_health()


# --- a cluster on this machine ------------------------------------------------------------------------------

ARGS = {
    "model": "demo",
    "enable_cpu_offload": "true",
    "device": "cpu",
    "num_replicas": "2",
    "num_cpus": "0.1",
    "max_queue": "16",
    "max_batch": "2",
    "max_steps": "100000",
    "watch_timeout": "2",
}
SOME_TIME = 1500  # steps: some seconds

# In a process of its own: Ray's driver leaves threads, signal handlers and open pipes in the process it was in.
# It ends when its input does, so also when the tests are killed.
DRIVER = """
import json, signal, sys
signal.alarm(150)  # whatever hangs
folder, port, args = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
import ray
from ray import serve
from omni_components.serve.ray import app
ray.init(
    num_cpus=1,
    include_dashboard=False,
    object_store_memory=80 << 20,
    _node_ip_address="127.0.0.1",
    _temp_dir=folder,
    _system_config={"metrics_report_interval_ms": 500},
    log_to_driver=False,
    logging_level="error",
)
serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
serve.run(app(args))
print("exporter", ray.nodes()[0]["MetricsExportPort"], flush=True)
sys.stdin.readline()
serve.delete("default")
print("deleted", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""


class Cluster:
    """Replicas behind Ray's proxy, and the process that has started them."""

    def __init__(self, folder: str) -> None:
        port = free_port()
        self.url, self.exporter = f"http://127.0.0.1:{port}", ""
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, folder, str(port), json.dumps(ARGS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "RAY_USAGE_STATS_ENABLED": "0",  # it would report to its makers
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),  # or it would put one into the home folder
            },
        )
        self._pool = ThreadPoolExecutor(64)

    def draw(self, **more: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/images/generations", json=asked(**more), timeout=PATIENCE)

    def aside(self, **more: Any) -> Future[httpx.Response]:
        return self._pool.submit(self.draw, **more)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}/{path}", timeout=PATIENCE)

    def names(self) -> set[str]:
        """Of the replicas, once two have answered."""
        seen: set[str] = set()
        until(lambda: len(seen) == 2 or seen.add(self.get("ready").headers["x-replica"]))
        return seen

    def busy(self) -> set[str]:
        """Of what it finds, the replicas that draw now; each question reaches one of them."""
        states = [self.get("v1/residency").json() for _ in range(4)]
        return {one["replica"] for one in states if one["work"]["running"]}

    def processes(self) -> list[psutil.Process]:
        """Those that it has started, at any remove."""
        return psutil.Process(self.driver.pid).children(recursive=True)

    def replicas(self) -> list[psutil.Process]:
        return [one for one in self.processes() if one.name().startswith("ray::ServeRepl")]

    def delete(self) -> None:
        """Begin to end the application; Ray and its proxy stay."""
        assert self.driver.stdin is not None
        self.driver.stdin.write("\n")
        self.driver.stdin.flush()

    def hear(self, word: str) -> str:
        """Wait until the driver says a word, and return what follows; Ray says things of its own in between."""
        assert self.driver.stdout is not None
        for line in self.driver.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(f"the driver has ended without {word!r}")

    def close(self) -> None:
        """End everything; nothing that it has started is left."""
        self._pool.shutdown()
        started = self.processes()
        self.driver.communicate(timeout=PATIENCE)
        _, left = psutil.wait_procs(started, PATIENCE)
        assert left == []
        assert self.driver.returncode == 0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # A short path: that of a socket cannot be long.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        up = Cluster(folder)
        try:
            up.exporter = f"http://127.0.0.1:{up.hear('exporter')}/metrics"
            yield up
        finally:
            up.close()


def test_requests_are_spread_and_each_replica_says_its_name(cluster: Cluster) -> None:
    names = cluster.names()
    seen: set[str] = set()

    def both() -> bool:
        answer = cluster.draw()
        assert is_right(pictures(answer)[0])
        seen.add(answer.headers["x-replica"])
        return seen == names

    until(both)
    state = cluster.get("v1/residency")
    assert state.json()["replica"] == state.headers["x-replica"] in names
    assert state.json()["invariant"] == {"holds": True, "problem": None}
    metrics = cluster.get("metrics")
    name = metrics.headers["x-replica"]
    assert f'omni_components_loads_total{{component="generator",replica="{name}"}}' in metrics.text


def test_ray_exports_the_metrics_of_all_replicas(cluster: Cluster) -> None:
    names = cluster.names()

    def exported() -> set[str]:
        lines = httpx.get(cluster.exporter, timeout=PATIENCE).text.splitlines()
        found = [one for one in lines if one.startswith("ray_omni_components_device_bytes{")]
        return {re.search(r'replica="(\w+)"', one)[1] for one in found}

    until(lambda: exported() >= names)


def test_more_requests_than_may_wait(cluster: Cluster) -> None:
    answers = [one.result() for one in [cluster.aside(num_inference_steps=30) for _ in range(60)]]
    refused = [one for one in answers if one.status_code == 429]
    assert {one.status_code for one in answers} == {200, 429}
    assert {one.headers["x-replica"] for one in answers} == cluster.names()
    for one in refused:
        assert one.json()["error"]["code"] == "queue_full"
        assert int(one.headers["retry-after"]) >= 1


def test_a_replica_is_killed(cluster: Cluster) -> None:
    """What it was drawing is lost, and nothing else; Ray starts another."""
    before = cluster.names()
    drawing = [cluster.aside(num_inference_steps=SOME_TIME)]

    def both_draw() -> bool:
        busy = cluster.busy()
        if len(busy) < 2:
            drawing.append(cluster.aside(num_inference_steps=SOME_TIME))
        return busy == before

    until(both_draw)
    os.kill(cluster.replicas()[0].pid, signal.SIGKILL)
    asked_after = [cluster.aside(prompt="one", seed=at) for at in range(8)]
    for at, answer in enumerate(asked_after):
        assert is_right(pictures(answer.result())[0], "one", at)

    statuses = [one.result().status_code for one in drawing]
    assert set(statuses) == {200, 500}, statuses
    [stayed] = {one.result().headers["x-replica"] for one in drawing if one.result().status_code == 200}
    assert {one.result().headers["x-replica"] for one in asked_after} == {stayed}
    assert cluster.names() - before  # it is another
    assert len(cluster.replicas()) == 2


def test_the_application_ends_while_a_picture_is_drawn_and_a_page_is_open(cluster: Cluster) -> None:
    """Last in this file: it is over then."""
    drawing = cluster.aside(num_inference_steps=SOME_TIME)
    with httpx.stream("GET", f"{cluster.url}/v1/events", timeout=PATIENCE) as page:
        until(cluster.busy)
        cluster.delete()
        assert "event: state" in "".join(page.iter_text())  # and it comes to its end
    assert drawing.result().status_code == 200
    assert cluster.hear("deleted") == ""
    assert cluster.replicas() == []
