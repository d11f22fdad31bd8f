"""The table of flags in llama.cpp's source."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import ParserUnreadable, SpecInvalid
from pipeline.core.files import sha256_of_file
from pipeline.images.assemble.plan import ImagePlan, TreePlan, plan_image
from pipeline.images.engine import read_flags
from pipeline.images.engine.parser_flags import FlagSpec
from pipeline.images.engine.read_flags import TABLE, read_llama_flags, read_source_flags
from pipeline.images.spec.checkout import Checkout

CHECKOUT = Checkout(Path(__file__).parents[3])
TEXT = """
    add_opt(common_arg(
        {"-t", "--threads"}, "N",
        string_format("number of threads (default: %d)", params.n_threads),
        [](common_params & params, int value) {
            params.n_threads = value;
        }
    ).set_env("LLAMA_ARG_THREADS"));
    add_opt(common_arg(
        // a remark with {"--nothing"}, in it
        {"-kvo", "--kv-offload"},
        {"-nkvo", "--no-kv-offload"},
        "whether to offload the KV cache",
        [](common_params & params, bool value) {
            params.no_kv_offload = !value;
        }
    ).set_env("LLAMA_ARG_KV_OFFLOAD"));
    add_opt(common_arg({ "-fa", "--flash-attn" }, "[on|off|auto]",
                       "set Flash Attention",
                       [](common_params & params, const std::string & value) {
                       }).set_env("LLAMA_ARG_FLASH_ATTN"));
    add_opt(common_arg(
        {"-sm", "--split-mode"}, "{none,layer,row}",
        "how to split the model",
        [](common_params & params, const std::string & value) {}
    ));
    add_opt(common_arg(
        {"--range"}, "START", "END",
        "a range of layers",
        [](common_params & params, const std::string & start, const std::string & end) {}
    ));
    add_opt(common_arg(
        {"--draft", "--draft-max"}, "N",
        "the argument has been removed",
        [](common_params & /*params*/, int /*value*/) {
            arg_removed("use --spec-draft-n-max");
        }
    ).set_spec().set_examples({LLAMA_EXAMPLE_SPECULATIVE, LLAMA_EXAMPLE_SERVER}));
    add_opt(common_arg(
        {"--schema"}, "SCHEMA",
        "JSON schema",
        [](common_params & params, const std::string & value) {
            params.schema = json::parse(value);
        }
    ));
    add_opt(common_arg(
        {"--cpu-moe"},
        "experts in the CPU",
        [](common_params & params) {}
    ).set_examples({LLAMA_EXAMPLE_COMMON}));
    add_opt(common_arg(
        {"--interactive"},
        "of another program",
        [](common_params & params) {}
    ).set_examples({LLAMA_EXAMPLE_CLI}).set_env("LLAMA_ARG_INTERACTIVE"));
"""


def flag(name: str) -> FlagSpec:
    return FlagSpec.model_validate(read_llama_flags(TEXT)["flags"][name])


def test_a_handler_says_what_a_flag_takes() -> None:
    assert flag("--threads") == FlagSpec(takes="one", type="integer", aliases=["-t"])
    assert flag("--range").takes == "many"
    assert flag("--cpu-moe") == FlagSpec(takes="none")
    assert flag("--schema").type == "json"


def test_names_with_the_opposite_meaning_are_told_apart() -> None:
    off = ["--no-kv-offload", "-nkvo"]
    assert flag("--kv-offload") == FlagSpec(takes="none", aliases=["-kvo"], off=off)


def test_listed_values_count_unless_the_engine_takes_more_than_it_lists() -> None:
    assert flag("--split-mode").choices == ["none", "layer", "row"]
    assert flag("--flash-attn").choices is None


def test_a_removed_flag_says_what_took_its_place() -> None:
    assert flag("--draft").retired == "use --spec-draft-n-max"


def test_flags_of_other_programs_are_left_out_and_variables_are_kept() -> None:
    found = read_llama_flags(TEXT)
    assert "--interactive" not in found["flags"]
    assert "--nothing" not in str(found)
    assert "LLAMA_ARG_THREADS" in found["variables"]


def lock_to(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks llama-cpp to another archive."""
    digest = sha256_of_file(archive).removeprefix("sha256:")

    def tree_of(plan: ImagePlan) -> TreePlan:
        (tree,) = plan.trees
        pin = tree.lock.archive.model_copy(update={"sha256": digest})
        return replace(tree, lock=tree.lock.model_copy(update={"archive": pin}))

    monkeypatch.setattr(read_flags, "_engine_tree", tree_of)


def archive_with(path: Path, text: str) -> Path:
    (tree,) = plan_image(CHECKOUT, "llama-cpp", "linux/amd64").trees
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo(f"{tree.source.archive.below}/{TABLE}")
        member.size = len(text)
        archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_the_locked_archive_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = archive_with(tmp_path / "a.tar.gz", TEXT)
    lock_to(archive, monkeypatch)
    found = read_source_flags(CHECKOUT, "llama-cpp", archive)
    assert found.version == "0c1e5709"
    assert "--threads" in found.flags


def test_another_archive_is_refused(tmp_path: Path) -> None:
    archive = archive_with(tmp_path / "a.tar.gz", TEXT)
    with pytest.raises(SpecInvalid, match="is not the archive that llama-cpp is locked to"):
        read_source_flags(CHECKOUT, "llama-cpp", archive)


def test_a_source_without_the_table_is_no_parser_without_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = archive_with(tmp_path / "a.tar.gz", "int main() {}\n")
    lock_to(archive, monkeypatch)
    with pytest.raises(ParserUnreadable, match="holds no table of flags"):
        read_source_flags(CHECKOUT, "llama-cpp", archive)
