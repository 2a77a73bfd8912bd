"""What a checkpoint directory holds: the model's sizes, and every file that is missing or broken.

In: a directory. Out: a Checkpoint. Only config.json, the index and the headers of the shards are read (a few
kilobytes each), so that this takes no time on an 865 GB model. Layout of a header: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from typing import Any

from dsv4_deploy.catalog import Dims
from dsv4_deploy.errors import refused

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODEL_TYPE = "deepseek_v4"

# A header lists every tensor of the shard; the largest published ones are below 1 MB. Anything above this is
# not a header.
MAX_HEADER_BYTES = 100_000_000

FETCH_AGAIN = "Download or copy that file again (`hf download REPO --local-dir DIR` resumes what is missing)."


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `shards` are the files with tensors, `weight_bytes` their size on disk in
    bytes."""

    directory: pathlib.Path
    dims: Dims
    shards: tuple[pathlib.Path, ...]
    weight_bytes: int


def read(directory: pathlib.Path) -> Checkpoint:
    """Look at a checkpoint and make sure that vLLM can load it.

    Raises DeployError (exit code 2) that names every file that is missing or broken, why it is needed and
    what to do.
    """
    if not directory.is_dir():
        raise refused(
            f"{directory} is not a directory",
            why="--model takes a name from the catalog or a directory with config.json and the weights.",
            fix="Check the path.",
        )
    problems: list[str] = []
    config = _read_json(directory / "config.json", "it says what the model is", problems)
    _check_tokenizer(directory, problems)
    shards = _find_shards(directory, problems)
    for shard in shards:
        problem = shard_problem(shard)
        if problem:
            problems.append(problem)
    if config is None or problems:
        raise refused(
            f"the checkpoint in {directory} is not complete: {problems[0]}",
            why="; ".join([*problems[1:], "vLLM would fail minutes into loading."]),
            fix=FETCH_AGAIN,
        )
    dims = _dims(directory, config)
    return Checkpoint(directory, dims, shards, sum(shard.stat().st_size for shard in shards))


def shard_problem(path: pathlib.Path) -> str | None:
    """What is wrong with one safetensors file, or None: compares its size with what its own header
    promises."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                return f"{path.name} is cut off ({size} bytes, not even a header)"
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > MAX_HEADER_BYTES:
                return f"{path.name} is not a safetensors file"
            header_text = file.read(header_bytes)
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    if len(header_text) < header_bytes:
        return f"{path.name} is cut off ({size} bytes, its header alone has {8 + header_bytes})"
    try:
        header = json.loads(header_text)
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + header_bytes + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return f"{path.name} is not a safetensors file (its header cannot be read)"
    if size != expected:
        state = "is cut off" if size < expected else "has extra bytes"
        return f"{path.name} {state} ({size} bytes on disk, {expected} by its header)"
    return None


def _check_tokenizer(directory: pathlib.Path, problems: list[str]) -> None:
    for name, need in (
        ("tokenizer.json", "it turns text into tokens"),
        ("tokenizer_config.json", "it names the special tokens"),
    ):
        _read_json(directory / name, need, problems)


def _find_shards(directory: pathlib.Path, problems: list[str]) -> tuple[pathlib.Path, ...]:
    index_path = directory / INDEX
    single = directory / SINGLE
    if not index_path.exists():
        if single.exists():
            return (single,)
        problems.append(f"neither {INDEX} nor {SINGLE} is there (they hold the weights)")
        return ()
    index = _read_json(index_path, "it says which file holds which tensor", problems)
    if index is None:
        return ()
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{INDEX} has no weight_map")
        return ()
    shards = []
    for name in sorted({str(file) for file in weight_map.values()}):
        # A name with a path in it would let an index point anywhere on this machine.
        if pathlib.PurePath(name).name != name:
            problems.append(f"{INDEX} names {name!r}, which is not a plain file name")
        elif not (directory / name).is_file():
            problems.append(f"{name} is missing ({INDEX} names it)")
        else:
            shards.append(directory / name)
    return tuple(shards)


def _read_json(path: pathlib.Path, need: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing ({need})")
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
        return None
    except ValueError as error:
        problems.append(f"{path.name} is not valid JSON ({error})")
        return None
    if not isinstance(content, dict):
        problems.append(f"{path.name} is not a JSON object")
        return None
    return content


def _dims(directory: pathlib.Path, config: dict[str, Any]) -> Dims:
    model_type = config.get("model_type")
    if model_type != MODEL_TYPE:
        raise refused(
            f"{directory} is not a DeepSeek-V4: its config.json says model_type {model_type!r}",
            why=f"This bundle serves model_type {MODEL_TYPE!r} only; its patches and sizes mean nothing to "
            "other models.",
            fix="Serve it with plain `vllm serve`, or give a DeepSeek-V4 checkpoint.",
        )
    sizes: dict[str, int] = {}
    for field in dataclasses.fields(Dims):
        value = config.get(field.name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise refused(
                f"config.json in {directory} has no usable {field.name} (found {value!r})",
                why="The plan needs it to know which tensor-parallel sizes and lengths are possible.",
                fix="Use the config.json that was published with the weights.",
            )
        sizes[field.name] = value
    return Dims(**sizes)
