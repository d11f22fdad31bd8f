from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.images.spec.checkout import Checkout
from pipeline.weights.model import (
    FilePin,
    lock_path,
    read_spec,
    sealed_weights_lock,
    write_weights_lock,
)
from pipeline.weights.place import new_place
from tests.testbed import hub_faults as fault
from tests.testbed.hub import ALWAYS, TestHub, test_hub
from tests.testbed.tiny_gguf import write_tiny_gguf
from tests.unit.fit.gguf_bytes import DATA, LLAMA, TENSORS, gguf
from tests.unit.fit.test_fit_config import LLAMA as LLAMA_CONFIG
from tests.unit.support import ROOT, Command


@pytest.fixture
def fit(sm120: Command, tmp_path: Path) -> Any:
    (tmp_path / "images").mkdir()
    shutil.copytree(ROOT / "lockfiles" / "weights", tmp_path / "lockfiles" / "weights")
    for lock in (tmp_path / "lockfiles" / "weights").glob("*.lock.yaml"):
        lock.unlink()
    return lambda *args: sm120("weights", "fit", *args)


def test_a_spec_is_answered_offline_and_says_what_it_was_read_from(fit: Any) -> None:
    ended = fit("kimi-k2.6", "--mem-fraction", "0.85", "--kv", "fp8", "--mbps", "500")
    assert ended.code == 0, ended.err
    assert "shipped facts about moonshotai/Kimi-K2.6, not the weights themselves" in ended.out
    assert "595.15 GB (554.27 GiB) by the sum of its tensors" in ended.out
    assert "0 h 20 min" in ended.out
    assert "fits: room for at least 3 requests of 65,536 tokens" in ended.out


def test_what_does_not_fit_prints_the_table_first_and_ends_with_its_own_code(fit: Any) -> None:
    ended = fit("kimi-k2.6")
    assert ended.error == "DoesNotFit"
    assert "on each card" in ended.out
    assert "--mem-fraction 0.818 would give 65,536 tokens their room" in ended.out
    assert "room for 4,277 tokens, 65,536 asked for" in ended.err


def test_memory_that_is_short_is_not_a_negative_size(fit: Any) -> None:
    table = fit("kimi-k2.6", "--gpu-count", "4").out
    assert re.search(r"none, \d+\.\d\d short", table)
    assert not re.search(r"-\d+\.\d\d", table)


def test_cards_and_contexts_are_read_as_people_call_them(fit: Any) -> None:
    rest = ("--kv", "fp8", "--mem-fraction", "0.85", "--json")
    sold = fit("kimi-k2.6", "--vram", "96GB", "--ctx", "128k", *rest)
    assert sold.json == fit("kimi-k2.6", "--vram", "96GiB", "--ctx", "131072", *rest).json


def test_measured_weights_give_the_published_number(fit: Any) -> None:
    flags = ("--weights-per-gpu", "72.33GiB", "--mem-fraction", "0.7714564", "--ctx", "4096")
    answer = fit("kimi-k2.5", *flags, "--json").json
    assert answer["fits"] is True
    assert answer["low_tokens"] == answer["high_tokens"] == 4538


def test_json_of_what_does_not_fit_is_whole_and_the_code_is_kept(fit: Any) -> None:
    ended = fit("kimi-k2.6", "--gpu-count", "4", "--json")
    assert ended.error == "DoesNotFit"
    answer = json.loads(ended.out)
    assert answer["fits"] is False
    assert answer["room"]["kv_bytes"] < 0


def test_experts_are_placed_and_the_lines_are_printed(fit: Any) -> None:
    flags = ("--gpu-count", "2", "--ram", "768GB", "--ctx", "131072", "--ubatch", "4096")
    ended = fit("kimi-k2.6-iq3-k", *flags)
    assert ended.code == 0, ended.err
    assert r'-ot "blk\.(1|2|3|4|5|6|7|8|9)\.ffn_.*_exps=CUDA0"' in ended.out
    assert '-ot "exps=CPU"' in ended.out
    assert "-mla 3" in ended.out
    answer = fit("kimi-k2.6-iq3-k", *flags, "--json").json
    assert answer["fits"] is True
    assert answer["rules"][-1] == "exps=CPU"


