"""What a checkpoint directory holds: which model it is, and every file that is missing or broken.

In: a directory. Out: a Checkpoint. Only config.json, the index and the headers of the shards are read (a few
kilobytes each), so that this takes no time on an 865 GB model. A model is known by its sizes, never by the
name of its directory. Layout of a header: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from typing import Any, Literal

from dsv4_deploy import catalog
from dsv4_deploy.catalog import Dims
from dsv4_deploy.errors import DeployError, refused

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
# Tensors of the layers that propose tokens; published checkpoints put MTP and DSpark under the same prefix.
DRAFT_PREFIX = "mtp."
LFS_POINTER = b"version https://git-lfs"

# A header lists every tensor of the shard; the largest published ones are below 1 MB. Anything above this is
# not a header.
MAX_HEADER_BYTES = 100_000_000

FETCH_AGAIN = "Download or copy that file again (`hf download REPO --local-dir DIR` resumes what is missing)."


Draft = Literal["mtp", "dspark"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: `shards` are the files with tensors, `weight_bytes` their size on disk in
    bytes.

    `catalog_names` are the models of the catalog that have exactly these sizes (several releases share
    them). `expert_dtype` is "fp4" or "fp8" as vLLM reads it: config.json's `expert_dtype`, fp4 when it says
    nothing. `quantization` is the `quant_method` of `quantization_config`. `draft` is the draft module whose
    tensors are there, `draft_promised` the one that config.json describes; `traits` is config.json as the
    catalog reads it, with the draft's size.
    """

    directory: pathlib.Path
    dims: Dims
    shards: tuple[pathlib.Path, ...]
    weight_bytes: int
    model_type: str = MODEL_TYPES[0]
    catalog_names: tuple[str, ...] = ()
    expert_dtype: str = "fp4"
    quantization: str | None = None
    draft: Draft | None = None
    draft_promised: Draft | None = None
    traits: catalog.Traits | None = None


def read(directory: pathlib.Path) -> Checkpoint:
    """Look at a checkpoint and make sure that vLLM can load it.

    Raises DeployError (exit code 2) that names every file that is missing or broken, why it is needed and
    what to do.
    """
    if not is_directory(directory):
        raise refused(
            f"{directory} is not a directory that can be read",
            why="--model takes a name from the catalog or a directory with config.json and the weights.",
            fix="Check the path.",
        )
    problems: list[str] = []
    config = _read_json(directory / "config.json", "it says what the model is", problems)
    _check_tokenizer(directory, problems)
    weight_map = _weight_map(directory, problems)
    shards = _find_shards(directory, weight_map, problems)
    for shard in shards:
        problem = shard_problem(shard)
        if problem:
            problems.append(problem)
    if config is None or problems:
        raise refused(
            f"the checkpoint in {directory} is not complete: {problems[0]}",
            why="; ".join([*problems[1:], "vLLM would fail minutes into loading."]),
            # Rows of docs/rules.md: an index that is not there, shards that are not there or not whole.
            fix=f"{FETCH_AGAIN} [W32 W33]",
        )
    dims = _dims(directory, config)
    traits = _traits(directory, config)
    promised = None if traits.draft.kind == "none" else traits.draft.kind
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    tensors = weight_map if weight_map is not None else _tensor_names(shards[0])
    return Checkpoint(
        directory=directory,
        dims=dims,
        shards=shards,
        weight_bytes=sum(shard.stat().st_size for shard in shards),
        model_type=config["model_type"],
        catalog_names=tuple(model.name for model in catalog.models().values() if model.dims == dims),
        expert_dtype=traits.expert_dtype,
        quantization=str(method) if method else None,
        draft=promised if any(name.startswith(DRAFT_PREFIX) for name in tensors) else None,
        draft_promised=promised,
        traits=traits,
    )


def is_directory(path: pathlib.Path) -> bool:
    """Whether there is a directory of that name that this user may see. A name that no file can have (too
    long, a NUL in it) is none."""
    try:
        return path.is_dir()
    except OSError:
        return False


def expanded(name: str) -> pathlib.Path:
    """The path of that name, `~` and `~user` replaced where there is such a home."""
    path = pathlib.Path(name)
    try:
        return path.expanduser()
    except RuntimeError:  # no such user
        return path


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
            if start == LFS_POINTER[:8]:
                return f"{path.name} is a Git LFS pointer, not the file itself (run `git lfs pull`)"
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
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
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


def _weight_map(directory: pathlib.Path, problems: list[str]) -> dict[str, str] | None:
    """Tensor name -> file name, None where there is no index (a single file, or a problem)."""
    path = directory / INDEX
    if not path.exists():
        if not (directory / SINGLE).exists():
            problems.append(f"neither {INDEX} nor {SINGLE} is there (they hold the weights)")
        return None
    index = _read_json(path, "it says which file holds which tensor", problems)
    if index is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{INDEX} has no weight_map")
        return None
    return {str(tensor): str(file) for tensor, file in weight_map.items()}


def _find_shards(
    directory: pathlib.Path, weight_map: dict[str, str] | None, problems: list[str]
) -> tuple[pathlib.Path, ...]:
    if weight_map is None:
        single = directory / SINGLE
        return (single,) if single.exists() and not (directory / INDEX).exists() else ()
    shards = []
    for name in sorted(set(weight_map.values())):
        # A name with a path in it would let an index point anywhere on this machine.
        if pathlib.PurePath(name).name != name or not name or len(name.encode(errors="replace")) > 255:
            problems.append(f"{INDEX} names {name[:80]!r}, which is not a plain file name")
        elif not (directory / name).is_file():
            problems.append(f"{name} is missing ({INDEX} names it)")
        else:
            shards.append(directory / name)
    return tuple(shards)


def _tensor_names(shard: pathlib.Path) -> list[str]:
    """The tensors of a file that `shard_problem` has found whole."""
    with shard.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        return list(json.loads(file.read(header_bytes)))


def _read_json(path: pathlib.Path, need: str, problems: list[str]) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing ({need})")
        return None
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
        return None
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is not valid JSON ({error})")
        return None
    if not isinstance(content, dict):
        problems.append(f"{path.name} is not a JSON object")
        return None
    return content


def _dims(directory: pathlib.Path, config: dict[str, Any]) -> Dims:
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise refused(
            f"{directory} is not a DeepSeek-V4: its config.json says model_type {model_type!r}",
            why=f"This bundle serves model_type {' and '.join(MODEL_TYPES)}; its patches and sizes mean "
            "nothing to other models.",
            fix="Serve it with plain `vllm serve`, or give a DeepSeek-V4 checkpoint.",
        )
    dims, problem = catalog.dims_of(config)
    if dims is None:
        raise _unusable(directory, problem)
    return dims


def _traits(directory: pathlib.Path, config: dict[str, Any]) -> catalog.Traits:
    try:
        return catalog.traits_of(config)
    except ValueError as error:
        raise _unusable(directory, str(error)) from error


def _unusable(directory: pathlib.Path, problem: str) -> DeployError:
    return refused(
        f"config.json in {directory} has {problem}",
        why="The plan needs it to know which tensor-parallel sizes and lengths are possible.",
        fix="Use the config.json that was published with the weights.",
    )
