"""The menu. `python3 noxfile.py -s build-sm120` works on a machine that has only Python.

Run as a script it makes its own environment from the hash-locked requirements; with nox
installed, `nox -s build-sm120` is the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import TextIO

ROOT = Path(__file__).resolve().parent
LOCKS = ROOT / "lockfiles" / "tool"


# said before anything is imported that an older Python does not have
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(
        "noxfile.py: needs Python 3.11 or newer, this is {}.{}.{}\n"
        "       Name another: `python3.13 noxfile.py …`.".format(*sys.version_info)
    )
sys.path.insert(0, str(ROOT))  # nox loads this file from anywhere

from pipeline import bootstrap as tool  # noqa: E402


def environment(group: str) -> Path:
    """The programs of a hash-locked group, in `.nox/GROUP`."""
    return tool.environment(ROOT, group)


def bootstrap() -> None:
    """Make an environment with nox in it, from hashes, and go on there."""
    python = environment("nox") / "python"
    os.execv(python, [str(python), "-m", "nox", "-f", __file__, *sys.argv[1:]])


if __name__ == "__main__":
    bootstrap()

import nox  # noqa: E402

nox.options.default_venv_backend = "none"
nox.options.sessions = []  # plain `nox` lists; a build fetches gigabytes only when asked to

ENGINES = ("sglang-k2", "sglang", "vllm")
# What every group but nox's own holds: templates are rendered by gates, too.
OURS = ["pyproject.toml", "--extra", "quality", "--group", "build"]
# Built only when they are asked for. Sizes are downloads; times are of two cores.
OTHERS = {
    "ik-llama": "ik_llama.cpp for IQ_K models, compiled here: some two CPU-hours",
    "ik-llama-cpu": "the same for machines without a GPU: some 40 CPU-minutes",
    "llama-cpp": "mainline llama.cpp, compiled here: some 90 CPU-minutes",
    "vllm-b12x": "vllm with the b12x kernels; shares its layers: 2.4 MB more, half a minute",
    "sglang-k2-warm": "sglang-k2 with its kernels compiled here: some 12 CPU-minutes",
    "sglang-warm": "sglang with its kernels compiled here: some 18 CPU-minutes",
    "vllm-warm": "vllm with its kernels compiled here: some 28 CPU-minutes",
    "vllm-nccl": "vllm with NCCL compiled here for two AMD sockets; some 40 minutes",
    "vllm --platform linux/arm64": "for DGX Spark (GB10): 3.9 GB, 4 minutes",
    "sglang --platform linux/arm64": "for DGX Spark (GB10): 4.0 GB, 4 minutes",
}


def run(
    session: nox.Session,
    group: str,
    *command: str,
    output: TextIO | None = None,
    patience_s: float = 5,
    **env: str,
) -> None:
    """Run a program of a group's environment; after Ctrl-C it has some seconds to clean up.

    Containers often forbid .pyc files: every process would compile what it imports anew.
    """
    programs = environment(group)
    session.run(
        str(programs / command[0]),
        *command[1:],
        external=True,
        env={
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONDONTWRITEBYTECODE": "",
            **env,
        },
        stdout=output,
        interrupt_timeout=patience_s,
        terminate_timeout=patience_s,
    )


def with_images(words: list[str]) -> list[str]:
    """What follows `--`: options alone are for the engine images, names stand for themselves."""
    if names_in(words):
        return words
    return [*ENGINES, *words, *(() if platform_in(words) else ("--platform", "linux/amd64"))]


def names_in(words: list[str]) -> list[str]:
    """The images among words: neither options nor the values of some."""
    pairs = zip(["", *words], words, strict=False)
    takes_value = ("--mirror", "--platform", "--recipe", "--layers-from", "--trust")
    takes_value += ("--base-registry", "--ca")
    return [w for last, w in pairs if not w.startswith("-") and last not in takes_value]


def platform_in(words: list[str]) -> list[str]:
    """The option --platform among words, with its value."""
    pairs = zip(["", *words], words, strict=False)
    return [w for last, w in pairs if w.startswith("--platform") or last == "--platform"]


def without_stages(words: list[str]) -> tuple[list[str], bool, list[str]]:
    """What follows `--` without `--bench`, `--on HOST` and `-i FILE`; what is left of them."""
    rest, where, is_measured = list[str](), list[str](), False
    waiting = iter(words)
    for word in waiting:
        name, sign, _ = word.partition("=")
        if name in ("--on", "-i", "--inventory"):
            where += [word] if sign else [word, next(waiting, "")]
        elif word == "--bench":
            is_measured = True
        else:
            rest.append(word)
    return rest, is_measured, where


def without_smoke(words: list[str]) -> tuple[list[str], bool, str | None]:
    """What follows `--` without `--smoke [RECIPE]`; whether it was there, and its recipe."""
    rest: list[str] = []
    wanted, recipe = False, None
    before = ""
    for word in words:
        name, sign, value = word.partition("=")
        if name == "--smoke":
            wanted, recipe = True, value if sign else recipe
        # images are named there, too: a recipe is what has a file
        elif before == "--smoke" and (ROOT / "recipes" / f"{word}.yaml").is_file():
            recipe = word
        else:
            rest.append(word)
        before = word
    return rest, wanted, recipe


@nox.session(name="build-sm120")
def build_sm120(session: nox.Session) -> None:
    """Build sglang-k2, sglang and vllm (after --: IMAGE …; --smoke RECIPE --bench [--on HOST])."""
    words, is_measured, where = without_stages(session.posargs)
    words, is_smoked, recipe = without_smoke(words)
    if (is_measured or where) and not recipe:
        session.error("--bench and --on are for --smoke RECIPE")
    chosen = with_images(words)
    gate = ["--gate"] if recipe and "--gate" not in chosen else []
    run(session, "run", "sm120", "build", *chosen, *gate)
    if is_smoked:
        prove(session, chosen, recipe, where, is_measured=is_measured)
    if chosen != words:
        others = "".join(f"\n  {name}: {what}" for name, what in OTHERS.items())
        session.log(f"Not built, `nox -s build-sm120 -- IMAGE` builds them:{others}")


def prove(
    session: nox.Session,
    words: list[str],
    recipe: str | None = None,
    where: list[str] | None = None,
    *,
    is_measured: bool = False,
) -> None:
    """Let built images prove themselves as far as the machine can: a start, a ladder, a number."""
    images = names_in(words) or ENGINES
    run(session, "run", "sm120", "image", "test", *images, *platform_in(words))
    if recipe:
        serve_and_test(session, recipe, where or [], is_measured=is_measured)


def serve_and_test(
    session: nox.Session, recipe: str, where: list[str], *, is_measured: bool
) -> None:
    """Serve a recipe, test its answers and measure it, where the machine is ready for it."""
    # an inventory is read by Ansible, which only this environment has
    group = "hosts" if any(w.startswith(("-i", "--inventory")) for w in where) else "run"
    sm120 = str(environment(group) / "sm120")
    code = subprocess.run([sm120, "serve", recipe, *where], check=False).returncode
    # docs/exit-codes.md: a container engine or a card that this machine has not
    if code in (42, 91):
        session.log(
            f"This machine cannot serve {recipe}: its image is proved as far as it can be; the"
            " ladder and the benchmark need `--on HOST`"
        )
        return
    if code:
        session.error(f"{recipe} was not served")
    try:
        run(session, group, "sm120", "smoke", recipe, "--restart", *where)
        if is_measured:
            out = ("--output", str(ROOT / "bench" / recipe))
            run(session, group, "sm120", "bench", recipe, *out, *where)
    finally:
        run(session, group, "sm120", "recipe", "stop", recipe, *where)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure a served recipe or any server (-- RECIPE [--on HOST] or URL …)."""
    run(session, "run", "sm120", "bench", *(session.posargs or ("--help",)))