def test_mla_modes_are_calculated_and_printed(fit: Any) -> None:
    flags = ("--gpu-count", "2", "--ctx", "32k", "--check-ot", "exps=CPU")
    answers = {n: fit("kimi-k2.6-iq3-k", *flags, "--mla", n, "--json").json for n in "013"}
    tokens = {n: answer["kv_token_bytes"] for n, answer in answers.items()}
    assert tokens == {"0": 61 * 64 * 320 * 2, "1": 61 * 576 * 2, "3": 61 * 576 * 2}
    assert {n: [line for line in a["launch"] if "m" in line] for n, a in answers.items()} == {
        "0": ["-mla 0"],
        "1": ["-mla 1"],
        "3": ["-mla 3", "-amb 512"],
    }
    ended = fit("kimi-k2.6-iq3-k", "--gpu-count", "2", "--ctx", "128k", "--mla", "0")
    assert ended.error == "DoesNotFit"
    assert "--mla 1" in ended.err


def test_a_model_with_other_attention_has_no_mla_modes(fit: Any, tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    path.write_bytes(gguf(LLAMA, TENSORS, DATA))
    assert fit(path, "--gpu-count", "1", "--ctx", "4096").code == 0
    for mode in "012":
        ended = fit(path, "--gpu-count", "1", "--ctx", "4096", "--mla", mode)
        assert ended.code == 2
        assert f"--mla {mode}: " in ended.err


def test_a_users_own_lines_are_judged(fit: Any) -> None:
    lines = ("--check-ot", r"blk\.([1-9]|1[0-9])\.ffn.*=CUDA0", "--check-ot", "exps=CPU")
    ended = fit("kimi-k2.6-iq3-k", "--gpu-count", "2", *lines)
    assert ended.error == "DoesNotFit"
    assert "CUDA0 is short of" in ended.err
    late = ("--check-ot", "exps=CPU", "--check-ot", r"blk\.1\.ffn_.*_exps=CUDA0")
    assert "does nothing" in fit("kimi-k2.6-iq3-k", "--gpu-count", "2", *late).out


def test_too_little_ram_does_not_fit(fit: Any) -> None:
    ended = fit("kimi-k2.6-q4-x", "--gpu-count", "1", "--ram", "256GiB")
    assert ended.error == "DoesNotFit"
    assert "the host is short of" in ended.err


def test_files_and_folders_are_read_themselves(fit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "model.safetensors").write_bytes(b"12345")
    by_file = fit(folder / "config.json", "--gpu-count", "1", "--json").json
    by_folder = fit(folder, "--gpu-count", "1", "--json").json
    assert by_file == by_folder
    assert (by_file["disk_bytes"], by_file["disk_is_estimate"]) == (5, False)


def test_weights_that_lie_there_twice_are_counted_once(fit: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    for name in ("model.safetensors", "consolidated.safetensors"):  # for another loader
        with (tmp_path / name).open("wb") as file:
            file.truncate(16_060_522_496)  # sparse
    ended = fit(tmp_path, "--gpu-count", "1", "--json").json
    assert ended["disk_bytes"] == 16_060_522_496
    assert not [row for row in ended["rows"] if "beyond" in row["what"]]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[TestHub]:
    with test_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_TOKEN", "hf_mine")
        yield running


def test_any_model_of_the_hub_is_answered_by_its_config_alone(fit: Any, hub: TestHub) -> None:
    quant = {
        "quantization": {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8"}
    }
    files = {"config.json": json.dumps(LLAMA_CONFIG), "hf_quant_config.json": json.dumps(quant)}
    hub.add("org/llama", {name: text.encode() for name, text in files.items()})
    ended = fit("org/llama@main", "--gpu-count", "1")
    assert ended.code == 0, ended.err
    assert "read from: config.json of org/llama at" in ended.out
    assert "KV cache in fp8" in ended.out
    assert fit("org/llama", "--gpu-count", "1", "--json").json["name"] == "org/llama"


def test_a_spec_of_a_model_that_is_not_shipped_is_read_from_the_hub(fit: Any, hub: TestHub) -> None:
    hub.add("lightseekorg/kimi-k2.6-eagle3", {"config.json": json.dumps(LLAMA_CONFIG).encode()})
    ended = fit("kimi-k2.6-eagle3", "--gpu-count", "1")
    assert ended.code == 0, ended.err
    assert "config.json of lightseekorg/kimi-k2.6-eagle3 at" in ended.out


def test_a_model_that_the_hub_does_not_have_or_cannot_tell_is_refused(
    fit: Any, hub: TestHub
) -> None:
    assert fit("org/nothing").error == "HubRefused"
    hub.add("org/gguf", {"model-Q4.gguf": b"GGUF"})
    ended = fit("org/gguf")
    assert ended.error == "ModelUnreadable"
    assert "has no config.json" in ended.err
    hub.add("org/broken", {"config.json": b"{"})
    ended = fit("org/broken")
    assert ended.error == "ModelUnreadable"
    assert "org/broken: cannot be read" in ended.err
    assert "A copy of the config.json in which you correct that" in ended.err
    hub.add("org/both", {"config.json": b"{}", "model-Q4.gguf": b"GGUF"})
    assert "name its .gguf file" in fit("org/both").err


def test_without_the_hub_a_shipped_fact_answers_and_says_so(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = fit("openai/gpt-oss-120b", "--gpu-count", "1", "--engine", "vllm", "--gpu-util", "0.9")
    assert ended.code == 0, ended.err
    assert "shipped facts about openai/gpt-oss-120b; the Hub was not reached" in ended.out
    assert fit("org/nothing").error == "OfflineMiss"


def test_without_the_hub_a_folder_and_the_nearest_shipped_models_are_named(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    ended = fit("openai/gpt-oss-20b")
    assert ended.error == "OfflineMiss"
    assert "openai/gpt-oss-20b: HF_HUB_OFFLINE is set" in ended.err
    assert "a folder with the model's config.json (`sm120 weights fit FOLDER`)" in ended.err
    assert "the nearest openai/gpt-oss-120b (docs/fit.md lists them)" in ended.err
    ended = fit("kimi-k2.6-eagle3")  # a spec, of which nothing is shipped either
    assert ended.error == "OfflineMiss"
    assert "a folder with the model's config.json" in ended.err
    assert "nearest" not in fit("org/nothing").err


def test_without_the_hub_a_model_of_the_users_cache_is_named(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "cache" / "models--org--llama"
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    assert f"name its folder in your cache: {model}." in fit("org/llama").err
    assert fit(model, "--gpu-count", "1").code == 0
    assert "your cache" not in fit("org/other").err


def test_a_hub_that_does_not_answer_is_given_up_after_a_second_try(fit: Any, hub: TestHub) -> None:
    hub.add("org/llama", {"config.json": json.dumps(LLAMA_CONFIG).encode()})
    hub.fail("*", fault.status(503), times=ALWAYS, stage="info")
    ended = fit("org/llama")
    assert ended.error == "SourceUnreachable"
    assert "a folder with the model's config.json" in ended.err
    assert [asked.stage for asked in hub.asked] == ["info", "info"]
    hub.forgive()
    hub.fail("*", fault.status(503), times=1, stage="info")
    assert fit("org/llama", "--gpu-count", "1").code == 0


def test_the_folder_that_the_hint_advises_needs_nothing_but_the_config(
    fit: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "by-hand"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    ended = fit(folder, "--gpu-count", "1")
    assert ended.code == 0, ended.err
    assert "by the sum of its tensors" in ended.out


def test_files_larger_than_their_known_parts_are_counted_with_the_reason(
    fit: Any, hub: TestHub
) -> None:
    small = LLAMA_CONFIG | {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 128}
    small |= {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = json.dumps(small | {"max_position_embeddings": 65536}).encode()
    hub.add("org/more", {"config.json": config, "model.safetensors": bytes(1 << 20)})
    ended = fit("org/more", "--gpu-count", "1")
    assert "beyond known parts" in ended.out
    assert "Its files have 0.00 GiB" in ended.out
    hub.add("org/less", {"config.json": config, "model.safetensors": b"1"})
    ended = fit("org/less", "--gpu-count", "1")
    assert "beyond known parts" not in ended.out
    assert "which are counted" in ended.out


@pytest.mark.parametrize("family", ["\x1b[2Jllama", "\x1b[2J" + "x" * 100_000])
def test_a_name_in_a_gguf_does_not_act_on_the_terminal(
    fit: Any, tmp_path: Path, family: str
) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(gguf(LLAMA | {"general.architecture": family}, TENSORS, DATA))
    ended = fit(path)
    assert ended.error == "ModelUnreadable"
    assert "\\x1b[2J" in ended.err
    assert "\x1b" not in ended.err
    assert len(ended.err) < 1000


def test_a_gguf_is_placed_from_its_own_head(fit: Any, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    answer = fit(path, "--gpu-count", "1", "--ctx", "4096", "--json").json
    assert answer["origin"] == "the head of its GGUF files"
    assert answer["expert_layers"] == 1
    assert answer["disk_bytes"] == path.stat().st_size
    assert answer["kv_token_bytes"] == 576 * 2 * 2


def test_a_fetched_set_in_the_hubs_layout_is_found(fit: Any, tmp_path: Path) -> None:
    spec = read_spec(Checkout(tmp_path), "kimi-k2.6")
    lock = sealed_weights_lock(
        spec, "0" * 40, [FilePin(path="config.json", size_bytes=1, git_sha1="1" * 40)]
    )
    place = new_place(tmp_path / "cache", lock, hub_cache=True)
    place.keep_lock()
    place.snapshot.mkdir(parents=True)
    (place.snapshot / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    assert fit(tmp_path / "cache", "--gpu-count", "1").code == 0


def test_a_cache_of_several_models_asks_for_one_of_them(fit: Any, tmp_path: Path) -> None:
    cache, commit = tmp_path / "hub", "a" * 40
    for name in ("models--org--one", "models--org--two"):
        snapshot = cache / name / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    ended = fit(cache)
    assert ended.error == "WeightsUnknown"
    assert "is a cache with 2 snapshots of models" in ended.err
    named = cache / "models--org--one" / "snapshots" / commit
    assert f"such as {named}." in ended.err
    assert fit(named, "--gpu-count", "1").code == 0
    (named / "config.json").unlink()
    assert "holds no config.json" in fit(named).err


def test_engines_may_be_written_as_their_projects_do(fit: Any) -> None:
    flags = ("--kv", "fp8", "--json")
    assert fit("kimi-k2.6", "--engine", "vLLM", *flags).json["engine"] == "vllm"
    assert fit("kimi-k2.6", "--engine", "SGLang", "--gpu-count", "16", *flags).json["fits"]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ('{"a": 1}', "architectures: must name"), ("[", "cannot be read")],
)
def test_a_file_that_is_no_config_says_what_it_must_be(
    fit: Any, tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "odd.json").write_text(text)
    ended = fit(tmp_path / "odd.json")
    assert ended.error == "ModelUnreadable"
    assert message in ended.err
    assert "the whole config.json of a model" in ended.err


def test_a_file_that_may_not_be_read_is_not_called_a_wrong_one(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, most_bytes: int) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("pipeline.serving.fit.config.read_at_most", refused)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    ended = fit(tmp_path / "config.json")
    assert ended.error == "ModelUnreadable"
    assert "config.json: cannot be read: Permission denied" in ended.err
    assert "Change its owner or mode" in ended.err


def test_a_lock_gives_the_exact_size(fit: Any, tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    pin = FilePin(path="a.safetensors", size_bytes=595_000_000_000, sha256="0" * 64)
    write_weights_lock(
        lock_path(checkout, "kimi-k2.6"),
        sealed_weights_lock(read_spec(checkout, "kimi-k2.6"), "0" * 40, [pin]),
    )
    answer = fit("kimi-k2.6", "--mem-fraction", "0.85", "--json").json
    assert (answer["disk_bytes"], answer["disk_is_estimate"]) == (595_000_000_000, False)


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("nothing",), 41, "no weights spec 'nothing'"),
        (("no/such/folder",), 41, "Name a folder, a config.json or a .gguf file"),
        (("no.json",), 41, "no.json: there is no such file or folder"),
        (("",), 41, "the name of the model is empty"),
        (("gpt-oss-120b",), 41, "Did you mean openai/gpt-oss-120b?"),
        (("https://huggingface.co/openai/gpt-oss-120b",), 10, "here openai/gpt-oss-120b."),
        (
            ("kimi-k2.6", "--gpu-count", "4"),
            61,
            "Fewer tokens do not help. It fits with --gpu-count 16.",
        ),
        (("kimi-k2.6-q4-x", "--gpu-count", "1", "--ram", "9GB"), 61, "It fits with --ram 462GiB"),
        (("kimi-k2.6", "--gpu-count", "7"), 61, "64 cannot be divided among 7 cards"),
        (("kimi-k2.6", "--tp", "16"), 2, "only 8 cards"),
        (("kimi-k2.6", "--gpu-count", "0"), 2, "--gpu-count"),
        (("kimi-k2.6", "--gpu-count", "-8"), 2, "--gpu-count"),
        (("kimi-k2.6", "--ctx", "-1"), 2, "--ctx"),
        (("kimi-k2.6", "--ctx", "999999"), 61, "only 262144"),
        (("kimi-k2.6-iq3-k", "--ctx", "999999"), 61, "only 262144"),
        (("kimi-k2.6", "--vram", "96"), 2, "is not a size"),
        (("kimi-k2.6", "--vram", "-96GiB"), 2, "is not a size"),
        (("kimi-k2.6", "--mem-fraction", "1.5"), 2, "--mem-fraction"),
        (("kimi-k2.6", "--mem-fraction", "nan"), 2, "--mem-fraction"),
        (("kimi-k2.6", "--mbps", "0"), 2, "--mbps"),
        (("kimi-k2.6", "--mbps", "inf"), 2, "--mbps"),
        (("kimi-k2.6", "--mbps", "1e-320"), 2, "--mbps"),
        (("kimi-k2.6", "--gpu-util", "0.9"), 2, "--gpu-util is for vllm"),
        (("kimi-k2.6", "--engine", "vllm", "--mem-fraction", "0.9"), 2, "is for sglang"),
        (("kimi-k2.6", "--engine", "ik_llama"), 30, "GGUF files only"),
        (("kimi-k2.6-iq3-k", "--engine", "vllm"), 30, "safetensors only"),
        (("kimi-k2.6", "--dcp", "2"), 2, "--dcp is for vllm"),
        (("kimi-k2.6", "--engine", "vllm", "--dcp", "3"), 2, "must divide the 8 cards"),
        (("kimi-k2.6", "--check-ot", "exps=CPU"), 2, "--check-ot is for ik_llama"),
        (("kimi-k2.6", "--ram", "768GB"), 2, "--ram is for ik_llama; this is sglang"),
        (("kimi-k2.6", "--ubatch", "512"), 2, "--ubatch is for ik_llama"),
        (("kimi-k2.6", "--batch", "2048"), 2, "--batch is for ik_llama"),
        (("kimi-k2.6", "--headroom", "2GiB"), 2, "--headroom is for ik_llama"),
        (("kimi-k2.6", "--mla", "1"), 2, "--mla is for ik_llama"),
        (("kimi-k2.6-iq3-k", "--mla", "4"), 2, "'4' is not one of"),
        (("kimi-k2.6", "--max-seqs", "8"), 2, "--max-seqs is for vllm"),
        (("kimi-k2.6-iq3-k", "--tp", "2"), 2, "--tp is for sglang and vllm; this is ik_llama"),
        (("kimi-k2.6-iq3-k", "--prefill", "8192"), 2, "--prefill is for sglang and vllm"),
        (("kimi-k2.6-iq3-k", "--weights-per-gpu", "1GB"), 2, "--weights-per-gpu is for sglang"),
        (("kimi-k2.6", "--ctx", "128kB"), 2, "is not a number of tokens"),
        (("kimi-k2.6-iq3-k", "--check-ot", "exps=GPU0"), 2, "no device 'GPU0'"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(
    fit: Any, args: tuple[str, ...], code: int, message: str
) -> None:
    ended = fit(*args)
    assert ended.code == code, ended.err
    assert message in ended.err


def test_a_folder_with_two_models_or_none_is_refused(fit: Any, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    ended = fit(folder)
    assert ended.error == "WeightsUnknown"
    assert "holds no config.json and no .gguf file" in ended.err
    for name in ("a.gguf", "b.gguf"):
        (folder / name).write_bytes(gguf(LLAMA, TENSORS, DATA))
    ended = fit(folder)
    assert ended.error == "ModelUnreadable"
    assert "several models (a.gguf, b.gguf)" in ended.err


def test_other_files_and_unreadable_ones_are_refused(fit: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert fit(tmp_path / "model.safetensors").error == "ModelUnreadable"
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    ended = fit(tmp_path / "bad.gguf")
    assert ended.error == "ModelUnreadable"
    assert "sm120 weights verify" in ended.err
    if os.geteuid():
        (tmp_path / "bad.gguf").chmod(0)
        assert fit(tmp_path / "bad.gguf").error == "ModelUnreadable"


def test_a_dense_gguf_lies_on_the_cards_without_rules(fit: Any, tmp_path: Path) -> None:
    (tmp_path / "dense.gguf").write_bytes(gguf(LLAMA, TENSORS, DATA))
    ended = fit(tmp_path / "dense.gguf", "--gpu-count", "1", "--ctx", "4k")
    assert ended.code == 0, ended.err
    assert "A dense model" in ended.out
    assert "-ot" not in ended.out
    small = fit(tmp_path / "dense.gguf", "--gpu-count", "1", "--ctx", "4k", "--vram", "1GB")
    assert small.error == "DoesNotFit"
    assert "CUDA0 is short of" in small.err


def test_the_examples_of_the_help_and_the_readme_fit(sm120: Command, fit: Any) -> None:
    pages = sm120("weights", "--help").out + (ROOT / "README.md").read_text()
    examples = re.findall(r"sm120 weights fit ([\w. -]+?) *(?:$|[`#])", pages, re.MULTILINE)
    assert len(examples) >= 2
    shutil.copytree(ROOT / "recipes", sm120.cwd / "recipes")
    for example in examples:
        assert fit(*example.split()).code == 0, example


def test_a_model_that_a_recipe_serves_is_judged_by_its_settings(fit: Any, tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    for name in ("kimi-k26-vllm-8x", "kimi-k26-sglang-8x", "kimi-k26-vllm-b200"):
        shutil.copy(ROOT / "recipes" / f"{name}.yaml", tmp_path / "recipes")
    ended = fit("kimi-k2.6")
    assert ended.code == 0, ended.err
    assert (
        "With the settings of the recipe kimi-k26-vllm-8x; --engine asks for others." in ended.out
    )
    assert "fits: room for at least 21 requests of 65,536 tokens" in ended.out
    assert fit("kimi-k2.6", "--json").json["recipe"] == "kimi-k26-vllm-8x"


@pytest.mark.parametrize("chosen", [("--engine", "sglang"), ("--gpu-count", "4"), ("--tp", "8")])
def test_who_chooses_settings_or_cards_is_answered_about_those(
    fit: Any, tmp_path: Path, chosen: tuple[str, str]
) -> None:
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes" / "kimi-k26-vllm-8x.yaml", tmp_path / "recipes")
    ended = fit("kimi-k2.6", *chosen)
    assert ended.code != 0
    assert "the settings of the recipe" not in ended.out
    assert "with sglang" in ended.out


def test_the_cards_of_all_nodes_share_the_model(fit: Any) -> None:
    two = fit("kimi-k2.6", "--nodes", "2", "--engine", "vllm", "--json").json
    one = fit("kimi-k2.6", "--gpu-count", "16", "--engine", "vllm", "--json").json
    assert two["rows"] == one["rows"]
    assert (two["nodes"], two["fits"]) == (2, True)
    assert "nodes" not in one


def test_every_node_needs_all_files_and_the_heading_says_so(fit: Any) -> None:
    ended = fit("kimi-k2.6", "--nodes", "2", "--engine", "sglang")
    assert ended.out.startswith("kimi-k2.6 on 2 nodes with 8 cards of 96.00 GiB each with sglang")
    assert "595.15 GB (554.27 GiB) on each node" in ended.out
    assert "Between nodes NCCL has buffers" in ended.out


def test_more_cards_are_named_for_each_node(fit: Any) -> None:
    ended = fit("kimi-k2.6", "--nodes", "2", "--gpu-count", "2", "--engine", "sglang")
    assert ended.error == "DoesNotFit"
    assert "It fits with --gpu-count 8." in ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kimi-k2.6", "--nodes", "2", "--tp", "7"], "2 nodes cannot share it evenly"),
        (["kimi-k2.6", "--nodes", "2", "--tp", "32"], "there are only 16 cards"),
        (["kimi-k2.6", "--nodes", "0"], "0 is not in the range"),
    ],
)
def test_nodes_that_cannot_share_a_model_are_refused(
    fit: Any, words: list[str], message: str
) -> None:
    ended = fit(*words)
    assert ended.code == 2
    assert message in ended.err


def test_gguf_files_are_served_by_one_machine(fit: Any, tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    ended = fit(str(tmp_path / "tiny.gguf"), "--nodes", "2")
    assert ended.code == 2
    assert "--nodes is for sglang and vllm; this is ik_llama." in ended.err
