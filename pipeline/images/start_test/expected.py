"""What an image must show when it starts, from its spec, its lock and its config. Runs nothing."""

from __future__ import annotations

from pathlib import Path

from pipeline.artifacts.oci.config import ImageConfig
from pipeline.core.errors import SpecInvalid
from pipeline.core.model import Engine, Frozen
from pipeline.core.yaml_file import read_yaml
from pipeline.images.assemble.plan import ImagePlan
from pipeline.images.engine.parser_flags import ParserFlags
from pipeline.images.engine.read_flags import Parser, find_parser

OPTIONAL = Path(__file__).with_name("optional.yaml")
# What the NVIDIA container toolkit mounts from the host: no image may bring them.
DRIVER = (
    *("libcuda.so.1", "libnvidia-ml.so.1", "libnvcuvid.so.1", "libnvidia-encode.so.1"),
    *("libnvidia-ptxjitcompiler.so.1", "libnvidia-opticalflow.so.1"),
)
# The modules that a server imports, the lowest first: the first that fails is the cause.
_MODULES: dict[Engine, tuple[str, ...]] = {
    "vllm": (
        *("torch", "triton", "transformers", "flashinfer", "vllm", "vllm._C_stable_libtorch"),
        "vllm.entrypoints.openai.api_server",
    ),
    "sglang": (
        *("torch", "triton", "transformers", "flashinfer", "sgl_kernel"),
        "sglang.launch_server",
    ),
    "llama-cpp": ("xllamacpp",),
}
# Programs that engines call by name, by the .debs that bring them.
_PROGRAMS = {"numactl": "numactl", "libc-bin": "ldconfig", "gcc": "gcc", "g++": "g++"}
_LIMIT_S, _EMULATED_LIMIT_S = 900.0, 7200.0


class OptionalLibraries(Frozen):
    """Patterns of files whose libraries may be missing, each with the reason."""

    askers: dict[str, str]


class ParserWanted(Frozen):
    """The arguments that start the engine's parser, and the flags that it must know."""

    arguments: list[str]
    flags: list[str]
    file: str


class StartExpectations(Frozen):
    """What the checks inside the image look at; `checks` is in the order of the run."""

    checks: list[str]
    user: str
    folders: list[str]
    modules: list[str]
    programs: list[str]
    parser: ParserWanted | None
    command: list[str]
    arch: str
    driver: list[str]
    optional: dict[str, str]  # files whose libraries may be missing, and why
    limit_s: float


def wanted_of(
    plan: ImagePlan, config: ImageConfig, flags: ParserFlags | None, *, emulated: bool = False
) -> StartExpectations:
    """What an image must show, as far as its spec promises it."""
    parser, variables, specs = engine_of(plan), config.variables(), [x.spec for x in plan.chain()]
    command = [*(config.runs.entrypoint or []), *(config.runs.command or [])]
    # of the image, or of the nearest one that it stands on
    user = next((spec.user for spec in reversed(specs) if spec.user), None)
    # a slim image promises no compiler
    left_out = plan.slim.debs if plan.slim else ()
    debs = [name for spec in specs for name in spec.debs if name not in left_out]
    wheels = {wheel.name for each in plan.chain() for wheel in each.wheels}
    modules: tuple[str, ...] = ()
    parser_wanted = None
    if parser:
        # an engine that is one program imports nothing
        is_python = parser.arguments[0] != "program"
        modules = _MODULES.get(parser.engine, ()) if is_python else ()
        known = flags.flags if flags else {}
        parser_wanted = ParserWanted(
            arguments=parser.arguments,
            flags=[name for name, flag in known.items() if not flag.retired],
            file=f"lockfiles/flags/{flags.image}.yaml" if flags else "",
        )
    promised = {
        "user": user is not None,
        "folders": True,
        "libraries": True,
        "programs": True,
        "certificates": "ca-certificates" in debs,
        "c": {"gcc", "libpython3.11-dev"} <= {*debs},
        "cxx": "g++" in debs,
        "ninja": "ninja" in wheels,
        "nvcc": "nvidia-cuda-nvcc" in wheels and plan.spec.cuda is not None,
        "triton": "triton" in wheels,
        "modules": bool(modules),
        "parser": parser is not None,
        # an engine's image without arguments prints its help
        "command": parser is not None and command[-1:] == ["--help"],
    }
    # as container engines do: the home that the image names, else that of its user's account
    accounts = {account.name: account.home for spec in specs for account in spec.accounts}
    home = variables.get("HOME") or accounts.get(user or "root", "/root")
    below = [value for value in variables.values() if value.startswith(f"{home}/")]
    return StartExpectations(
        checks=[name for name, is_promised in promised.items() if is_promised],
        user=user or "root",
        # where XDG_CACHE_HOME is not set, libraries take ~/.cache; each folder once
        folders=list(dict.fromkeys([home, "/tmp", f"{home}/.cache", *sorted(below)])),  # noqa: S108
        modules=list(modules),
        programs=[_PROGRAMS[name] for name in debs if name in _PROGRAMS],
        parser=parser_wanted,
        command=command,
        arch=plan.spec.promised_archs[0],
        driver=list(DRIVER),
        optional=read_yaml(OPTIONAL, OptionalLibraries).askers,
        limit_s=_EMULATED_LIMIT_S if emulated else _LIMIT_S,
    )


def engine_of(plan: ImagePlan) -> Parser | None:
    """The engine that an image starts; none for a base or a toolchain."""
    try:
        return find_parser(plan)
    except SpecInvalid:
        return None
