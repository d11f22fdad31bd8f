"""What clients of the served model set: the OpenAI variables, and those of Claude Code."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from ipaddress import AddressValueError, IPv6Address

from pipeline.core.errors import RecipeInvalid

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
# Claude Code asks for models by these names; all are the one that is served.
_CLAUDE_MODELS = (
    *("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"),
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_FAST_MODEL"),
)
# The engines ask for no key, but clients refuse to start without one.
_NO_KEY = "dummy"


def client_settings(model: str, port: int, node: str) -> dict[str, str]:
    """The variables by name, for a server at `node`."""
    if not _HOST.fullmatch(node):
        try:
            node = f"[{IPv6Address(node)}]"
        except AddressValueError:
            message = f"{node!r} is no host"
            raise RecipeInvalid(message, "Write --node NAME or --node ADDRESS.") from None
    base = f"http://{node}:{port}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_KEY": _NO_KEY,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": _NO_KEY,
        **dict.fromkeys(_CLAUDE_MODELS, model),
        "DISABLE_TELEMETRY": "1",
        "ENABLE_PROMPT_CACHING_1H": "1",
    }


def render_env(settings: Mapping[str, str]) -> str:
    """Lines for `eval` or a profile."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in settings.items())
