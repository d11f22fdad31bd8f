"""What hosts add up to: the worst one counts, and nothing unknown is called passed."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.app.hosts import require_verified
from pipeline.cli.hosts import show_result
from pipeline.core.errors import (
    FleetUnready,
    HostDrifted,
    HostUnfit,
    HostUnknown,
    HostUnreached,
    MissingTool,
    PipelineError,
    ProbeFailed,
    ProbeUnstarted,
    PromiseBroken,
)
from pipeline.core.known import unknown
from pipeline.core.verdict import RuleResult
from pipeline.hosts.facts.drift import Difference
from pipeline.hosts.fleet.promised import DriverPromise, Promised, Roles, read_promised
from pipeline.hosts.fleet.remote import Remote, Unreached
from pipeline.hosts.fleet.verify import (
    FleetResult,
    HostResult,
    HostVerifyOptions,
    Row,
    keep_records,
    not_tested,
    recorded,
    run_functions,
    verify_fleet,
    verify_host,
)
from pipeline.hosts.probes import runner
from pipeline.hosts.probes.runner import ProbeRow
from pipeline.hosts.promises import host as every_host
from pipeline.hosts.promises import run
from pipeline.hosts.promises.run import judge_promises
from tests.unit.hosts.fake_host import LOCAL, FakeHost, program
from tests.unit.hosts.machines import DATA, blackwell, facts, h200

GOOD = Row(role="pcie", promise="links are kept awake", verdict="passed")
BAD = GOOD.model_copy(update={"verdict": "failed", "why": "asleep", "rule": "ASPM", "fix": "x"})
VAGUE = GOOD.model_copy(update={"verdict": "unknown", "why": "dark"})
MOOT = GOOD.model_copy(update={"verdict": "not applicable"})
RULE = RuleResult(rule="ACS", subject="host", verdict="failed", why="on", fix="off")
TEST = ProbeRow(check="copy", subject="0->1", verdict="failed", why="wrong", measured={})
MOVED = Difference(field="driver.version", kind="changed", before="1", after="2")
GAINED = MOVED.model_copy(update={"kind": "gained"})


def fleet(**second: Any) -> FleetResult:
    """A good host, and one that differs."""
    good = HostResult(host="n1", rows=[GOOD], drift=[])
    return FleetResult(hosts=[good, HostResult(host="n2", **{"rows": [GOOD], **second})])


@pytest.mark.parametrize(
    ("second", "error_class"),
    [
        ({"rows": [BAD]}, PromiseBroken),
        ({"rows": [VAGUE]}, HostUnknown),
        ({"rows": []}, HostUnknown),
        ({"rows": [MOOT]}, HostUnknown),
        ({"rows": [], "unreached": "down"}, HostUnreached),
        ({"rules": [RULE]}, HostUnfit),
        ({"functions": [TEST]}, ProbeFailed),
        ({"functions": [not_tested("no GPU")]}, HostUnknown),
        ({"drift": [MOVED]}, HostDrifted),
    ],
)
def test_one_host_that_is_not_well_sets_the_ending(
    second: dict[str, Any], error_class: type[PipelineError]
) -> None:
    with pytest.raises(error_class) as error:
        require_verified(fleet(**second))
    assert error_class is HostUnknown or "n2" in str(error.value)


@pytest.mark.parametrize("second", [{}, {"drift": [GAINED]}, {"rows": [GOOD, MOOT]}])
def test_a_fleet_that_keeps_its_promises_ends_well(second: dict[str, Any]) -> None:
    require_verified(fleet(**second))
    assert fleet(**second).verdict == "passed"


def test_a_broken_promise_outweighs_a_host_that_is_down() -> None:
    down = HostResult(host="n3", unreached="No route to host")
    with pytest.raises(PromiseBroken):
        require_verified(FleetResult(hosts=[*fleet(rows=[BAD]).hosts, down]))


def test_a_known_failure_comes_with_cause_and_fix(capsys: pytest.CaptureFixture[str]) -> None:
    result = fleet(rows=[BAD])
    assert [f.issue.id for f in result.hosts[1].findings] == ["aspm-link-down"]
    show_result(result, HostVerifyOptions(), brief=True)
    output = capsys.readouterr().out
    assert "n2: links are kept awake\n  fix: x" in output
    assert "n2, aspm-link-down" in output
    assert "n1    passed" not in output
    assert "The GPUs were not tested" in output


def test_a_host_that_is_down_is_one_row_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_result(fleet(rows=[], unreached="No route to host"), HostVerifyOptions())
    assert "n2    not reached  -     -" in capsys.readouterr().out


def promised(**more: Any) -> Promised:
    return Promised(host="n1", connection=LOCAL, **more)


def look_at(host: Promised, **options: Any) -> HostResult:
    return verify_host(host, Remote(LOCAL), HostVerifyOptions(**options), judge_promises)


def test_what_ansible_could_not_reach_is_not_asked_again() -> None:
    result = look_at(promised(unreached="Failed to connect\nvia ssh"))
    assert result.verdict == "not reached"
    assert result.unreached == "Failed to connect via ssh"


@pytest.mark.parametrize("text", ["", "{}", '{"host": "x"}', "[]"])
def test_promises_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "n1.json").write_text(text)
    with pytest.raises(FleetUnready, match="n1"):
        read_promised(tmp_path / "n1.json")


def test_a_host_without_a_gpu_is_said_to_have_none_and_nothing_is_started() -> None:
    bare = facts(h200().model_copy(update={"links": {}, "files": {}}))
    with Remote(LOCAL) as remote:
        rows, message = run_functions(remote, promised(), bare, "sm120/vllm:x", ())
    assert [r.verdict for r in rows] == ["unknown"]
    assert "no GPU is on the bus" in rows[0].why
    assert message == []


def test_nobody_asks_for_function_tests_and_none_run() -> None:
    with Remote(LOCAL) as remote:
        assert run_functions(remote, promised(), facts(blackwell(2)), None, ()) == ([], [])


class Scripted(Remote):
    """A host on which a script runs with programs of our own."""

    def __init__(self, path: Path) -> None:
        super().__init__(LOCAL)
        self._path = path

    def run(self, command: str, limit_s: float = 60) -> Any:
        place = self._path.parent / "run"
        return super().run(
            f"export PATH={self._path}:$PATH\n{command}".replace("/run/sm120/probes", str(place))
        )


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("Only root is root at once.")


@pytest.mark.usefixtures("root")
def test_function_tests_run_in_the_image_and_leave_nothing_behind(programs: Path) -> None:
    report = DATA / "h200-probes.json"
    seen = programs.parent / "seen"
    look = 'case "$1" in *:/probes:ro) ls "${1%%:*}";; *:/report) to="${1%%:*}";; esac'
    body = f'echo "$@"; while [ $# -gt 0 ]; do {look}; shift; done; cp {report} "$to/report.json"'
    program(programs, "docker", f"[ $1 = run ] || exit 0\n({body}) > {seen}")
    with Scripted(programs) as remote:
        rows, _ = run_functions(remote, promised(), facts(blackwell(2)), "img:1", ("--ranks", "2"))
    assert {r.check for r in rows} >= {"cards", "copy"}
    message = seen.read_text()
    assert "--pull=never" in message
    assert "img:1 /probes /report/report.json --ranks 2" in message
    assert "rank.py" in message
    assert not (programs.parent / "run").exists()


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo 'No such image: img:1' >&2; exit 125", "No such image"),
        ("echo 'docker: no card' >&2; echo; echo \"Run 'docker run --help' for\" >&2", "no card"),
        ("echo 'docker: no card' >&2; echo \"See 'docker run --help'.\" >&2", "no card"),
        ("exit 0", "gave no output"),
        ("echo '{' > /dev/null", "gave no output"),
    ],
)
def test_function_tests_that_do_not_start_are_unknown(
    programs: Path, body: str, message: str
) -> None:
    program(programs, "docker", body)
    with Scripted(programs) as remote:
        rows, _ = run_functions(remote, promised(), facts(blackwell(2)), "img:1", ())
    assert [r.verdict for r in rows] == ["unknown"]
    assert "gave no report" in rows[0].why
    assert message in rows[0].why


@pytest.mark.usefixtures("root")
def test_function_tests_that_do_not_end_are_ended_with_their_container(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LIMIT_S", 1.0)
    seen = programs.parent / "seen"
    program(programs, "docker", f'echo "$*" >> {seen}\n[ $1 != run ] || sleep 60')
    begun = time.monotonic()
    with Scripted(programs) as remote:
        rows, _ = run_functions(remote, promised(), facts(blackwell(2)), "img:1", ())
    assert time.monotonic() - begun < 30
    assert "did not finish within 1 s" in rows[0].why
    calls = seen.read_text().splitlines()
    at = next(n for n, line in enumerate(calls) if line.startswith("run "))
    assert "--name sm120-probes " in calls[at]
    assert "rm --force sm120-probes" in calls[at + 1 :]
    assert not (programs.parent / "run").exists()


@pytest.mark.usefixtures("root")
def test_a_script_that_is_killed_leaves_no_container_either(programs: Path) -> None:
    seen = programs.parent / "seen"
    # the parent is timeout(1), whose parent is the script
    kill = 'kill -9 $(cut -d" " -f4 /proc/$PPID/stat)'
    program(programs, "docker", f'echo "$*" >> {seen}\n[ $1 != run ] || {kill}')
    with Scripted(programs) as remote:
        run_functions(remote, promised(), facts(blackwell(2)), "img:1", ())
    assert seen.read_text().splitlines()[-1] == "rm --force sm120-probes"
    assert not (programs.parent / "run").exists()


@pytest.mark.usefixtures("root")
@pytest.mark.parametrize("there", [True, False])
def test_function_tests_have_the_nccl_settings_of_the_host(
    programs: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    home = programs.parent
    settings, library = home / "nccl.env", home / "lib"
    if there:
        settings.write_text("NCCL_PROTO=LL\n")
        library.mkdir()
    monkeypatch.setattr(runner, "NCCL_SETTINGS", settings)
    monkeypatch.setattr(runner, "NCCL_LIBRARY", library)
    seen = home / "seen"
    program(programs, "docker", f'[ $1 != run ] || echo "$*" > {seen}')
    with Scripted(programs) as remote:
        run_functions(remote, promised(), facts(blackwell(2)), "img:1", ())
    message = seen.read_text()
    assert (f"--env-file {settings} " in message) is there
    assert (f"--volume {library}:{library}:ro" in message) is there
    with pytest.raises(ProbeUnstarted):
        runner.run_in_image("img:1", [])
    assert (f"--env-file {settings} " in seen.read_text()) is there
    # what is compared must not be hidden by the host's own settings
    with pytest.raises(ProbeUnstarted):
        runner.run_in_image("img:1", [], {"NCCL_PROTO": "Simple"})
    assert "--env-file" not in seen.read_text()


def test_a_container_of_this_machine_ends_with_its_limit(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "LIMIT_S", 1.0)
    seen = programs.parent / "seen"
    program(programs, "docker", f'echo "$*" >> {seen}\n[ $1 != run ] || exec sleep 60')
    with pytest.raises(ProbeUnstarted, match="did not finish within 1 s"):
        runner.run_in_image("img:1", [])
    calls = seen.read_text().splitlines()
    name = calls[1].partition("--name ")[2].split()[0]
    assert calls[-1] == f"rm --force {name}"


def keep(folder: Path, name: str, capture: Any) -> None:
    place = folder / "captures"
    place.mkdir(exist_ok=True)
    (place / name).write_text(capture.model_dump_json(exclude_none=True))


def test_captures_become_records_and_what_moved_is_said(tmp_path: Path) -> None:
    keep(tmp_path, "n1.before.json", blackwell(2, iommu="DMA"))
    keep(tmp_path, "n1.after.json", blackwell(2, iommu="identity"))
    keep(tmp_path, "n2.after.json", blackwell(2))
    keep(tmp_path, "n3.before.json", blackwell(2))
    moves = {m.host: [d.field for d in m.changes] for m in keep_records(tmp_path)}
    assert moves["n1"] == ["pci.iommu"]
    assert moves["n2"] == []
    assert "n3" not in moves
    result = recorded(tmp_path, "n1")
    assert result is not None
    assert result.pci.iommu == "passthrough"
    assert recorded(tmp_path, "n3") is None
    assert keep_records(tmp_path) == []
    assert json.loads((tmp_path / "n2.json").read_text())["host"] == "n2"


@pytest.mark.usefixtures("root")
def test_a_look_at_this_very_machine_judges_it_and_keeps_its_facts(tmp_path: Path) -> None:
    result = look_at(promised(), save=tmp_path / "seen")
    assert result.unreached is None
    assert {r.role for r in result.rows} == {"host"}
    assert {r.verdict for r in result.rows if "facts" in r.promise} == {"passed"}
    assert result.drift is None
    assert recorded(tmp_path / "seen", "n1") is not None


@pytest.mark.usefixtures("root")
def test_an_interrupt_does_not_wait_for_commands_on_other_hosts() -> None:
    def judge(host: Promised, remote: Remote, *_: Any) -> list[Row]:
        if host.host == "n1":
            raise KeyboardInterrupt
        remote.run("sleep 60")
        return []

    slow = promised().model_copy(update={"host": "n2"})
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        verify_fleet(
            [promised(), slow], HostVerifyOptions(), judge, jobs=2, on_result=lambda _: None
        )
    assert time.monotonic() - begun < 30


@pytest.mark.usefixtures("root")
def test_a_check_that_breaks_is_unknown_and_the_others_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(every_host, "test_no_package_is_left_half_installed", lambda host: 1 / 0)
    result = look_at(promised())
    reasons = {r.promise: r.why for r in result.rows if r.verdict == "unknown"}
    assert reasons == {"<lambda>": "ZeroDivisionError: division by zero"}
    assert result.count("passed") > 1


@pytest.mark.usefixtures("root")
def test_checks_that_take_too_long_leave_the_rest_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_LIMIT_S", -1.0)
    result = look_at(promised())
    assert {r.verdict for r in result.rows} == {"unknown"}
    assert "the checks before it took" in result.rows[0].why


def test_a_connection_that_is_lost_in_a_check_is_a_host_that_was_not_reached() -> None:
    class Lost(Remote):
        def run(self, command: str, limit_s: float = 60) -> Any:
            raise Unreached("the connection was lost")

    with pytest.raises(Unreached):
        judge_promises(promised(), Lost(LOCAL), unknown("nothing was read"))


def test_without_testinfra_the_group_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "testinfra.host", None)
    with Remote(LOCAL) as remote, pytest.raises(MissingTool) as error:
        judge_promises(promised(), remote, unknown("nothing was read"))
    assert "group `hosts`" in error.value.hint


def test_a_role_that_was_undone_is_judged_by_what_is_left_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "_testinfra", lambda *_: FakeHost())
    roles = Roles(nvidia_driver=DriverPromise(state="absent", headers="none"))
    rows = judge_promises(promised(roles=roles), Remote(LOCAL), unknown("nothing was read"))
    assert [(r.promise, r.verdict) for r in rows if r.role == "nvidia_driver"] == [
        ("nothing of the role is left", "passed")
    ]


@pytest.mark.usefixtures("root")
def test_a_role_that_nothing_can_be_said_of_is_unknown_row_by_row() -> None:
    roles = Roles(nvidia_driver=DriverPromise(state="present", headers="none"))
    result = look_at(promised(roles=roles), roles=("nvidia_driver",))
    rows = {r.promise: r for r in result.rows}
    assert rows["the locked driver is the loaded one"].verdict == "unknown"
    assert "host.lock.yaml" in rows["the locked driver is the loaded one"].why
