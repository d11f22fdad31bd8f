"""A rendered Slurm job, run by a real bash; srun, scontrol and podman are stand-ins.

What is proved is the script: which rank gets which words on which node, and how the job ends. That
Slurm and podman do what is asked of them is not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.serving.recipe.container import LaunchTarget
from pipeline.serving.recipe.launch import Launch
from pipeline.serving.recipe.render.formats import render_launch
from tests.testbed.packages import system_environment
from tests.unit.recipe.render.launches import HOSTILE, IMAGE, small_launch

# runs its command once for each node, as Slurm's does, and ends with the worst code
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >>"$TRACE.srun"; shift; done
worst=0
for node in 0 1; do
  SLURM_NODEID=$node SLURM_STEP_GPUS=$((4 * node)),$((4 * node + 1)) "$@" || worst=$?
done
exit $worst
"""
NAMES = {"rig1": "10.0.0.1", "rig2": "10.0.0.2"}
# writes its words, one JSON list a line
WRITER = """#!{python}
import json, os, sys
with open(os.environ["TRACE"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
sys.exit(int(os.environ.get("FAILS") == sys.argv[1]))
"""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder with the programs that a job calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    cases = "".join(f"  {name}) echo '{at} STREAM' ;;\n" for name, at in NAMES.items())
    writer = WRITER.format(python=sys.executable)
    texts = {
        "srun": SRUN,
        "scontrol": f"#!/bin/sh\nprintf '%s\\n' {' '.join(NAMES)}\n",
        "getent": f"#!/bin/sh\ncase $2 in\n{cases}  *) exit 2 ;;\nesac\n",
        "podman": writer,
        "vllm": writer,
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def ran(tools: Path, launch: Launch, target: LaunchTarget, **env: str) -> tuple[int, list[str]]:
    """How the job ended, and what was started on each node."""
    script, trace = tools.parent / "job.sbatch", tools.parent / "trace"
    script.write_text(render_launch(launch, target, "slurm"))
    base = system_environment(TRACE=str(trace), SLURM_JOB_NODELIST="rig[1-2]", **env)
    done = subprocess.run(
        ["bash", str(script)],
        env={**base, "PATH": f"{tools}:{base['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = trace.read_text().splitlines() if trace.exists() else [done.stderr]
    return done.returncode, lines


def test_a_slurm_job_gives_each_node_its_rank_its_cards_and_its_address(tools: Path) -> None:
    launch = small_launch(nodes=2, arguments=["/models", *HOSTILE])
    code, lines = ran(tools, launch, LaunchTarget(image=IMAGE))
    assert code == 1  # an engine that ends has failed, also where srun says 0
    pulls, starts = lines[:2], [json.loads(line) for line in lines[2:]]
    assert [json.loads(line) for line in pulls] == [["podman", "pull", "--quiet", IMAGE]] * 2
    for rank, words in enumerate(starts):
        assert words[:2] == ["podman", "run"]
        at = words.index("/models") + 1
        assert words[at : at + len(HOSTILE)] == HOSTILE
        rest = words[at + len(HOSTILE) :]
        meeting = ["--master-addr", "10.0.0.1", "--master-port", "29501"]
        last = ["--headless"] if rank else ["--host", "127.0.0.1"]
        assert rest == ["--nnodes", "2", "--node-rank", str(rank), *meeting, *last]
        cards = [words[i + 1] for i, word in enumerate(words) if word == "--device"]
        assert cards == [f"nvidia.com/gpu={4 * rank}", f"nvidia.com/gpu={4 * rank + 1}"]
        assert f"VLLM_HOST_IP=10.0.0.{rank + 1}" in words
    assert "--kill-on-bad-exit=1" in (tools.parent / "trace.srun").read_text().split()


def test_a_job_of_pyxis_runs_the_engine_itself(tools: Path) -> None:
    target = LaunchTarget(image=IMAGE, runner="pyxis")
    _, lines = ran(tools, small_launch(nodes=2), target)
    starts = [json.loads(line) for line in lines]
    assert [words[:3] for words in starts] == [["vllm", "serve", "/models"]] * 2
    assert [words[-1] for words in starts] == ["127.0.0.1", "--headless"]


def test_a_job_whose_image_cannot_be_pulled_starts_no_engine(tools: Path) -> None:
    code, lines = ran(tools, small_launch(nodes=2), LaunchTarget(image=IMAGE), FAILS="pull")
    assert code == 1
    assert all(json.loads(line)[1] == "pull" for line in lines)


def test_a_node_without_an_address_ends_the_job_before_anything_starts(tools: Path) -> None:
    (tools / "scontrol").write_text("#!/bin/sh\nprintf '%s\\n' rig1 rig9\n")
    code, lines = ran(tools, small_launch(nodes=2), LaunchTarget(image=IMAGE))
    assert code == 1
    assert lines == ["not every node has an address: 10.0.0.1\n"]
