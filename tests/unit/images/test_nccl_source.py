"""NCCL's source: patches are what the spec says, its compilers' scripts do one thing each."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.hosts.probes.tune import plan
from pipeline.images.assemble import patch
from pipeline.images.gate.arch import read_arch_spec
from pipeline.images.lock.model import read_lock, read_source_lock
from pipeline.images.spec.checkout import Checkout
from pipeline.images.spec.source import SourcePatch
from pipeline.serving.recipe.find import Recipes
from pipeline.serving.serve.preflight import PROCESSORS

ROOT = Path(__file__).parents[3]
OWN = ROOT / "images" / "sources" / "nccl-sm120"
PLATFORM = "linux/amd64"
SPEC = Checkout(ROOT).source("nccl-sm120")


@pytest.mark.parametrize("entry", SPEC.patches, ids=lambda entry: Path(entry.file).stem)
def test_a_patch_changes_exactly_the_files_that_the_spec_lists(entry: SourcePatch) -> None:
    changed = [x.path for x in patch.parse((OWN / entry.file).read_text(), entry.file)]
    assert changed == [x.path for x in entry.files]
    assert all(x.before and x.after and x.before != x.after for x in entry.files)
    assert all(link.startswith("https://github.com/NVIDIA/nccl/pull/") for link in entry.upstream)


def test_every_patch_in_the_folder_is_in_the_spec() -> None:
    assert sorted(p.name for p in (OWN / "patches").iterdir()) == sorted(
        Path(entry.file).name for entry in SPEC.patches
    )


def test_the_result_must_hold_code_for_sm_120_and_is_checked_before_it_is_kept() -> None:
    build = SPEC.builds["sm120"]
    assert build.architectures == ["sm_120"]
    arguments = [x for step in build.steps for x in step.run]
    assert not [x for x in arguments if "sm_" in x and "sm_120" not in x]
    assert build.steps[-1].run == ["/src/sm120/graph_check.sh"]


def test_the_image_names_the_library_where_its_build_puts_it() -> None:
    checkout = Checkout(ROOT)
    image, build = checkout.spec("vllm-nccl"), SPEC.builds["sm120"]
    assert [(x.source, x.build) for x in image.compiled] == [("nccl-sm120", "sm120")]
    library = f"{build.to}/libnccl.so.2"
    assert "libnccl.so.2" in [x.to for x in SPEC.outputs]
    assert image.env == {"LD_PRELOAD": library, "VLLM_NCCL_SO_PATH": library}
    assert read_arch_spec(checkout, "vllm-nccl", PLATFORM).demanded(library.lstrip("/")) == "sm_120"


def test_it_is_the_version_that_the_engine_under_it_was_built_with() -> None:
    """A library older than the headers of torch could lack what torch calls."""
    checkout = Checkout(ROOT)
    base = checkout.spec("vllm-nccl").parent
    assert base == "vllm"
    wheels = read_lock(checkout.lock_path(base, PLATFORM)).wheels
    published = next(x.version for x in wheels if x.name == "nvidia-nccl-cu13")
    locked = read_source_lock(checkout.source_lock_path("nccl-sm120")).archive.version
    assert locked is not None
    assert locked.startswith(f"{published}-")


def test_nothing_that_vllm_accepts_is_missing_from_the_image_on_top() -> None:
    checkout = Checkout(ROOT)
    below, own = (read_arch_spec(checkout, name, PLATFORM) for name in ("vllm", "vllm-nccl"))
    assert own.accepted == below.accepted
    assert below.demands.items() <= own.demands.items()


def run_script(name: str, folder: Path, *arguments: str) -> list[str]:
    """What a script starts, with programs that print how they were called."""
    text = (OWN / name).read_text()
    for real in ("/usr/bin/g++", "/usr/local/cuda/bin/nvcc"):
        text = text.replace(real, str(folder / Path(real).name))
    for program in ("ccache", "g++", "nvcc"):
        (folder / program).write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        (folder / program).chmod(0o755)
    script = folder / "script"
    script.write_text(text)
    command = ["/bin/sh", str(script), *arguments]
    env = {"PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return [line.replace(f"{folder}/", "") for line in done.stdout.splitlines()]


def test_nvcc_is_asked_for_whole_programs_in_words_that_ccache_knows(tmp_path: Path) -> None:
    started = run_script("nvcc", tmp_path, "-dw", "a b.cu", "-o", "a.o")
    whole = ["--relocatable-device-code=false", "-c"]
    assert started == ["ccache", "nvcc", *whole, "a b.cu", "-o", "a.o"]


def test_what_nvcc_compiles_apart_stays_so(tmp_path: Path) -> None:
    assert run_script("nvcc", tmp_path, "-dc", "a.cu") == ["ccache", "nvcc", "-dc", "a.cu"]


def test_objects_of_gcc_are_kept(tmp_path: Path) -> None:
    assert run_script("g++", tmp_path, "-c", "a.cc") == ["ccache", "g++", "-c", "a.cc"]


def test_what_nvcc_itself_hands_to_gcc_is_not_kept_twice(tmp_path: Path) -> None:
    inner = "/tmp/tmpxft_00000007_00000000-6_a.cudafe1.cpp"
    assert run_script("g++", tmp_path, "-c", inner) == ["g++", "-c", inner]


def test_image_recipe_role_and_patch_agree_on_the_hosts_it_is_for() -> None:
    """AMD Zen 5 with eight cards: measured by NVIDIA/nccl#2080 and #2127, and nowhere else."""
    recipes = Recipes([ROOT / "recipes"])
    users = [r for name in recipes.names() if (r := recipes.read(name)).image == "vllm-nccl"]
    assert {(r.hardware.processor, r.hardware.cards) for r in users} == {("amd-zen-5", 8)}
    vendor, family = PROCESSORS["amd-zen-5"]
    role = (ROOT / "ansible" / "roles" / "nccl" / "tasks" / "patched.yml").read_text()
    assert f"['{vendor} {family}', '8']" in role
    p2p = (OWN / "patches" / "amd-p2p.patch").read_text()
    assert "model == NCCL_TOPO_CPU_MODEL_AMD_ZEN5" in p2p
    assert "nodes[GPU].count <= 8" in p2p
    assert Checkout(ROOT).spec("vllm-nccl").platforms == SPEC.builds["sm120"].platforms
    assert SPEC.builds["sm120"].platforms == ["linux/amd64"]


def test_nothing_that_is_shipped_forces_ll128() -> None:
    """Across sockets CPUs split its stores, and data is silently wrong (NVIDIA/nccl#2036)."""
    recipes = Recipes([ROOT / "recipes"])
    for name in recipes.names():
        assert "LL128" not in recipes.read(name).variables().get("NCCL_PROTO", "")
    assert "LL128" not in "".join(s.label for s in plan(full=True))
    settings = yaml.safe_load((ROOT / "ansible/roles/nccl/vars/main.yml").read_text())
    assert "LL128" not in str(settings["nccl_profiles"])
