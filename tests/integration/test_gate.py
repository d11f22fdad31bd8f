"""The shared-memory gate with the images' own Triton: the numbers that this project began with."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.artifacts.containers.sandbox import find_sandbox
from pipeline.artifacts.store.store import open_store
from pipeline.core.errors import GateFailed, GateInvalid, GateUnknown, PatchUnproved
from pipeline.images.assemble.plan import plan_image
from pipeline.images.gate.smem.image_gate import open_gate
from pipeline.images.gate.smem.stub_libraries import shared_object
from tests.gpu.collect import gate_context
from tests.integration.built import run_sm120
from tests.testbed.forked import ROOT

AMD64 = ("--platform", "linux/amd64")
PATCH = "0001-extend-attention-sm120-blocks.patch"


def gate(store: Path, *args: str) -> Any:
    """A gate's result, however it ended."""
    only = () if "--only" in args else ("--only", "smem")
    done = run_sm120(store, "gate", "run", *args, *only, "--json", *AMD64)
    assert done.returncode in (0, GateFailed.exit_code, GateUnknown.exit_code), done.stderr[-2000:]
    return json.loads(done.stdout)["smem"]


def needs(result: Any) -> dict[str, int]:
    """Case → the most that one of its kernels needs."""
    return {
        case["name"]: max(k["record"]["shared_bytes"] for k in case["kernels"])
        for case in result["cases"]
        if case["kernels"]
    }


def test_sglang_0_5_8_needs_106496_bytes_without_our_patch_and_71680_with_it(
    big_store: Path,
) -> None:
    before = gate(big_store, "sglang-k2", "--unpatched")
    assert needs(before)["extend-mla-576-512"] == 106496
    assert before["verdict"] == "failed"
    after = gate(big_store, "sglang-k2")
    assert needs(after)["extend-mla-576-512"] == 71680
    assert after["verdict"] in ("passed", "accepted")


def test_the_first_published_fix_can_be_chosen_and_fits_as_well(big_store: Path) -> None:
    case = ("--case", "extend-mla-576-512")
    chosen = gate(big_store, "sglang-k2", "--series", "pr-17908", *case)
    assert chosen["patches"] == ["pr-17908-extend-attention-blocks.patch"]
    assert (needs(chosen), chosen["verdict"]) == ({"extend-mla-576-512": 71680}, "passed")


# One function of the engine, with a platform that is one kind of card; prints what it chooses.
CHOOSES = """
import ast, json, sys, types
from pathlib import Path
tree = ast.parse(Path(sys.argv[1]).read_text())
(function,) = [n for n in tree.body if getattr(n, "name", "") == "_gpt_oss_overrides"]
function.decorator_list = []
class Platform:
    def __getattr__(self, name):
        return name == sys.argv[2]
class Quiet:
    def __getattr__(self, name):
        return lambda *a: None
names = dict(
    Any=object, Dict=dict, logger=Quiet(), get_platform=Platform,
    resolving_view=lambda args: args, is_attention_backend_not_set=lambda cfg: True,
    is_cpu=lambda: False, is_mps=lambda: False, is_triton_kernels_available=lambda: True,
    get_nvidia_driver_version=lambda: (580,), use_mlx=lambda: False, envs=None,
)
exec(compile(ast.Module([function], []), "gpt_oss.py", "exec"), names)
cfg = types.SimpleNamespace(moe_runner_backend="auto", dtype="auto", ep_size=1, quantization=None)
model = types.SimpleNamespace(quantization_config={"quant_method": sys.argv[3]})
print(json.dumps(names["_gpt_oss_overrides"](cfg, model)))
"""


