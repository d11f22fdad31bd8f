"""More stages: evidence, upkeep, bundles, compiling, gates, measuring, Docker, Slurm."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys

from pipeline.serving.bench.self_test import stub
from tests.chaos.docker_part import loaded_image, restartable_docker
from tests.chaos.judge import Half
from tests.chaos.stages import (
    ALL,
    BLOBS,
    NET,
    PULL_TAG,
    REPAIR_STORE,
    Stage,
    at_registry,
    blob,
    built,
    checkout,
    digest_of,
    file_digest,
    golden_checkout,
    out,
    refill_registry,
    store_image,
    to_pull,
    weights_fetched,
    weights_set,
)
from tests.chaos.world import HUB, MODEL, PEER, REGISTRY, World
from tests.testbed.model_server import ModelServer, in_thread
from tests.testbed.tiny_source import HERE, Bench, toolchain_deb
from tests.unit.bench.example_run import FOLDER as EXAMPLE_RUN

BENCH = (
    *("--no-self-test", "--concurrency", "2", "--requests", "4", "--output-tokens", "20"),
    *("--input-tokens", "64", "--repeats", "2"),
)


def with_peer(world: World) -> None:
    """Another machine of the rack serves the set; this one has only the lock."""
    weights_fetched(world)
    if PEER not in world.wires:
        folder = world.home / "peer"
        shutil.copytree(world.place / "models", folder, symlinks=True)
        serve = [sys.executable, "-m", "pipeline", "weights", "serve", str(folder), "--port", "0"]
        server = subprocess.Popen(
            [*serve, "--json"],
            cwd=world.place / "checkout",
            env=world.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        world.stack.callback(server.kill)
        assert server.stdout
        url = str(json.loads(server.stdout.readline())["endpoint"])
        world.add_wire(PEER, lambda: url)
    shutil.rmtree(world.place / "models")


def unsigned(world: World) -> None:
    """An image that was built before there was a key."""
    built(world)
    shutil.rmtree(world.place / "config")
    shutil.rmtree(world.place / "store")
    world.sm120("build", "tiny", "--mirror", str(world.parts / "wheels"), "--offline")


def signed(world: World) -> str | None:
    """A key whose two halves belong together; `evidence make` signs what it has not yet signed."""
    keys = world.place / "config" / "sm120" / "keys"
    private, public = keys / "builder.pem", keys / "builder.pub"
    if public.exists() and not private.exists():
        raise Half("a public key without its private one")
    if not private.exists():
        return None
    command = ["openssl", "pkey", "-in", str(private), "-pubout"]
    derived = subprocess.run(command, capture_output=True, check=False)
    if derived.returncode != 0:
        raise Half("the private key cannot be read")
    if not public.exists():
        return None
    if derived.stdout.strip() not in public.read_bytes():
        raise Half("the public key is another's")
    evidence(world)
    return "a key and its public half"


def evidence(world: World) -> str | None:
    """The statements beside the image, by their kinds; each is whole JSON, and says who signed."""
    found = []
    for path in sorted((world.place / "store" / "images").rglob("*.dsse.json")):
        try:
            envelope = json.loads(path.read_bytes())
        except ValueError:
            raise Half(f"{path.name} is no JSON") from None
        if envelope["signatures"]:
            found.append(path.name)
    return " ".join(found) or None


def checked_tag(world: World) -> str | None:
    """A look changes nothing: the image in the registry is as it was."""
    digest = world.registry.tags.get(("app", PULL_TAG))
    held = {d for _, d in world.registry.blobs}
    return f"{digest} {digest_of(*(d.encode() for d in sorted(held)))}"


def with_old_layers(world: World) -> None:
    """A store in which an earlier image has left its layers."""
    built(world)
    blobs = world.place / "store" / "oci" / "blobs" / "sha256"
    for number in range(20):
        data = bytes([number]) * 10_000
        (blobs / digest_name(data)).write_bytes(data)


def digest_name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def trimmed(world: World) -> str | None:
    """The image is whole; what no image needs is gone, or is still there."""
    image = store_image(world)
    if image is None:
        raise Half("the image is gone")
    blobs = world.place / "store" / "oci" / "blobs" / "sha256"
    old = [n for n in range(20) if (blobs / digest_name(bytes([n]) * 10_000)).exists()]
    return f"{image} and {'some' if old else 'no'} old layers"


# pip would bring this tool's own wheels from an index, 45 MB
_BUNDLE = (
    "from pipeline.app import bundle, deliver; from pipeline.cli import main\n"
    "bundle.collect_own_tool = lambda *a: deliver.Collected(0, 0); main.main()"
)


def bundled(world: World) -> None:
    """A signed bundle of a plan, and a machine whose store is empty."""
    built(world)
    code = world.place / "checkout"
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", str(code), *words], check=True)
    plan = world.place / "plan" / "plan.yaml"
    plan.parent.mkdir()
    plan.write_text("format: 1\nstages:\n  image: {run: build tiny --platform linux/amd64}\n")
    words = ["bundle", str(plan), "--output", str(world.place / "usb"), "--for", "linux/amd64"]
    mirror = ["--mirror", str(world.parts / "wheels")]
    subprocess.run(
        [sys.executable, "-c", _BUNDLE, *words, *mirror],
        cwd=code,
        env=world.environment(),
        check=True,
        capture_output=True,
    )
    shutil.rmtree(world.place / "store")


def unbundled(world: World) -> str | None:
    """The checkout and the files that were carried, and the image in the store."""
    place = world.place / "there"
    if not (place / "bundle.json").exists() and not (place / "checkout").exists():
        return None
    image = store_image(world)
    spec = file_digest(place / "checkout" / "images" / "tiny" / "image.yaml")
    return f"{image} {spec}" if image and spec else None


def compiling(world: World) -> None:
    """A small source in C, a toolchain of this machine's compiler, and no objects yet."""
    deb = world.parts / "debs" / f"tool_1.0_{HERE.removeprefix('linux/')}.deb"
    if not deb.exists():
        toolchain_deb(deb.parent, compiler=True)
    Bench(world.place, deb).write()
    (world.place / "home").mkdir()
    mirrors = ["--mirror", str(deb.parent), "--mirror", str(world.place)]
    world.sm120("build", "root", "--accept", "--offline", *mirrors)


