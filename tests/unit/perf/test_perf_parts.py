"""Which parts of the measurements run, and that none meets what another one left."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest

from pipeline.artifacts.store.store import Store, open_store
from tests.perf import __main__ as perf
from tests.perf import dockerfile, imports, measure
from tests.perf.dockerfile import DOCKERFILE, docker, platform_options
from tests.perf.measure import Cost, Report, in_turns, run
from tests.testbed.dockerd import DockerDaemon
from tests.testbed.packages import CannotHave


def parts(*arguments: str) -> list[str]:
    return perf.chosen_parts(perf.read_options(arguments))


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ([], list(perf.PARTS)),
        (["--no-docker"], [part for part in perf.PARTS if part != "docker"]),
        (["--only-weights"], ["weights"]),
        (["--only-bench"], ["bench"]),
        (["--only-publish", "--no-docker"], ["publish"]),
        (["--quick"], ["sources", "weights", "peers"]),
        (["--only-peers"], ["peers"]),
        (["--only-slurm"], ["slurm"]),
        (["--quick", "--only-weights"], ["weights"]),
    ],
)
def test_options_choose_parts(arguments: list[str], want: list[str]) -> None:
    assert parts(*arguments) == want


def test_without_slurm_its_row_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def none(folder: Path) -> DockerDaemon:
        raise CannotHave("A private Docker daemon needs root.")

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(perf, "docker_daemon", none)
    perf.main(["--only-slurm"])
    why = "A private Docker daemon needs root."
    assert f"a chunk over Slurm, not measured: {why}" in capsys.readouterr().out


def test_ctrl_c_prints_what_was_measured_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def measured(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
        report.fact("a fact", "before the stop")

    def stopped(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
        (scratch / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(perf, "chosen_parts", lambda options: ["first", "second", "third"])
    monkeypatch.setattr(perf, "_MEASURE", {"first": measured, "second": stopped})
    with pytest.raises(SystemExit) as end:
        perf.main([])
    told = capsys.readouterr()
    assert end.value.code == 130
    assert "a fact: before the stop" in told.out
    assert "stopped" in told.err
    assert not list(tmp_path.iterdir())


def test_every_part_gets_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, bool]] = []

    def litter(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
        seen.append((scratch.name, any(scratch.iterdir())))
        # the names that two parts once made in one folder
        for name in ("source", "checkout"):
            (scratch / name).mkdir()

    monkeypatch.setattr(perf, "_MEASURE", dict.fromkeys(perf.PARTS, litter))
    perf.main([])
    assert seen == [(part, False) for part in perf.PARTS]


def test_a_measurement_that_is_ended_leaves_no_folder_and_no_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def end_it(child: subprocess.Popen[bytes]) -> tuple[int, float]:
        seen.append(child)
        signal.raise_signal(signal.SIGTERM)
        return 0, 0.0

    def measure_one(report: Report, store: Store, scratch: Path, options: Namespace) -> None:
        (scratch / "large").touch()
        run([sys.executable, "-c", "import time; time.sleep(60)"])

    seen: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measure, "_watch", end_it)
    monkeypatch.setattr(perf, "_MEASURE", dict.fromkeys(perf.PARTS, measure_one))
    with pytest.raises(SystemExit) as ended:
        perf.main(["--only-bench"])
    assert ended.value.code == 143
    assert [child.returncode for child in seen] == [-signal.SIGTERM]
    assert not list(tmp_path.iterdir())


def test_images_that_are_not_built_are_said_and_not_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    report = Report()
    options = perf.read_options(["--only-imports"])
    imports.measure_imports(report, open_store(tmp_path / "store"), tmp_path / "scratch", options)
    for name in ("sglang-k2-warm", "sglang-warm", "vllm-warm"):
        assert f"imports of {name}: not measured: `sm120 build {name}` comes first" in str(report)
    assert "start of tiny-cpu: not measured: `sm120 build llama-cpp-cpu`" in str(report)


def test_fetching_and_verifying_share_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders: list[Path] = []

    def _keep_folder(report: Report, scratch: Path, sizes: object, turns: int) -> None:
        folders.append(scratch)

    for name in ("measure_fetch", "measure_verify"):
        monkeypatch.setattr(perf, name, _keep_folder)
    perf.measure_weights(Report(), Store(tmp_path), tmp_path, perf.read_options(["--quick"]))
    assert len(set(folders)) == 2
    assert all(folder.is_dir() and not any(folder.iterdir()) for folder in folders)


def test_pip_is_told_the_platforms_of_the_wheels_themselves() -> None:
    names = ("a-1-py3-none-any", "b-2-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64")
    wheels = [Path(f"{name}.whl") for name in names]
    both = "--platform manylinux_2_27_x86_64 --platform manylinux_2_28_x86_64"
    assert platform_options(wheels) == both
    assert platform_options(wheels[:1]) == ""


@pytest.mark.parametrize(
    ("arguments", "want"), [([], 3), (["--quick"], 1), (["--quick", "--turns", "2"], 2)]
)
def test_every_side_runs_at_least_three_times_but_in_a_trial(
    arguments: list[str], want: int
) -> None:
    assert perf.read_options(arguments).turns == want


def test_no_turns_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        perf.read_options(["--turns", "0"])
    assert "--turns: at least 1" in capsys.readouterr().err


def test_each_turn_begins_with_another_side() -> None:
    order: list[str] = []

    def side(name: str) -> Cost:
        order.append(name)
        return Cost(len(order), 1.0)

    ours, theirs = in_turns(3, lambda: side("ours"), lambda: side("theirs"))
    assert order == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    # each cost belongs to its own side, whichever was first
    assert [cost.wall_s for cost in ours] == [1, 4, 5]
    assert [cost.wall_s for cost in theirs] == [2, 3, 6]


def test_a_row_has_medians_spread_and_the_daemons_cpu_apart() -> None:
    report = Report()
    theirs = [Cost(4.0, 1.0, daemon_cpu_s=9.0)] * 3
    report.compare("x", [Cost(1.0, 2.0), Cost(2.0, 4.0), Cost(9.0, 3.0)], "docker build", theirs)
    rows = [line for line in str(report).splitlines() if line.startswith("| x ")]
    ours = "| x | 3 | 2.00 s (1.00–9.00) | 3.00 s (2.00–4.00) "
    other = "| docker build | 4.00 s (4.00–4.00) | 1.00 s (1.00–1.00), daemon 9.00 s (9.00–9.00) "
    assert rows == [f"{ours}{other}| 0.50× (0.25–2.25) | 0.30× (0.20–0.40) |"]
    assert "No row has a median ratio above 1." in str(report)


@pytest.mark.parametrize(
    ("walls", "words"),
    [
        ((3.0, 3.0, 3.0), "1.50× its wall time (in every turn)"),
        ((1.0, 3.0, 3.0), "1.50× its wall time (not in every turn)"),
    ],
)
def test_the_report_says_where_we_lose(walls: tuple[float, ...], words: str) -> None:
    report = Report()
    report.compare("fetch", [Cost(wall, 1.0) for wall in walls], "hf", [Cost(2.0, 2.0)] * 3)
    text = str(report).splitlines()
    at = text.index("Where we lose:")
    assert text[at + 1 :] == [f"- fetch, against hf: {words}"]


def test_cpu_of_other_processes_does_not_count() -> None:
    busy = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as neighbour:
        cost = run([sys.executable, "-c", "import time; time.sleep(1)"])
        neighbour.kill()
    assert cost.wall_s >= 1
    assert cost.all_cpu_s < 0.5


def test_docker_builds_with_buildkit_and_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def note(args: list[str], *, env: dict[str, str]) -> Cost:
        seen.append(env)
        return Cost(1.0, 2.0)

    cpu = iter((5.0, 12.0))
    monkeypatch.setattr(dockerfile, "run", note)
    monkeypatch.setattr(dockerfile, "find_program", lambda name: name)
    monkeypatch.setattr(dockerfile, "tree_cpu_s", lambda pid: next(cpu))
    daemon = DockerDaemon("unix:///s", "10.0.0.1", 7, Path("log"))
    assert docker(daemon, "build", ".") == Cost(1.0, 2.0, daemon_cpu_s=7.0)
    assert seen == [{"DOCKER_HOST": "unix:///s", "DOCKER_BUILDKIT": "1"}]
    assert "COPY" not in DOCKERFILE
    assert "--mount=type=bind,source=wheels" in DOCKERFILE


def test_without_buildkit_nothing_is_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> Cost:
        raise SystemExit("docker build: exit 1")

    monkeypatch.setattr(dockerfile, "docker", fail)
    daemon = DockerDaemon("unix:///s", "10.0.0.1", 7, Path("log"))
    with pytest.raises(CannotHave, match="cannot use BuildKit here: docker build: exit 1"):
        dockerfile.require_buildkit(daemon, tmp_path)
