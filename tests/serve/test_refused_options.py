"""Wrong settings: the message names the field, what was given and what to do; the program ends with 2 in one line."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

from omni_components import ModelError, PolicyError
from omni_components.cli import app
from omni_components.serve import ServeSettings, create_app
from tests.serve.running import write_keys

KINDS = get_type_hints(ServeSettings)
COUNTS = [name for name, kind in KINDS.items() if kind is int]
TIMES = [name for name, kind in KINDS.items() if kind in (float, float | None)]


def test_all_fields_are_looked_at_below() -> None:
    assert {*KINDS} - {*COUNTS, *TIMES} == {"name", "api_keys", "hosts", "replica"}


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "8", None])
def test_a_count_that_is_none(field: str, value: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        ServeSettings(**{field: value})
    assert str(caught.value).startswith(f"{field}={value!r} is not possible; choose a whole number from 1 ")


@pytest.mark.parametrize("field", TIMES)
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), True, "8"])
def test_a_time_that_is_none(field: str, value: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        ServeSettings(**{field: value})
    assert str(caught.value) == f"{field}={value!r} is not possible; choose seconds, more than 0."


@pytest.mark.parametrize("field", TIMES)
def test_only_some_times_may_be_left_out(field: str) -> None:
    if KINDS[field] == float | None:
        assert getattr(ServeSettings(**{field: None}), field) is None
    else:
        with pytest.raises(PolicyError, match=f"{field}=None"):
            ServeSettings(**{field: None})


@pytest.mark.parametrize("keys", ["secret", b"secret", ("secret",), (b"",), (b"good", None)])
def test_keys_that_are_none_and_never_shown(keys: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        ServeSettings(api_keys=keys)
    assert (caught.value.field, "secret" in str(caught.value)) == ("api_keys", False)
    assert "secret" not in repr(ServeSettings(api_keys=(b"secret",)))


@pytest.mark.parametrize(
    ("field", "value"), [("hosts", "localhost"), ("hosts", ("",)), ("replica", "a\r\nb")]
)
def test_names_that_are_none(field: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=field):
        ServeSettings(**{field: value})


# --- the program ------------------------------------------------------------------------------------------


def refused(*words: object) -> str:
    """The one line that the program gives, and its exit status is 2."""
    said = refused_at_last(*words)
    assert said.startswith("omni-components: ")
    assert said.count("\n") == 1
    return said


def refused_at_last(*words: object) -> str:
    """All that it says: bars over what libraries load may come before its own line."""
    result = CliRunner().invoke(app, ["serve", *map(str, words)])
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    return result.stderr


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--port", "65536", "65536 is not possible; choose 0 to 65535"),
        ("--port", "-1", "-1 is not possible; choose 0 to 65535"),
        ("--port", "http", "valid integer"),
        ("--max-queue", "0", "0 is not possible; choose a whole number from 1 up"),
        ("--max-batch", "-2", "-2 is not possible; choose a whole number from 1 up"),
        ("--max-pictures", "1001", "1001 is not possible; choose a whole number from 1 to 1000"),
        ("--max-prompt", "100001", "100001 is not possible; choose a whole number from 1 to 100000"),
        ("--max-steps", "0", "0 is not possible; choose a whole number from 1 to 100000"),
        ("--max-body", "64KiB", "valid integer"),
        ("--timeout", "0", "0.0 is not possible; choose seconds, more than 0"),
        ("--timeout", "nan", "nan.*choose seconds, more than 0"),
        ("--timeout", "inf", "inf.*choose seconds, more than 0"),
        ("--idle-release", "-1", "-1.0 is not possible; choose seconds, more than 0"),
        ("--idle-release", "inf", "inf.*choose seconds, more than 0"),
        ("--max-size", "big", "'big' is no size; write width x height in pixels, such as 1024x1024"),
        ("--max-size", "0x10", "'0x10' is no size; write width x height"),
        ("--max-size", "10x", "'10x' is no size; write width x height"),
        ("--max-size", "9" * 5000 + "x1", "'9{40}…' is no size"),
        ("--max-size", "1٢x32", "'1٢x32' is no size"),
        ("--allowed-host", "", "'' is no name; choose another, or leave it out"),
        (
            "--dtype",
            "int8",
            "'int8' is not possible; choose one of float32, bfloat16, float16, or leave it out",
        ),
        ("--dtype", "float16", "'float16' is not possible: the demo computes in float32; leave it out"),
        ("--max-queue", "1.5", "'1.5' is not a valid integer"),
        ("--timeout", "soon", "'soon' is not a valid number"),
        ("--host", "", "it is empty; choose an address of this machine, or 0.0.0.0 for all"),
        ("--host", "..", "'..' is no address; choose another"),
        ("--host", "é" * 70, "'é{40}…' is no address; choose another"),
        ("--device", "warp", "'warp' is not possible here; choose"),
        ("--api-key-file", "no/file", "'no/file' cannot be read .*; choose another file"),
        ("--api-key-file", "/", "'/' cannot be read .*; choose another file"),
        ("--api-key-file", "/dev/null", "'/dev/null' is not possible; choose a file with one key a line"),
    ],
)
def test_an_option_that_cannot_be(option: str, value: str, says: str) -> None:
    line = refused("demo", option, value)
    assert option in line
    assert re.search(says, line), line


def test_an_address_that_is_none() -> None:
    assert "no.such.host.invalid:8000 cannot be listened on" in refused(
        "demo", "--host", "no.such.host.invalid"
    )
    assert "192.0.2.1:8000 cannot be listened on" in refused("demo", "--host", "192.0.2.1")


def test_a_port_that_is_taken_is_told_before_a_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_components.Omni.__init__", lambda *_, **__: pytest.fail("weights were read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("demo", "--port", port)
    assert f"127.0.0.1:{port} cannot be listened on (Address already in use); choose another" in line


@pytest.mark.parametrize("words", [("demo", "--no-such-option"), ("demo", "--port")])
def test_words_that_the_program_does_not_know(words: tuple[str, ...]) -> None:
    assert "See 'omni-components --help'" in refused(*words)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    assert "MODEL" in refused(tmp_path, "--device", "cpu", "--port", "0")


def test_a_model_that_makes_no_pictures(omni: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(omni), "sampling_arguments", property(lambda _: ("audio_length_in_s", "generator"))
    )
    monkeypatch.setattr(omni, "accepts", lambda name: name == "generator")
    with pytest.raises(ModelError, match=r"makes sound, not pictures\. Use `omni-components run`"):
        create_app(omni)


def test_keys_that_others_may_read_are_warned_about(tmp_path: Path) -> None:
    file = write_keys(tmp_path, b"secret")
    for mode, warned in ((0o644, True), (0o600, False), (0o640, False)):
        file.chmod(mode)
        result = CliRunner().invoke(app, ["serve", "demo", "--api-key-file", str(file), "--device", "warp"])
        assert result.exit_code == 2
        assert (f"chmod 600 {file}" in result.stderr) is warned
        assert "secret" not in result.stderr


# --- without the extra ------------------------------------------------------------------------------------

WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None  # as if it were not installed
{then}
"""


def without(missing: list[str], then: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(missing=missing, then=then)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn", "prometheus_client"])
def test_the_program_without_the_extra_says_how_to_install_it(missing: str) -> None:
    program = "sys.argv = ['omni-components', 'serve', 'demo']; from omni_components.cli import main; main()"
    done = without([missing], program)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"omni-components: Invalid value: serving needs {missing}: pip install 'omni-components[serve]'\n"
    )


def test_python_without_the_extra_says_it_too_and_the_settings_need_nothing() -> None:
    then = (
        "from omni_components import serve\n"
        "print(serve.ServeSettings().max_queue)\n"
        "try:\n    serve.create_app\n"
        "except ModuleNotFoundError as error:\n    print(error)\n"
    )
    done = without(["fastapi", "uvicorn", "prometheus_client", "starlette", "pydantic"], then)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["64", "serving needs fastapi: pip install 'omni-components[serve]'"]