def test_sglang_0_5_23_has_experts_in_mxfp4_for_sm120_without_a_patch(big_store: Path) -> None:
    # what sgl-project/sglang#16975 wanted, done otherwise: FlashInfer's CUTLASS kernel
    context = gate_context(open_store(big_store))
    with context.store.in_use():
        opened = open_gate(context, plan_image(context.checkout, "sglang", "linux/amd64"))
        folder, environment = opened.tree.folder, opened.environment
        file = folder / "sglang/srt/arg_groups/model_overrides/gpt_oss.py"

        def chosen(platform: str, method: str) -> str:
            done = find_sandbox().run(
                environment.command("-c", CHOOSES, str(file), platform, method),
                read=[*environment.readable, folder],
                env=environment.variables(),
            )
            return str(json.loads(done.stdout)["moe_runner_backend"])

        assert chosen("is_sm120", "mxfp4") == "flashinfer_mxfp4"
        # the path that #16975 changed is for other cards
        assert chosen("is_sm90", "mxfp4") == "triton_kernel"
        assert chosen("is_sm120", "none") == "triton_kernel"
        quantization = (folder / "sglang/srt/layers/quantization/mxfp4.py").read_text()
        assert (
            'get_platform().is_sm120:\n                self._fi_kernel = "cutlass_sm120"'
            in quantization
        )
        assert "def _apply_sm120_cutlass(" in quantization


def test_vllm_mla_decode_with_fp8_cache_needs_102400_bytes_and_fits_unspilled_with_our_patch(
    big_store: Path,
) -> None:
    before = gate(big_store, "vllm", "--unpatched")
    assert needs(before)["mla-decode-fp8-16-8"] == 102400
    after = gate(big_store, "vllm")
    assert needs(after)["mla-decode-fp8-16-8"] == 83968
    (case,) = [c for c in after["cases"] if c["name"] == "mla-decode-fp8-16-8"]
    assert all(k["record"]["spill_bytes"] == 0 for k in case["kernels"])
    assert case["verdict"] == "passed"


def test_fp8_experts_without_blocks_need_147456_bytes_in_sglang_0_5_8_and_fit_in_the_newer_one(
    big_store: Path,
) -> None:
    older = gate(big_store, "sglang-k2", "--case", "moe-fp8-*")
    verdicts = {case["name"]: case["verdict"] for case in older["cases"]}
    for kind in ("tensor", "channel"):
        assert needs(older)[f"moe-fp8-{kind}-e384-4096"] == 147456
        assert verdicts[f"moe-fp8-{kind}-e384-4096"] == "accepted"
        assert verdicts[f"moe-fp8-{kind}-e384-64"] == "passed"
    # as many tokens as experts, as the reason advises
    assert verdicts["moe-fp8-channel-e384-384"] == "passed"
    assert verdicts["moe-fp8-blocks-e384-4096"] == "passed"
    newer = gate(big_store, "sglang", "--case", "moe-fp8-*")
    assert newer["verdict"] == "passed"


def test_a_tuned_table_for_the_card_decides_what_is_compiled(big_store: Path) -> None:
    result = gate(big_store, "vllm", "--case", "moe-fp8-tensor-e20-*")
    blocks = {c["name"]: c["kernels"][0]["record"]["blocks"] for c in result["cases"]}
    # the default of 4096 tokens would be 128 columns
    assert blocks["moe-fp8-tensor-e20-4096"]["BLOCK_SIZE_N"] == 256
    assert result["verdict"] == "passed"


def test_a_card_with_more_shared_memory_takes_what_sm120_does_not(big_store: Path) -> None:
    result = gate(big_store, "vllm", "--unpatched", "--arch", "sm_100")
    (case,) = [c for c in result["cases"] if c["name"] == "mla-decode-fp8-16-8"]
    assert case["verdict"] == "passed"


def test_our_patches_are_needed_at_their_version(big_store: Path) -> None:
    for image in ("sglang-k2", "sglang", "vllm"):
        result = json.loads(run_sm120(big_store, "gate", "patches", image, "--json", *AMD64).stdout)
        assert [v["state"] for v in result] == ["needed"], result
        assert [v["numerics"] for v in result] == ["right"], result


@pytest.mark.parametrize("image", ["sglang-k2", "sglang", "vllm"])
def test_every_kernel_of_an_image_that_has_numerics_computes_the_right_numbers(
    big_store: Path, image: str
) -> None:
    numbers = gate(big_store, image, "--only", "numerics")["numerics"]
    assert {c["name"]: c["message"] for c in numbers["cases"] if c["verdict"] != "right"} == {}
    assert len(numbers["cases"]) > 30
    assert set(numbers["versions"]) == {"cuda", "numpy", "torch", "triton"}


