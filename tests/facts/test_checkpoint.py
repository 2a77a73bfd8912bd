"""Every way in which a checkpoint directory can be incomplete is named, with the file."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct

import pytest

from dsv4_deploy import catalog
from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import checkpoint
from tests import small_checkpoint
from tests.small_checkpoint import SHARDS


def problem(directory: pathlib.Path) -> str:
    with pytest.raises(DeployError) as raised:
        checkpoint.read(directory)
    assert raised.value.exit_code == 2
    assert raised.value.fix
    return f"{raised.value.what} {raised.value.why}"


def test_a_complete_one(tmp_path: pathlib.Path) -> None:
    found = checkpoint.read(small_checkpoint.write(tmp_path))
    assert [shard.name for shard in found.shards] == list(SHARDS)
    assert found.weight_bytes == sum((tmp_path / name).stat().st_size for name in SHARDS)
    assert found.dims.o_groups == small_checkpoint.CONFIG["o_groups"]


def test_the_one_that_this_bundle_writes(tiny_checkpoint: pathlib.Path) -> None:
    assert len(checkpoint.read(tiny_checkpoint).shards) == 2


def test_a_single_file_without_index(tmp_path: pathlib.Path) -> None:
    small_checkpoint.write(tmp_path)
    (tmp_path / checkpoint.INDEX).unlink()
    assert "neither model.safetensors.index.json nor model.safetensors" in problem(tmp_path)
    (tmp_path / SHARDS[0]).rename(tmp_path / checkpoint.SINGLE)
    assert [shard.name for shard in checkpoint.read(tmp_path).shards] == [checkpoint.SINGLE]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", *SHARDS])
def test_a_missing_file_is_named(tmp_path: pathlib.Path, name: str) -> None:
    small_checkpoint.write(tmp_path)
    (tmp_path / name).unlink()
    assert f"{name} is missing" in problem(tmp_path)


def test_all_problems_are_named_at_once(tmp_path: pathlib.Path) -> None:
    small_checkpoint.write(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / SHARDS[1]).unlink()
    text = problem(tmp_path)
    assert "tokenizer.json is missing" in text
    assert f"{SHARDS[1]} is missing" in text


@pytest.mark.parametrize("keep", [0, 3, 8, 40])
def test_a_shard_that_is_cut_off(tmp_path: pathlib.Path, keep: int) -> None:
    small_checkpoint.write(tmp_path)
    shard = tmp_path / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:keep])
    assert f"{SHARDS[1]} is cut off ({keep} bytes" in problem(tmp_path)


def test_a_shard_without_its_last_byte_or_with_one_more(tmp_path: pathlib.Path) -> None:
    small_checkpoint.write(tmp_path)
    shard = tmp_path / SHARDS[0]
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    text = problem(tmp_path)
    assert f"{len(content) - 1} bytes on disk, {len(content)} by its header" in text
    shard.write_bytes(content + b"x")
    assert "has extra bytes" in problem(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"<html>not found</html>" * 10,
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 13) + b'{"t": {"x":1}',
    ],
)
def test_a_shard_that_is_something_else(tmp_path: pathlib.Path, content: bytes) -> None:
    small_checkpoint.write(tmp_path)
    (tmp_path / SHARDS[0]).write_bytes(content)
    assert f"{SHARDS[0]} is not a safetensors file" in problem(tmp_path)


def test_an_index_that_points_elsewhere(tmp_path: pathlib.Path) -> None:
    small_checkpoint.write(tmp_path)
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": "../secret"}}))
    assert "not a plain file name" in problem(tmp_path)
    (tmp_path / checkpoint.INDEX).write_text("{}")
    (tmp_path / checkpoint.SINGLE).unlink(missing_ok=True)
    assert checkpoint.INDEX in problem(tmp_path)


def test_a_git_lfs_pointer_is_called_so(tmp_path: pathlib.Path) -> None:
    small_checkpoint.write(tmp_path)
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 3457382912\n"
    (tmp_path / SHARDS[0]).write_bytes(pointer)
    assert f"{SHARDS[0]} is a Git LFS pointer" in problem(tmp_path)


def test_the_model_is_known_by_its_sizes_and_not_by_its_name(tmp_path: pathlib.Path) -> None:
    pro = dataclasses.asdict(catalog.models()["deepseek-v4-pro"].dims)
    found = checkpoint.read(small_checkpoint.write(tmp_path / "DeepSeek-V4-Flash", **pro))
    assert "deepseek-v4-pro" in found.catalog_names
    assert not any("flash" in name for name in found.catalog_names)
    own = checkpoint.read(small_checkpoint.write(tmp_path / "deepseek-v4-pro", num_hidden_layers=3))
    assert own.catalog_names == ()


@pytest.mark.parametrize(
    ("config", "promised"),
    [
        ({}, None),
        ({"num_nextn_predict_layers": 0}, None),
        ({"num_nextn_predict_layers": 1}, "mtp"),
        ({"num_nextn_predict_layers": 1, "dspark_block_size": 5}, "dspark"),
    ],
)
@pytest.mark.parametrize("shipped", [True, False])
def test_the_draft_module(
    tmp_path: pathlib.Path, config: dict[str, int], promised: str | None, shipped: bool
) -> None:
    """What config.json describes, and whether its tensors are really there."""
    small_checkpoint.write(tmp_path, **config)
    index = tmp_path / checkpoint.INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    if shipped:
        weight_map["mtp.0.norm.weight"] = SHARDS[1]
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = checkpoint.read(tmp_path)
    assert (found.draft_promised, found.draft) == (promised, promised if shipped else None)


def test_the_draft_module_of_a_single_file(tmp_path: pathlib.Path) -> None:
    small_checkpoint.write(tmp_path, num_nextn_predict_layers=1)
    (tmp_path / checkpoint.INDEX).unlink()
    small_checkpoint.write_shard(tmp_path / checkpoint.SINGLE, {"mtp.0.norm.weight": 64})
    assert checkpoint.read(tmp_path).draft == "mtp"


def test_formats(tmp_path: pathlib.Path) -> None:
    plain = checkpoint.read(small_checkpoint.write(tmp_path / "a"))
    assert (plain.model_type, plain.expert_dtype, plain.quantization) == ("deepseek_v4", "fp4", None)
    other = checkpoint.read(
        small_checkpoint.write(
            tmp_path / "b",
            model_type="deepseek_v41",
            expert_dtype="fp8",
            quantization_config={"quant_method": "fp8"},
        )
    )
    assert (other.model_type, other.expert_dtype, other.quantization) == ("deepseek_v41", "fp8", "fp8")


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_config_that_is_no_json_object(tmp_path: pathlib.Path, text: str) -> None:
    small_checkpoint.write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert "config.json is not" in problem(tmp_path)


def test_another_architecture(tmp_path: pathlib.Path) -> None:
    assert "model_type 'llama'" in problem(small_checkpoint.write(tmp_path, model_type="llama"))


@pytest.mark.parametrize("value", [None, 0, -8, "8", True, 8.0])
def test_a_size_that_is_no_size(tmp_path: pathlib.Path, value: object) -> None:
    assert "no usable o_groups" in problem(small_checkpoint.write(tmp_path, o_groups=value))


def test_no_directory(tmp_path: pathlib.Path) -> None:
    assert "is not a directory" in problem(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_attention_heads": 2**31}, "no usable num_attention_heads"),
        ({"hidden_size": 10**400}, "no usable hidden_size (found a far too large number)"),
        ({"num_nextn_predict_layers": 10**12}, "no usable num_nextn_predict_layers"),
        ({"dspark_block_size": "5"}, "no usable dspark_block_size (found '5')"),
        ({"dspark_block_size": 5, "n_mtp_layers": [3]}, "no usable n_mtp_layers (found [3])"),
        ({"quantization_config": {"weight_block_size": [0, 0]}}, "no usable weight_block_size"),
        ({"expert_dtype": "int4"}, "expert_dtype 'int4', and vLLM knows fp4 and fp8"),
        ({"compress_ratios": [True, 4, 128, 4, 0]}, "no usable compress_ratios"),
    ],
)
def test_a_config_with_a_slip_is_refused_at_once(
    tmp_path: pathlib.Path, config: dict[str, object], words: str
) -> None:
    assert words in problem(small_checkpoint.write(tmp_path, **config))


def test_json_that_is_nested_without_end(tmp_path: pathlib.Path) -> None:
    deep = "[" * 100_000
    small_checkpoint.write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(deep)
    (tmp_path / SHARDS[0]).write_bytes(struct.pack("<Q", len(deep)) + deep.encode())
    text = problem(tmp_path)
    assert "tokenizer_config.json is not valid JSON" in text
    assert f"{SHARDS[0]} is not a safetensors file" in text


@pytest.mark.parametrize("name", ["", ".", "..", "a" * 5000, "\0", "a/b"])
def test_an_index_with_names_that_no_file_has(tmp_path: pathlib.Path, name: str) -> None:
    small_checkpoint.write(tmp_path)
    (tmp_path / checkpoint.INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert checkpoint.INDEX in problem(tmp_path)


@pytest.mark.parametrize("name", ["a" * 5000, "\0", "~nobody-has-this-name/x", "~"])
def test_any_name_may_be_asked_for(name: str) -> None:
    path = checkpoint.expanded(name)
    assert checkpoint.is_directory(path) == (name == "~" and path.is_dir())
