"""Claude Code and Codex, as npm has them, against the testbed's server: real clients, no network.

Claude Code is proprietary and is only run here; Codex is under Apache-2.0. Neither is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.testbed.model_faults_clients import DONE, without_events, without_names
from tests.testbed.model_server import MODEL, Asked, Fault, ModelServer, in_thread

CLAUDE_CODE, CODEX = "@anthropic-ai/claude-code@2.1.326", "@openai/codex@0.169.0"
_INSTALL_S, _SESSION_S = 600, 120
_SECRET = "the secret is 4711"

pytestmark = [pytest.mark.big, pytest.mark.timeout(_INSTALL_S + 8 * _SESSION_S)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of both commands; 760 MB that are removed in the end."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed.")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"private": true}')
    command = ["npm", "install", "--no-audit", "--no-fund", CLAUDE_CODE, CODEX]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, timeout=_INSTALL_S
    )
    if done.returncode:
        pytest.skip(f"npm cannot install them: {done.stderr[-200:]}")
    yield folder / "node_modules" / ".bin"
    shutil.rmtree(folder)


class _Heard:
    """A fault that keeps what was asked, and is another one besides."""

    def __init__(self, **fault: Any) -> None:
        self.requests: list[Asked] = []
        self.fault = Fault(asked=self.requests.append, **fault)


Session = Callable[..., tuple[int, Any]]


@pytest.fixture
def session(programs: Path, tmp_path: Path) -> Session:
    """Runs one of the clients in a folder with a note: its exit code, and what it printed."""
    home, work = tmp_path / "home", tmp_path / "work"
    (home / ".codex").mkdir(parents=True)
    work.mkdir()
    (work / "note.txt").write_text(_SECRET + "\n")
    environment = {
        **{"HOME": str(home), "PATH": os.environ["PATH"], "ANTHROPIC_AUTH_TOKEN": "none"},
        **{"ANTHROPIC_MODEL": MODEL, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        **{"CLAUDE_CODE_MAX_RETRIES": "0", "SM120_API_KEY": "none"},
        # nobody answers there: what wants to leave this machine fails
        **{"HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1"},
    }

    def run(url: str, *command: str) -> tuple[int, Any]:
        (home / ".codex" / "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "sm120"\n\n[model_providers.sm120]\n'
            f'name = "sm120"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
            'env_key = "SM120_API_KEY"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )
        done = subprocess.run(
            [str(programs / command[0]), *command[1:]],
            cwd=work,
            env={**environment, "ANTHROPIC_BASE_URL": url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SESSION_S,
        )
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    return run


def claude(prompt: str) -> tuple[str, ...]:
    return ("claude", "-p", prompt, "--allowedTools", "Read", "--output-format", "json")


def codex(prompt: str) -> tuple[str, ...]:
    told = ("--json", "--skip-git-repo-check", "--sandbox", "danger-full-access")
    return ("codex", "exec", *told, prompt)


READ = claude(f"Call Read with {json.dumps({'file_path': 'note.txt'})}")
CAT = codex(f"Call exec_command with {json.dumps({'cmd': 'cat note.txt'})}")


@pytest.mark.parametrize("reasons", [False, True])
def test_claude_code_reads_a_file_and_answers(session: Session, reasons: bool) -> None:
    heard = _Heard()
    with in_thread(ModelServer(heard.fault, context=200_000, reasons=reasons)) as url:
        code, ((result,)) = session(url, *READ)
    assert (code, result["is_error"], result["num_turns"]) == (0, False, 2)
    assert _SECRET in result["result"]
    first, second = (asked.body for asked in heard.requests)
    # the system turn behind the question, which engines used to move to the front
    assert [m["role"] for m in first["messages"]] == ["system", "user", "system"]
    assert {"thinking", "context_management", "output_config", "metadata"} <= set(first)
    assert isinstance(first["system"], list)
    sent = [block["type"] for block in second["messages"][3]["content"]]
    assert sent == (["thinking", "tool_use"] if reasons else ["tool_use"])
    # what was said before is found in the cache
    assert result["usage"]["cache_read_input_tokens"] > 0.9 * heard.requests[0].prompt_tokens


@pytest.mark.parametrize("reasons", [False, True])
def test_codex_runs_a_command_and_answers(session: Session, reasons: bool) -> None:
    heard = _Heard()
    with in_thread(ModelServer(heard.fault, context=200_000, reasons=reasons)) as url:
        code, events = session(url, *CAT)
    assert (code, events[-1]["type"]) == (0, "turn.completed")
    said = [e["item"]["text"] for e in events if e.get("item", {}).get("type") == "agent_message"]
    assert len(said) == 1
    assert _SECRET in said[0]
    first, second = (asked.body for asked in heard.requests)
    assert [i["role"] for i in first["input"]] == ["developer", "developer", "user", "user"]
    assert first["include"] == ["reasoning.encrypted_content"]
    kinds = [item["type"] for item in second["input"][4:]]
    assert kinds == ["reasoning"] * reasons + ["function_call", "function_call_output"]
    assert events[-1]["usage"]["cached_input_tokens"] > 0.9 * heard.requests[0].prompt_tokens


def test_codex_sends_a_late_developer_s_message_where_permissions_change(
    session: Session,
) -> None:
    heard = _Heard()
    with in_thread(ModelServer(heard.fault, context=200_000)) as url:
        session(url, *codex("What is 12 + 30?"))
        again = ("--json", "--skip-git-repo-check", "--sandbox", "read-only", "resume", "--last")
        code, events = session(url, "codex", "exec", *again, "What is 40 + 2?")
    assert (code, events[-1]["type"]) == (0, "turn.completed")
    roles = [item.get("role") for item in heard.requests[-1].body["input"]]
    assert roles[4:] == ["assistant", "developer", "user", "user"]


@pytest.mark.parametrize(
    "fault",
    [
        {"raw": without_names},
        {"chunks": without_events("message_start")},
        {"chunks": without_events("content_block_start")},
    ],
    ids=["no names", "no message_start", "no content_block_start"],
)
def test_claude_code_asks_for_everything_twice_where_it_cannot_read_a_stream(
    session: Session, fault: dict[str, Any]
) -> None:
    heard = _Heard(**fault)
    with in_thread(ModelServer(heard.fault, context=200_000)) as url:
        session(url, *READ)
    assert [asked.is_stream for asked in heard.requests] == [True, False, True, False]


def test_claude_code_loses_a_call_whose_block_has_no_end(session: Session) -> None:
    heard = _Heard(chunks=without_events("content_block_stop"))
    with in_thread(ModelServer(heard.fault, context=200_000)) as url:
        code, ((result,)) = session(url, *READ)
    assert (code, result["is_error"]) == (1, True)


def test_codex_says_nothing_where_no_item_is_done(session: Session) -> None:
    heard = _Heard(chunks=without_events(DONE))
    with in_thread(ModelServer(heard.fault, context=200_000)) as url:
        code, events = session(url, *CAT)
    # no error, and no answer: the worst that can happen
    assert (code, events[-1]["type"]) == (0, "turn.completed")
    assert _SECRET not in json.dumps(events)