def test_the_patch_of_pr_17908_is_superseded_from_0_5_9_on(big_store: Path) -> None:
    done = run_sm120(
        big_store, "gate", "patches", "sglang-k2", "--against", "0.5.9,0.5.10", "--json"
    )
    assert [v["state"] for v in json.loads(done.stdout)] == ["superseded", "superseded"]


def test_a_version_that_no_index_has_ends_the_command_with_one_line(big_store: Path) -> None:
    done = run_sm120(big_store, "gate", "patches", "sglang-k2", "--against", "9.9.9")
    assert done.returncode == GateInvalid.exit_code
    assert "sglang 9.9.9: no index has a wheel of this version" in done.stderr


def test_a_branch_that_is_never_reached_makes_the_patch_inert(
    big_store: Path, tmp_path: Path
) -> None:
    """The branch of PR 17908 after `>= 9`: it applies, it reads well, and it does nothing."""
    checkout = dead_code_checkout(tmp_path)
    command = [sys.executable, "-m", "pipeline", "--checkout", str(checkout)]
    done = subprocess.run(
        [*command, "--store", str(big_store), "patches", "sglang-k2", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert [v["state"] for v in json.loads(done.stdout)] == ["inert"]
    assert done.returncode == PatchUnproved.exit_code


def dead_code_checkout(tmp_path: Path) -> Path:
    """This checkout with the branch of PR 17908 moved behind the one that catches it."""
    shutil.copytree(ROOT / "images", tmp_path / "images")
    shutil.copytree(ROOT / "lockfiles", tmp_path / "lockfiles")
    path = tmp_path / "images" / "sglang-k2" / "patches" / PATCH
    target = "sglang/srt/layers/attention/triton_ops/extend_attention.py"
    hunk = [
        "         if _is_cuda and CUDA_CAPABILITY[0] >= 9:",
        "             # Hopper architecture (H100, etc.)",
        "             if Lq <= 256:",
        "                 BLOCK_M, BLOCK_N = (128, 64)",
        "             else:",
        "                 BLOCK_M, BLOCK_N = (32, 64)",
        "+        elif _is_cuda and CUDA_CAPABILITY[0] == 12:",
        "+            BLOCK_M, BLOCK_N = (32, 32)",
    ]
    head = [f"--- a/{target}", f"+++ b/{target}", "@@ -67,6 +67,8 @@"]
    path.write_text("\n".join([*head, *hunk, ""]), encoding="utf-8")
    return tmp_path


def test_a_second_run_answers_within_five_seconds(big_store: Path) -> None:
    command = ("gate", "run", "vllm", "--json", *AMD64)
    first, second = (run_sm120(big_store, *command) for _ in range(2))
    before, after = (json.loads(done.stdout)["smem"] for done in (first, second))
    assert before["verdict"] == after["verdict"]
    assert after["seconds"] < 5
    assert all(case["cached"] for case in after["cases"])


def test_a_stub_library_satisfies_a_real_program(tmp_path: Path) -> None:
    """A program linked with a library that is not there runs with its stub."""
    compiler = shutil.which("gcc")
    if compiler is None or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("There is no gcc here to link a program with.")
    machine = 62 if platform.machine() == "x86_64" else 183
    made = shared_object("libcuda.so.1", [("", "cuInit")], machine)
    (tmp_path / "libcuda.so.1").write_bytes(made)
    (tmp_path / "real.c").write_text("int cuInit(int x) { return 0; }\n")
    (tmp_path / "main.c").write_text(
        "int cuInit(int); int main(void) { return cuInit(0) != 0 ? 7 : 1; }\n"
    )
    real = tmp_path / "libreal.so"
    soname = "-Wl,-soname,libcuda.so.1"
    build = [[compiler, "-shared", soname, "-o", str(real), str(tmp_path / "real.c")]]
    program = tmp_path / "main"
    build.append([compiler, "-o", str(program), str(tmp_path / "main.c"), str(real)])
    for command in build:
        subprocess.run(command, check=True)
    ran = subprocess.run([str(program)], env={"LD_LIBRARY_PATH": str(tmp_path)}, check=False)
    assert ran.returncode == 7