@nox.session(name="sm120")
def any_command(session: nox.Session) -> None:
    """Any command, with Ansible at hand (-- serve RECIPE --on HOST -i INVENTORY …)."""
    run(session, "hosts", "sm120", *(session.posargs or ("--help",)))


@nox.session
def smoke(session: nox.Session) -> None:
    """Do built images start? (-- IMAGE …). What does a server answer? (-- RECIPE or URL)."""
    if all((ROOT / "images" / name).is_dir() for name in names_in(session.posargs)):
        prove(session, session.posargs)
    else:
        run(session, "run", "sm120", "smoke", *session.posargs)


@nox.session
def gate(session: nox.Session) -> None:
    """Does an engine image fit SM120? Needs no GPU (-- IMAGE [--unpatched] [--only numerics] …)."""
    run(session, "run", "sm120", "gate", "run", *(session.posargs or ENGINES[:1]))


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff and mypy, strict; ansible-lint over the whole of ansible/."""
    read_code(session)


def read_code(session: nox.Session, output: TextIO | None = None) -> None:
    """What `lint` does; its programs print to the terminal or into a file."""
    run(session, "lint", "ruff", "format", "--check", ".", output=output)
    run(session, "lint", "ruff", "check", ".", output=output)
    # the folder, not the playbooks: files that roles include at run time are linted only so
    strict = ("--offline", "--strict", "--profile", "production", "ansible")
    ansible = ("python", "-m", "tests.quick_lint", *strict)
    # a clone that is thrown away needs no cache: writing it is a tenth of the work
    is_kept = output is None or (ROOT / ".mypy_cache").exists()
    mypy = ("mypy", *(() if is_kept else ("--cache-dir=/dev/null",)))
    # side by side: they take half a minute and a minute of a core
    with ThreadPoolExecutor() as pool:
        linted = pool.submit(run, session, "lint", *ansible, output=output)
        run(session, "lint", *mypy, output=output)
        linted.result()


@nox.session
def unit(session: nox.Session) -> None:
    """Unit tests, in about four minutes (after --: arguments of pytest)."""
    run_pytest(session, "tests/unit")


@nox.session
def integration(session: nox.Session) -> None:
    """Tests with real parts, where this machine can have them (after --: arguments of pytest)."""
    run_pytest(session, "tests/integration")


@nox.session
def tests(session: nox.Session) -> None:
    """Lint beside all tests: what CI runs (after --: pytest alone)."""
    if session.posargs:
        return run_pytest(session)
    environment("lint")  # now: below, two would make it at once
    # Side by side: alone, lint leaves a core idle at its end, and collecting does all the time.
    # One run: unit tests fill the time in which integration tests wait for real parts. Lint's
    # environment has all that tests need. Its programs print into a file of their own: Ansible
    # refuses a terminal or pipe that another program made non-blocking.
    with ThreadPoolExecutor() as pool, TemporaryFile("w+") as findings:
        linted = pool.submit(read_code, session, findings)
        try:
            run_pytest(session, "tests/integration", "tests/unit", group="lint")
        finally:
            if linted.exception():
                findings.seek(0)
                session.log(f"Lint failed:\n{findings.read()}")
        linted.result()


def run_pytest(session: nox.Session, *folders: str, group: str = "test") -> None:
    """Tests on all cores; a file stays in one process (tests/conftest.py: which ones together)."""
    cores = len(os.sched_getaffinity(0))
    # tests wait a third of their time, for servers and limits; with real parts more than half of it
    processes = min(cores * 3 // 2, 8) if folders == ("tests/unit",) else min(cores * 5 // 2, 5)
    named = [arg for arg in session.posargs if arg.startswith("tests")]
    command = ("pytest", f"--numprocesses={processes}", "--durations=25")
    run(session, group, *command, *(() if named else folders), *session.posargs)


@nox.session
def provision(session: nox.Session) -> None:
    """Bring hosts to what is locked, and prove it (-- -i INVENTORY [--check --diff])."""
    run(session, "hosts", "sm120", "host", "provision", *(session.posargs or ("--help",)))


@nox.session(name="verify-hosts")
def verify_hosts(session: nox.Session) -> None:
    """Prove every promise of every role on each host (-- -i INVENTORY [--functions IMAGE])."""
    run(session, "hosts", "sm120", "host", "verify", *(session.posargs or ("--help",)))


@nox.session
def lock(session: nox.Session) -> None:
    """Move the pins: our own tools, then every image (-- --check: only look)."""
    if "--check" in session.posargs:
        run(session, "run", "sm120", "image", "lock", *session.posargs)
        return
    for group, extra in (
        ("nox", ["--group", "nox"]),
        ("run", OURS),
        ("hosts", [*OURS, "--group", "hosts"]),
        ("test", [*OURS, "--group", "test"]),
        ("lint", [*OURS, "--group", "lint"]),
    ):
        run(
            session,
            *("run", "uv", "pip", "compile", "--quiet", "--universal", "--generate-hashes"),
            *("--no-header", "--no-annotate", "--python-version", "3.11", "--upgrade"),
            *(*extra, "--output-file", str(LOCKS / f"{group}.txt")),
        )
    run(session, "run", "sm120", "image", "lock", *session.posargs)


@nox.session
def publish(session: nox.Session) -> None:
    """Publish a built and gated image to a registry (-- IMAGE REGISTRY/REPO:TAG)."""
    run(session, "run", "sm120", "publish", *(session.posargs or ("--help",)))


@nox.session
def demo(session: nox.Session) -> None:
    """The whole story in minutes: hosts, image, weights, a number, breaks (-- --output DIR)."""
    # after Ctrl-C it ends its machines
    run(session, "test", "python", "-m", "tests.demo", *session.posargs, patience_s=120)


@nox.session
def perf(session: nox.Session) -> None:
    """Measure our commands beside those that people use, in turns."""
    run(session, "test", "python", "-m", "tests.perf", *session.posargs)


@nox.session
def chaos(session: nox.Session) -> None:
    """kill -9, power cuts, full disks, lying servers, over every stage (-- --only STAGE|FAULT)."""
    # after Ctrl-C it ends its mounts, networks and processes
    run(session, "test", "python", "-m", "tests.chaos", *session.posargs, patience_s=60)


@nox.session
def mutants(session: nox.Session) -> None:
    """Do a package's tests notice small wrong changes to its code? (-- PACKAGE [--sample N] …)."""
    # after Ctrl-C it removes its copies of the tree
    command = ("python", "-m", "tests.mutants", *(session.posargs or ("--help",)))
    run(session, "test", *command, patience_s=30)
