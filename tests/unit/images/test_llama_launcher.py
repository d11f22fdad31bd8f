"""The launcher of the llama-cpp-cpu image: options, refusals, and how it stops."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

SERVE = Path(__file__).parents[3] / "images" / "llama-cpp-cpu" / "serve.py"


def load_launcher() -> ModuleType:
    """Import serve.py from where the image takes it."""
    spec = importlib.util.spec_from_file_location("llama_launcher", SERVE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


launcher = load_launcher()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file that begins as a GGUF does."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    return path


def fields_for(*options: str) -> dict[str, Any]:
    args = launcher.build_parser().parse_args(["-m", "m.gguf", *options])
    fields: dict[str, Any] = launcher.engine_fields(args)
    return fields


def test_without_options_it_listens_everywhere_on_8080_and_leaves_the_rest_to_llama_cpp() -> None:
    assert fields_for() == {
        "model.path": "m.gguf",
        "hostnames": ["0.0.0.0"],
        "port": 8080,
        "n_parallel": 4,
        "kv_unified": True,
    }


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--host", "127.0.0.1"], "hostnames", ["127.0.0.1"]),
        (["--port", "9000"], "port", 9000),
        (["-c", "4096"], "n_ctx", 4096),
        (["--ctx-size", "4096"], "n_ctx", 4096),
        (["-np", "8"], "n_parallel", 8),
        (["--parallel", "8"], "n_parallel", 8),
        (["-t", "2"], "cpuparams.n_threads", 2),
        (["-n", "-1"], "n_predict", -1),
        (["--alias", "kimi"], "model_alias", {"kimi"}),
        (["--alias", "kimi, k2"], "model_alias", {"kimi", "k2"}),
        (["--jinja"], "use_jinja", True),
        (["--no-jinja"], "use_jinja", False),
        (["--no-warmup"], "warmup", False),
        (["--metrics"], "endpoint_metrics", True),
        (["--chat-template", "chatml"], "chat_template", "chatml"),
    ],
)
def test_an_option_of_llama_server_sets_its_field(
    options: list[str], field: str, value: object
) -> None:
    assert fields_for(*options)[field] == value


def test_a_chosen_number_of_slots_divides_the_context_as_llama_server_does() -> None:
    assert "kv_unified" not in fields_for("-np", "8")


def test_the_context_can_be_divided_without_choosing_the_number_of_slots() -> None:
    assert fields_for("--no-kv-unified")["kv_unified"] is False


def test_threads_count_for_prompts_too_unless_told_otherwise() -> None:
    assert fields_for("-t", "3")["cpuparams_batch.n_threads"] == 3
    assert fields_for("-t", "3", "-tb", "6")["cpuparams_batch.n_threads"] == 6


def test_api_keys_come_from_a_file_so_they_show_in_no_process_list(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n two \n")
    assert fields_for("--api-key-file", str(keys))["api_keys"] == ["one", "two"]


def test_dotted_fields_reach_into_nested_objects() -> None:
    params = SimpleNamespace(model=SimpleNamespace(path=""), n_ctx=0)
    launcher.set_fields(params, {"model.path": "m.gguf", "n_ctx": 512})
    assert (params.model.path, params.n_ctx) == ("m.gguf", 512)


def test_every_field_exists_in_the_real_wheel() -> None:
    engine = pytest.importorskip("xllamacpp", reason="The xllamacpp wheel is not installed.")
    every_option = [flag for o in launcher.OPTIONS for flag in (o.flags[0], "1")]
    every_switch = [switch.flags[0] for switch in launcher.SWITCHES]
    fields = fields_for(*every_option, *every_switch)
    params = engine.CommonParams()
    launcher.set_fields(params, fields)
    assert {name: attrgetter(name)(params) for name in fields}.keys() == fields.keys()


def test_a_missing_model_is_one_line_and_its_own_exit_code(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launcher.main(["-m", "/nowhere/m.gguf"]) == launcher.EXIT_NO_MODEL
    said = capfd.readouterr().err
    assert said == "serve.py: cannot read the model /nowhere/m.gguf: No such file or directory\n"


def test_a_folder_is_not_a_model(tmp_path: Path) -> None:
    assert launcher.main(["-m", str(tmp_path)]) == launcher.EXIT_NO_MODEL


@pytest.mark.parametrize("content", [b"", b"GGU", b"PK\x03\x04 a zip", b"<html>login</html>"])
def test_a_file_that_is_not_gguf_is_refused_before_the_engine_sees_it(
    model: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    model.write_bytes(content)
    assert launcher.main(["-m", str(model)]) == launcher.EXIT_NO_MODEL
    assert "is not a GGUF file" in capfd.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["-m"],
        ["-m", "m.gguf", "--bogus"],
        ["-m", "m.gguf", "--port", "http"],
        ["-m", "m.gguf", "--para", "8"],
    ],
)
def test_a_wrong_command_line_ends_with_2(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.main(options)
    assert ended.value.code == 2


def test_a_missing_api_key_file_never_means_an_open_server(model: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.main(["-m", str(model), "--api-key-file", "/nowhere/keys"])
    assert ended.value.code == 2


def test_help_shows_a_first_request_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert "/v1/chat/completions" in said
    assert all(f"\n  {code} " in said for code in (0, 2, 3, 4))


def refuse_to_start(_params: object) -> None:
    raise RuntimeError("Failed to init server")


def test_an_engine_that_does_not_start_has_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = SimpleNamespace(CommonParams=SimpleNamespace, Server=refuse_to_start)
    monkeypatch.setitem(sys.modules, "xllamacpp", engine)
    assert launcher.serve({"port": 8080}) == launcher.EXIT_NO_START
    assert capfd.readouterr().err == "serve.py: the engine did not start: Failed to init server\n"


def start_supervised(work: Callable[[], int]) -> int:
    """The pid of a process that supervises `work`; forked, as it changes its signal mask."""
    pid = os.fork()
    if pid == 0:
        os._exit(launcher.supervise(work))
    return pid


def exit_code(pid: int, within_s: float = 5.0) -> int:
    """How a process ended; one that does not end in time is killed and fails the test."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail(f"still running after {within_s} s")


def be_deaf_and_busy(ready: int) -> int:
    """An engine that says when it has begun."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(ready, b"!")
    while True:
        time.sleep(60)


def be_killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def raise_an_error() -> int:
    raise ValueError("surprise")


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_engine_that_hears_none_and_the_end_is_clean(told: int) -> None:
    heard, ready = os.pipe()
    pid = start_supervised(lambda: be_deaf_and_busy(ready))
    os.close(ready)
    with os.fdopen(heard, "rb") as words:
        assert words.read(1) == b"!"
    os.kill(pid, told)
    assert exit_code(pid) == 0


@pytest.mark.parametrize("code", [0, 4])
def test_the_exit_code_of_the_engine_is_passed_on(code: int) -> None:
    assert exit_code(start_supervised(lambda: code)) == code


def test_an_engine_killed_for_its_memory_shows_as_128_plus_the_signal() -> None:
    assert exit_code(start_supervised(be_killed)) == 128 + signal.SIGKILL


def test_an_unexpected_error_in_the_engine_is_no_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert exit_code(start_supervised(raise_an_error)) == launcher.EXIT_NO_START
    assert capfd.readouterr().err == "serve.py: the engine did not start: surprise\n"