def compiled(world: World) -> str | None:
    """The layer of the compiled tree."""
    store = world.place / "store"
    found = []
    for path in sorted((store / "trees").glob("*.json")):
        try:
            record = json.loads(path.read_bytes())
        except ValueError:
            raise Half(f"{path.name} is no JSON") from None
        for digest in sorted({*_digests(record)}):
            if (store / "oci" / "blobs" / digest.replace(":", "/")).exists():
                blob(store / "oci", digest)
                found.append(digest)
    return " ".join(found) or None


def _digests(value: object) -> list[str]:
    if isinstance(value, dict):
        return [d for each in value.values() for d in _digests(each)]
    if isinstance(value, list):
        return [d for each in value for d in _digests(each)]
    return [value] if isinstance(value, str) and value.startswith("sha256:") else []


def gated(world: World) -> None:
    """An image that must be judged before it is published."""
    checkout(world, gates=["arch"])
    world.sm120("build", "tiny", "--accept", "--mirror", str(world.parts / "wheels"), "--offline")


def judged_gate(world: World) -> str | None:
    """The kept verdicts of the gate."""
    path = world.place / "store" / "images" / "tiny" / "linux-amd64" / "gates.json"
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_bytes())["results"]
    except ValueError:
        raise Half("gates.json is no JSON") from None
    return " ".join(f"{r['gate']} {r['verdict']}, {len(r['rows'])} rows" for r in results)


def with_stub(world: World) -> None:
    """A server that answers at a known speed."""
    checkout(world)
    if "stub.chaos.test" not in world.wires:
        port, _ = world.stack.enter_context(stub(0.02, 0.005))
        world.add_wire("stub.chaos.test", lambda: f"http://127.0.0.1:{port}")


