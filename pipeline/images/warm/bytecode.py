"""Compiles an image's Python files, so that its first start imports and does not compile."""

from __future__ import annotations

from pipeline.core import log, proc
from pipeline.core.errors import StepFailed
from pipeline.core.files import on_all_cores, os_errors_explained
from pipeline.images.assemble.image import assemble_images
from pipeline.images.assemble.plan import PYCACHE, WarmPlan
from pipeline.images.gate.smem.engine import GateContext, unpack_kept
from pipeline.images.warm.target import COMPILES_PYTHON, WarmTarget

# As many processes, whatever the machine: who compiles what is part of the bytes.
_PARTS = 8
_PART_TIMEOUT_S = 1800.0


def compile_python(context: GateContext, plan: WarmPlan, target: WarmTarget) -> dict[str, bytes]:
    """Compiles every Python file of the base with the image's Python; the layer's files by path.

    They lie at `PYCACHE`, by which Python finds them: beside their sources a user's volume or a
    later layer would hide them one by one.
    """
    store, version = context.store, target.environment.facts.python
    places = (f"{plan.base.venv.site}/", f"usr/lib/python{version}/", "usr/lib/python3/")
    (base,) = assemble_images(context.checkout, store, [plan.base], context.make_fetcher)
    with store.scratch() as scratch, log.step(f"Compiling the Python files of {plan.image}"):
        work = scratch / "python"
        work.mkdir()
        unpack_kept(
            *(store, [each.record for each in base.layers]),
            # tests of packages are a fifth of the bytes, and no engine imports them
            lambda row: (
                row.path
                if row.path.endswith(".py")
                and row.path.startswith(places)
                and not {"test", "tests"} & set(row.path.split("/"))
                else None
            ),
            work,
        )
        names = sorted(str(path.relative_to(work)) for path in work.rglob("*.py") if path.is_file())

        def run(number: int) -> None:
            listed = f"part-{number}"
            (work / listed).write_text("\n".join(names[number::_PARTS]), encoding="utf-8")
            done = target.sandbox.run(
                target.environment.command(COMPILES_PYTHON, str(work.absolute()), listed),
                write=[work],
                env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
                timeout_s=_PART_TIMEOUT_S,
            )
            if done.returncode:
                why = done.stderr.decode(errors="replace").strip()[-400:]
                raise StepFailed(f"{plan.title}: Python files were not compiled: {why}")

        with os_errors_explained(work):
            on_all_cores(run, range(_PARTS), proc.end_reads)
            tag = f"cpython-{version.replace('.', '')}"
            compiled = {name: work / f"{name}c" for name in names}
            return {
                f"{PYCACHE}/{name.removesuffix('.py')}.{tag}.pyc": path.read_bytes()
                for name, path in compiled.items()
                if path.is_file()
            }
