"""The podman command of "Running Kimi-K2.6 Locally", flag for flag."""

from __future__ import annotations

import shlex

from pipeline.recipe.hub_cache import with_whole_repositories
from pipeline.recipe.launch import Launch, Overrides, plan_launch
from pipeline.recipe.model import RecipeFile
from pipeline.recipe.render.formats import render
from pipeline.recipe.render.target import Target
from tests.unit.recipe.render.launches import DIGEST

# as it stands there, under "The Launch Command I Ended Up Keeping"; ${REF} is a commit
DOCUMENT = r"""
podman run --rm \
--device nvidia.com/gpu=all \
-p 8000:8000 \
--cap-add=SYS_NICE \
-v /mnt/data/models/models--ubergarm--Kimi-K2.6-GGUF:/models:ro,Z \
registry.home.arpa/ik_llama.cpp:latest \
-m /models/snapshots/${REF}/IQ3_K/Kimi-K2.6-IQ3_K-00001-of-00012.gguf \
--ctx-size 131768 \
--parallel 1 \
--threads 15 \
--threads-batch 32 \
-b 8192 \
-ub 4096 \
-ngl 999 \
-mla 3 \
-ger \
--special \
-amb 512 \
--jinja \
--host 0.0.0.0 \
--port 8000 \
--warmup-batch \
--alias kimi-k2.6-IQ3_K \
-ot "blk\.(1|2)\.ffn.*=CUDA0" \
-ot "blk\.(59|60)\.ffn.*=CUDA1" \
-ot "exps=CPU" \
--temp 0.6 \
--chat-template-kwargs '{"thinking":false}'
"""
WEIGHTS = "/mnt/data/models/models--ubergarm--Kimi-K2.6-GGUF/snapshots/${REF}"
BODY = {
    "name": "kimi-k26-ik-llama-2x",
    "summary": "Kimi-K2.6 IQ3_K on two cards and the processor's memory",
    "backing": "stated",
    "sources": {"document": {"kind": "document", "title": "Running Kimi-K2.6 Locally"}},
    "engine": "ik-llama",
    "image": "ik-llama",
    "model": {
        "repository": "ubergarm/Kimi-K2.6-GGUF",
        "file": "IQ3_K/Kimi-K2.6-IQ3_K-00001-of-00012.gguf",
        "name": "kimi-k2.6-IQ3_K",
    },
    "hardware": {"cards": 2, "card": "rtx-pro-6000"},
    "port": 8000,
    "container": {"capabilities": ["SYS_NICE"], "ipc": "private", "memory_locked": False},
    "flags": {
        "document": {
            "ctx_size": 131768,
            "parallel": 1,
            "threads": 15,
            "threads_batch": 32,
            "batch_size": 8192,
            "ubatch_size": 4096,
            "gpu_layers": 999,
            "mla": 3,
            "grouped_expert_routing": True,
            "special": True,
            "attention_max_batch": 512,
            "jinja": True,
            "warmup_batch": True,
            "override_tensor": [
                r"blk\.(1|2)\.ffn.*=CUDA0",
                r"blk\.(59|60)\.ffn.*=CUDA1",
                "exps=CPU",
            ],
            "temperature": 0.6,
            "chat_template_kwargs": {"thinking": False},
            "extra": ["--host", "0.0.0.0"],
        }
    },
}


def document_words(text: str) -> list[str]:
    # shlex knows no continued lines
    return shlex.split(text.replace("\\\n", " "))


def launch() -> Launch:
    recipe = RecipeFile.model_validate(BODY).root
    return with_whole_repositories(plan_launch(recipe, Overrides(), weights=WEIGHTS, digest=DIGEST))


def by_flag(words: list[str]) -> list[list[str]]:
    """Flags with their values, in any order but with patterns in theirs: the first one counts."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") or not groups:
            groups.append([])
        groups[-1].append(word)
    return sorted(groups, key=lambda group: group[0])


def test_podman_is_told_what_the_document_tells_it_but_for_the_images_digest() -> None:
    image = f"registry.home.arpa/ik_llama.cpp@{DIGEST}"
    got = document_words(render(launch(), Target(image=image), "podman"))
    want = document_words(DOCUMENT)
    at = want.index("registry.home.arpa/ik_llama.cpp:latest")
    # all before the image, in the document's order
    assert got[:at] == want[:at]
    assert got[at] == image
    assert by_flag(got[at + 1 :]) == by_flag(want[at + 1 :])