def measured(world: World) -> str | None:
    """A run with every request that it counts; partial is what an interrupted one may be."""
    folder = world.place / "out" / "quick"
    if not (folder / "bench.json").exists():
        return None
    try:
        run = json.loads((folder / "bench.json").read_bytes())
    except ValueError:
        raise Half("bench.json is no JSON") from None
    rows = sum(1 for p in folder.glob("*.jsonl*") for _ in p.open("rb"))
    trials = [trial for cell in run["cells"] for trial in cell["trials"]]
    if rows < 4 * len(trials):
        raise Half(f"{len(trials)} trials, and only {rows} requests are kept")
    return f"{len(trials)} trials" if run["state"] == "complete" else None


def with_run(world: World) -> None:
    """A benchmark's run, to be shown."""
    checkout(world)
    shutil.copytree(EXAMPLE_RUN, world.place / "runs" / "night")


def shown(world: World) -> str | None:
    """The page: whole, and with the run's numbers in it; it has a date, so that bytes differ."""
    path = world.place / "out" / "page.html"
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8")
    if not text.rstrip().endswith("</html>"):
        raise Half("the page has no end")
    return f"{len(text.splitlines())} lines"


def with_model(world: World) -> None:
    """A server that answers well."""
    checkout(world)
    if MODEL not in world.wires:
        url = world.stack.enter_context(in_thread(ModelServer()))
        world.add_wire(MODEL, lambda: url)


def smoked(world: World) -> str | None:
    path = world.place / "out" / "smoke.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError:
        raise Half("smoke.json is no JSON") from None
    # a server that went away has failed, and the result says so
    return f"passed up to {found['last_good']}" if found["verdict"] == "passed" else None


SBATCH = """#!/bin/sh
# stands for Slurm's: takes jobs until its controller is lost
n=$(ls {home}/jobs | wc -l)
if [ -e {home}/lost-after ] && [ "$n" -ge "$(cat {home}/lost-after)" ]; then
  echo "sbatch: error: Unable to contact slurm controller (connect failure)" >&2
  exit 1
fi
printf '%s\\n' "$@" > {home}/jobs/$n
echo "10$n;cluster"
"""


def with_slurm(world: World) -> None:
    """A plan of three stages, and a stand-in for Slurm's sbatch."""
    golden_checkout(world)
    stages = "".join(
        f"  s{n}: {{run: plan tiny, needs: [{f's{n - 1}' if n else ''}]}}\n" for n in range(3)
    )
    (world.place / "checkout" / "plan.yaml").write_text(f"format: 1\nstages:\n{stages}")
    bin_folder = world.home / "slurm"
    bin_folder.mkdir(exist_ok=True)
    (bin_folder / "sbatch").write_text(SBATCH.format(home=bin_folder))
    (bin_folder / "sbatch").chmod(0o755)
    empty_queue(world)


def empty_queue(world: World) -> None:
    folder = world.home / "slurm"
    shutil.rmtree(folder / "jobs", ignore_errors=True)
    (folder / "jobs").mkdir()
    (folder / "lost-after").unlink(missing_ok=True)


def queued(world: World) -> str | None:
    """The stages that have a job, each once."""
    jobs = [p.read_text() for p in (world.home / "slurm" / "jobs").iterdir()]
    names = sorted(word for text in jobs for word in text.split() if word in ("s0", "s1", "s2"))
    return " ".join(sorted({*names})) if {*names} >= {"s0", "s1", "s2"} else None


def slurm_env(world: World) -> dict[str, str]:
    return {"PATH": f"{world.home / 'slurm'}:{world.environment()['PATH']}"}


def dockered(world: World) -> None:
    built(world)
    restartable_docker(world)


