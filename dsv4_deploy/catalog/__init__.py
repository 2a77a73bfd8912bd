"""Facts as data: the models that have a name here, and vLLM's flags, from the YAML files beside this module.

In: a YAML file. Out: frozen dataclasses. Whatever is wrong in a file is reported with its line and the
reason, never guessed around.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from dsv4_deploy.errors import DeployError, refused

MODELS_FILE = pathlib.Path(__file__).with_name("models.yaml")
VLLM_FLAGS_FILE = pathlib.Path(__file__).with_name("vllm_flags.yaml")


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes of a DeepSeek-V4, under the names that config.json gives them. All are positive counts."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that has a name. `repo` is its Hugging Face id, None when the checkpoint is made on this
    machine.

    `weight_bytes` is the payload of all tensors in bytes; `default_max_model_len` is in tokens.
    """

    name: str
    summary: str
    repo: str | None
    sources: tuple[str, ...]
    default_tp: int
    default_max_model_len: int
    weight_bytes: int
    dims: Dims


@dataclasses.dataclass(frozen=True)
class VllmFlags:
    """What `--set` has to know about vLLM's command line. Names are without leading dashes."""

    switches_with_no_form: frozenset[str]
    switches: frozenset[str]
    aliases: Mapping[str, str]


@functools.cache
def models() -> Mapping[str, Model]:
    """Every model of the catalog by name, in the file's order."""
    return load_models(MODELS_FILE)


@functools.cache
def vllm_flags() -> VllmFlags:
    """vLLM's switches and the other spellings of its flags."""
    root = _load(VLLM_FLAGS_FILE)
    root.only("switches_with_no_form", "switches", "aliases")
    return VllmFlags(
        switches_with_no_form=frozenset(item.text() for item in root.child("switches_with_no_form").items()),
        switches=frozenset(item.text() for item in root.child("switches").items()),
        aliases={name: node.text() for name, node in root.child("aliases").pairs()},
    )


def find_model(name: str) -> Model:
    """The catalog's model of that name.

    Raises DeployError (exit code 2) that names the nearest known models.
    """
    known = models()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5) or list(known)
    raise refused(
        f"there is no model called {name!r}",
        why=f"The catalog has: {', '.join(known)}. And there is no directory of that name here.",
        fix=f"Did you mean {' or '.join(near)}? A checkpoint directory works too: --model "
        "/path/to/checkpoint",
    )


def load_models(path: pathlib.Path) -> Mapping[str, Model]:
    """Read and check one models file.

    Raises DeployError that names the file, the line and the reason when the file is not what it should be.
    """
    root = _load(path)
    root.only("models")
    loaded: dict[str, Model] = {}
    for name, entry in root.child("models").pairs():
        if name in loaded:
            raise entry.wrong(f"model {name!r} is listed twice")
        entry.only(*(f.name for f in dataclasses.fields(Model) if f.name != "name"))
        dims_entry = entry.child("dims")
        sizes = [f.name for f in dataclasses.fields(Dims)]
        dims_entry.only(*sizes)
        dims = Dims(**{size: dims_entry.child(size).count() for size in sizes})
        loaded[name] = Model(
            name=name,
            summary=entry.child("summary").text(),
            repo=entry.child("repo").text_or_null(),
            sources=tuple(source.text() for source in entry.child("sources").items()),
            default_tp=entry.child("default_tp").count(),
            default_max_model_len=entry.child("default_max_model_len").count(),
            weight_bytes=entry.child("weight_bytes").count(),
            dims=dims,
        )
        if loaded[name].default_max_model_len > dims.max_position_embeddings:
            raise entry.child("default_max_model_len").wrong("longer than max_position_embeddings")
    return loaded


class _Node:
    """A YAML node that knows its line, so that every complaint can name it."""

    def __init__(self, node: Any, path: pathlib.Path) -> None:
        self._node = node
        self._path = path

    def wrong(self, reason: str) -> DeployError:
        line = self._node.start_mark.line + 1
        return DeployError(
            f"{self._path.name}, line {line}: {reason}",
            why=f"{self._path} is part of dsv4-deploy and must be complete and consistent.",
            fix="Correct that line, or install dsv4-deploy again.",
        )

    def pairs(self) -> list[tuple[str, _Node]]:
        if self._node.id != "mapping":
            raise self.wrong("expected a mapping (key: value)")
        return [(str(key.value), _Node(value, self._path)) for key, value in self._node.value]

    def items(self) -> list[_Node]:
        if self._node.id != "sequence" or not self._node.value:
            raise self.wrong("expected a list with at least one item")
        return [_Node(value, self._path) for value in self._node.value]

    def only(self, *names: str) -> None:
        """Refuse keys that are missing, unknown or given twice."""
        seen = [name for name, _ in self.pairs()]
        for name, node in self.pairs():
            if name not in names:
                raise node.wrong(f"unknown key {name!r}; known: {', '.join(names)}")
            if seen.count(name) > 1:
                raise node.wrong(f"key {name!r} is given twice")
        for name in names:
            if name not in seen:
                raise self.wrong(f"key {name!r} is missing")

    def child(self, name: str) -> _Node:
        return dict(self.pairs())[name]

    def text(self) -> str:
        if self._node.id != "scalar" or not str(self._node.value).strip():
            raise self.wrong("expected some text")
        return str(self._node.value)

    def text_or_null(self) -> str | None:
        if self._node.id == "scalar" and self._node.tag == "tag:yaml.org,2002:null":
            return None
        return self.text()

    def count(self) -> int:
        value = self.text()
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise self.wrong(f"expected a positive whole number, found {value!r}")
        return int(value)


def _load(path: pathlib.Path) -> _Node:
    import yaml

    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise DeployError(
            f"cannot read {path}", why=str(error), fix="Install dsv4-deploy again; this file is part of it."
        ) from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise DeployError(
            f"{path.name}, line {line}: {error.problem}", why=f"{path} is not valid YAML.", fix="Correct it."
        ) from error
    if node is None:
        raise DeployError(f"{path.name}, line 1: the file is empty", fix="Install dsv4-deploy again.")
    return _Node(node, path)
