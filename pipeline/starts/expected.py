"""What an image must show when it starts, from its spec, its lock and its config. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.assemble.plan import ImagePlan
from pipeline.errors import SpecInvalid
from pipeline.model import Frozen
from pipeline.oci.config import ImageConfig
from pipeline.recipe.model import Engine
from pipeline.recipe.parser_flags import ParserFlags
from pipeline.serve.read_flags import Parser, find_parser
from pipeline.yaml_file import read_yaml

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
_LIMIT_S, _EMULATED_LIMIT_S = 900.0, 7200.0


class OptionalLibraries(Frozen):
    """Files that may ask for libraries in vain, as patterns, each with the reason."""

    askers: dict[str, str]


class ParserWanted(Frozen):
    """How the argument parser is asked, and the flags that it must know."""

    arguments: list[str]
    flags: list[str]
    file: str


class Wanted(Frozen):
    """All that is looked at inside the image; `checks` is in the order of the run."""

    checks: list[str]
    user: str
    folders: list[str]
    modules: list[str]
    programs: list[str]
    parser: ParserWanted | None
    command: list[str]
    arch: str
    driver: list[str]
    optional: dict[str, str]  # files that may ask for libraries in vain, and why
    limit_s: float


def wanted_of(
    plan: ImagePlan, config: ImageConfig, flags: ParserFlags | None, *, emulated: bool = False
) -> Wanted:
    """What an image must show, as far as its spec promises it."""
    parser, variables = engine_of(plan), config.variables()
    command = [*(config.runs.entrypoint or []), *(config.runs.command or [])]
    return Wanted(
        checks=_checks(plan, parser, command),
        user=_of_chain(plan, "user") or "root",
        folders=_folders(variables, _home(plan, variables)),
        modules=_modules(parser),
        programs=_programs(plan),
        parser=_parser(parser, flags) if parser else None,
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


def _parser(parser: Parser, flags: ParserFlags | None) -> ParserWanted:
    names = [name for name, flag in flags.flags.items() if not flag.retired] if flags else []
    file = f"lockfiles/flags/{flags.image}.yaml" if flags else ""
    return ParserWanted(arguments=parser.arguments, flags=names, file=file)


def _modules(parser: Parser | None) -> list[str]:
    # an engine that is one program imports nothing
    is_python = parser is not None and parser.arguments[0] != "program"
    return list(_MODULES.get(parser.engine, ())) if parser and is_python else []


def _of_chain(plan: ImagePlan, field: str) -> str | None:
    """A setting of an image, or of the nearest one that it stands on."""
    values = [getattr(each.spec, field) for each in plan.chain()]
    return next((value for value in reversed(values) if value), None)


def _checks(plan: ImagePlan, parser: Parser | None, command: list[str]) -> list[str]:
    debs = {name for each in plan.chain() for name in each.spec.debs}
    wheels = {wheel.name for each in plan.chain() for wheel in each.lock.wheels}
    promised = {
        "user": _of_chain(plan, "user") is not None,
        "folders": True,
        "libraries": True,
        "programs": True,
        "certificates": "ca-certificates" in debs,
        "c": {"gcc", "libpython3.11-dev"} <= debs,
        "cxx": "g++" in debs,
        "ninja": "ninja" in wheels,
        "nvcc": "nvidia-cuda-nvcc" in wheels and plan.spec.cuda is not None,
        "triton": "triton" in wheels,
        "modules": bool(_modules(parser)),
        "parser": parser is not None,
        # an engine's image without arguments prints its help
        "command": parser is not None and command[-1:] == ["--help"],
    }
    return [name for name, is_promised in promised.items() if is_promised]


def _programs(plan: ImagePlan) -> list[str]:
    """Programs that engines call by name, of the .debs that were put in for them."""
    named = {"numactl": "numactl", "libc-bin": "ldconfig", "gcc": "gcc", "g++": "g++"}
    debs = [name for each in plan.chain() for name in each.spec.debs]
    return [named[name] for name in debs if name in named]


def _home(plan: ImagePlan, variables: Mapping[str, str]) -> str:
    """The home that the image names, else that of its user's account, as container engines do."""
    user = _of_chain(plan, "user")
    accounts = {x.name: x.home for each in plan.chain() for x in each.spec.accounts}
    return variables.get("HOME") or accounts.get(user or "root", "/root")


def _folders(variables: Mapping[str, str], home: str) -> list[str]:
    """Home, /tmp, caches, and what variables place below the home; each once."""
    below = [value for value in variables.values() if value.startswith(f"{home}/")]
    # where XDG_CACHE_HOME is not set, libraries take this one
    named = [home, "/tmp", f"{home}/.cache", *sorted(below)]  # noqa: S108
    return list(dict.fromkeys(named))