MORE: list[Stage] = [
    Stage(
        "fetch from a peer",
        with_peer,
        lambda w: [
            *("weights", "fetch", "tiny", "--output", out(w, "models")),
            *("--from", w.wires[PEER].url),
        ],
        weights_set,
        ("kill", "power", "twice", "clock", *NET),
        (PEER, HUB),
    ),
    Stage(
        "weights scrub",
        weights_fetched,
        lambda w: ["weights", "scrub", out(w, "models"), "--every-days", "1"],
        weights_set,
        ("kill", "kill-write", "full", "read-only", "power", "clock", "twice", "rot"),
        rot=("models/*.safetensors",),
        heal=(("weights", "verify", "MODELS", "--full", "--repair"),),
        # a repair states anew what it found
        makes=("models/.sm120/*",),
    ),
    Stage(
        "evidence new-key",
        unsigned,
        lambda w: ["evidence", "new-key", "builder"],
        signed,
        ("kill", "kill-write", "full", "read-only", "power", "disk-error", "clock", "twice"),
        is_done_once=True,
    ),
    Stage(
        "evidence make",
        built,
        lambda w: ["evidence", "make", "tiny", "--spdx"],
        evidence,
        ("kill", "kill-write", "full", "read-only", "power", "disk-error", "clock", "twice", "rot"),
        rot=("store/images/**/*.dsse.json", "store/contents/*"),
        heal=REPAIR_STORE,
        # a statement that is dated in the future does not count, and is made again
        makes=("store/images/*/*/records/*",),
    ),
    Stage(
        "verify a tag",
        to_pull,
        lambda w: ["verify", at_registry(w, PULL_TAG), "--deep", "--insecure-http"],
        checked_tag,
        ("kill", "kill-write", "full", "read-only", "clock", *NET),
        (REGISTRY,),
        reset=refill_registry,
    ),
    Stage(
        "store trim",
        with_old_layers,
        lambda w: ["store", "trim", "--yes"],
        trimmed,
        ("kill", "kill-write", "read-only", "power", "clock", "twice", "rot"),
        rot=("store/images/*/*/image.json",),
        heal=REPAIR_STORE,
    ),
    Stage(
        "unbundle",
        bundled,
        lambda w: [
            *("unbundle", out(w, "usb"), "--output", out(w, "there"), "--for", "linux/amd64")
        ],
        unbundled,
        (*ALL, "rot"),
        rot=("usb/**/*.whl", "usb/checkout.tar", "usb/images/**/blobs/sha256/*", "usb/bundle.json"),
        heal=(),
        is_done_once=True,
    ),
    Stage(
        "source build",
        compiling,
        lambda w: [
            *("source", "build", "tiny", "plain", "--offline", "--mirror", str(w.place)),
            *("--mirror", str(w.parts / "debs"), "--runtime", "namespaces"),
        ],
        compiled,
        ("kill", "kill-write", "full", "power", "twice"),
    ),
    Stage(
        "gate run",
        gated,
        lambda w: ["gate", "run", "tiny", "--only", "arch"],
        judged_gate,
        ("kill", "kill-write", "full", "read-only", "power", "clock", "twice", "rot"),
        rot=(BLOBS,),
        heal=REPAIR_STORE,
    ),
    Stage(
        "bench",
        with_stub,
        lambda w: ["bench", w.wires["stub.chaos.test"].url, "--output", out(w), *BENCH],
        measured,
        ("kill", "full", "power", "down", "partition"),
        ("stub.chaos.test",),
    ),
    Stage(
        "report",
        with_run,
        lambda w: ["report", str(w.place / "runs" / "night"), "--output", f"{out(w)}/page.html"],
        shown,
        ("kill", "kill-write", "full", "read-only", "power", "twice"),
    ),
    Stage(
        "smoke",
        with_model,
        lambda w: [
            *("smoke", w.wires[MODEL].url, "--quick", "--up-to", "first-answer"),
            *("--output", out(w)),
        ],
        smoked,
        ("kill", "full", "power", "down", "lies", "partition", "dns"),
        (MODEL,),
    ),
    Stage(
        "run on Slurm",
        with_slurm,
        lambda w: ["run", "plan.yaml", "--on", "slurm"],
        queued,
        ("kill", "slurm-lost", "full", "read-only"),
        reset=empty_queue,
        env=slurm_env,
    ),
    Stage(
        "load",
        dockered,
        lambda w: ["load", "tiny", "--platform", "linux/amd64"],
        loaded_image,
        ("kill", "docker", "rot", "twice"),
        rot=(BLOBS,),
        heal=REPAIR_STORE,
    ),
]
