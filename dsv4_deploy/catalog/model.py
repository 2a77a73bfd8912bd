"""models.yaml: the checkpoints that have a name here, with the sizes that memory and parallelism follow from.

In: the file, or the content of a config.json. Out: `Model`, `Dims` (sizes) and `Traits` (everything else
that decides something). Both ways lead to the same dataclasses, so that a directory is planned as exactly as
a name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from dsv4_deploy.catalog.document import Node, load
from dsv4_deploy.errors import refused

MODELS_FILE = pathlib.Path(__file__).with_name("models.yaml")

Family = Literal["flash", "pro", "v4.1-flash", "tiny", "other"]
ExpertDtype = Literal["fp4", "fp8"]
DraftKind = Literal["none", "mtp", "dspark"]

# vLLM's DSpark draft has this many layers where config.json does not say:
# https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/models/deepseek_v4/amd/dspark.py
DSPARK_LAYERS = 3

# Of quantization_config.weight_block_size where config.json does not say.
FP8_BLOCK = 128

# No size of a model is near these. Larger ones are slips, and arithmetic with them ends nowhere.
MOST = 2**40
MOST_OF = {"num_hidden_layers": 4096, "num_attention_heads": 65_536, "n_routed_experts": 65_536}
MOST_DRAFT_LAYERS = 64

MODEL_TYPES = ("deepseek_v4", "deepseek_v41")


@dataclasses.dataclass(frozen=True)
class Dims:
    """The sizes of a DeepSeek-V4, under the names that config.json gives them.

    All are positive counts, but `num_hash_layers` may be 0. `compress_ratios` has one entry per backbone
    layer: 0 for a layer with a window only, else how many tokens become one entry of its cache.
    """

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
    vocab_size: int
    sliding_window: int
    hc_mult: int
    index_n_heads: int
    index_head_dim: int
    num_hash_layers: int
    compress_ratios: tuple[int, ...]

    def layers(self, ratio: int) -> int:
        """How many backbone layers compress by `ratio` (0: those without compression)."""
        return self.compress_ratios.count(ratio)


@dataclasses.dataclass(frozen=True)
class Draft:
    """The draft module in the checkpoint: `layers` of it, and the tokens that it proposes at a time
    (`block`)."""

    kind: DraftKind = "none"
    layers: int = 0
    block: int = 0


@dataclasses.dataclass(frozen=True)
class Traits:
    """What a config.json says beside sizes. `q_head_norm` is False for a model whose query heads are not
    normalised (DeepSeek-V4.1); `fp8_block` is how many rows and columns share one FP8 scale."""

    model_type: str
    expert_dtype: ExpertDtype
    draft: Draft
    q_head_norm: bool = True
    fp8_block: int = FP8_BLOCK


@dataclasses.dataclass(frozen=True)
class MeasuredWeights:
    """Weights per rank that were fitted to published loads, for a model whose tensors are not public:
    `split_gib` / TP + `replicated_gib`. `other_gib` is what else was used at start-up in the one published
    run (`other_from` says which)."""

    split_gib: float
    replicated_gib: float
    other_gib: float
    other_from: str
    source: str


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that has a name. `repo` is its Hugging Face id, None when the checkpoint is made on this
    machine.

    `weight_bytes` is the payload of all tensors in bytes; `default_max_model_len` is in tokens.
    """

    name: str
    summary: str
    family: Family
    repo: str | None
    sources: tuple[str, ...]
    default_tp: int
    default_max_model_len: int
    weight_bytes: int
    traits: Traits
    dims: Dims
    measured: MeasuredWeights | None


COUNTS = tuple(
    field.name
    for field in dataclasses.fields(Dims)
    if field.name not in ("num_hash_layers", "compress_ratios")
)


@functools.cache
def models() -> Mapping[str, Model]:
    """Every model of the catalog by name, in the file's order."""
    return load_models(MODELS_FILE)


def find_model(name: str) -> Model:
    """The catalog's model of that name.

    Raises DeployError (exit code 2) that names the nearest known models.
    """
    known = models()
    if name in known:
        return known[name]
    by_repo = next((model for model in known.values() if model.repo == name), None)
    if by_repo:
        return by_repo
    near = difflib.get_close_matches(name.lower(), list(known), n=3, cutoff=0.5) or list(known)
    raise refused(
        f"there is no model called {name!r}",
        why=f"The catalog has: {', '.join(known)}. And there is no directory of that name here.",
        fix=f"Did you mean {' or '.join(near)}? A checkpoint directory works too: --model "
        "/path/to/checkpoint",
    )


def family_of(dims: Dims) -> Family:
    """The variant that has these sizes. Decided by hidden size and number of layers, never by a name."""
    for model in models().values():
        if (model.dims.hidden_size, model.dims.num_hidden_layers) == (
            dims.hidden_size,
            dims.num_hidden_layers,
        ):
            return model.family
    return "other"


def dims_of(config: Mapping[str, Any]) -> tuple[Dims | None, str]:
    """The sizes in the content of a config.json, or None and what is wrong with it."""
    sizes: dict[str, Any] = {}
    for name in (*COUNTS, "num_hash_layers"):
        value = config.get(name)
        least = 0 if name == "num_hash_layers" else 1
        if _number(value, least, MOST_OF.get(name, MOST)) is None:
            return None, f"no usable {name} (found {_short(value)})"
        sizes[name] = value
    ratios = config.get("compress_ratios")
    layers = sizes["num_hidden_layers"]
    if (
        not isinstance(ratios, list)
        or len(ratios) < layers
        or any(_number(ratio, 0, MOST) is None for ratio in ratios)
    ):
        return None, f"no usable compress_ratios (found {_short(ratios)}, {layers} layers need one each)"
    # What follows the backbone's entries belongs to the draft layers.
    return Dims(**sizes, compress_ratios=tuple(ratios[:layers])), ""


def traits_of(config: Mapping[str, Any]) -> Traits:
    """What the content of a config.json says beside sizes. Raises ValueError with what is wrong with it.

    The expert format is the top-level `expert_dtype` (absent: fp4), as vLLM reads it; `quantization_config`
    says fp8 for every variant. Source: vllm/models/deepseek_v4/quant_config.py of 0.32.0.
    """
    experts = config.get("expert_dtype", "fp4")
    if experts not in ("fp4", "fp8"):
        raise ValueError(f"expert_dtype {_short(experts)}, and vLLM knows fp4 and fp8")
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    size = FP8_BLOCK
    if block is not None:
        found = _number(block[0], 1, 4096) if isinstance(block, list) and block else None
        if found is None:
            raise ValueError(f"no usable weight_block_size (found {_short(block)})")
        size = found
    return Traits(
        model_type=str(config.get("model_type")),
        expert_dtype=experts,
        draft=draft_of(config),
        q_head_norm=config.get("q_head_norm", config.get("model_type") != "deepseek_v41") is not False,
        fp8_block=size,
    )


def draft_of(config: Mapping[str, Any]) -> Draft:
    """The draft module that config.json describes. Releases with DSpark still have a count of MTP layers.
    Raises ValueError with what is wrong with it."""

    def sizes(name: str, most: int) -> int:
        value = config.get(name)
        if value is None:
            return 0
        found = _number(value, 0, most)
        if found is None:
            raise ValueError(f"no usable {name} (found {_short(value)})")
        return found

    if any(name.startswith("dspark_") and value is not None for name, value in config.items()):
        layers = sizes("n_mtp_layers", MOST_DRAFT_LAYERS) or DSPARK_LAYERS
        return Draft("dspark", layers, sizes("dspark_block_size", 1024))
    layers = sizes("num_nextn_predict_layers", MOST_DRAFT_LAYERS)
    return Draft("mtp", layers, 1) if layers else Draft()


def _number(value: Any, least: int, most: int) -> int | None:
    """The value if it is a whole number in that range."""
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return value if fits else None


def _short(value: Any) -> str:
    """As much of a wrong value as fits into a sentence."""
    if isinstance(value, int) and abs(value) > MOST:
        return "a far too large number"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def load_models(path: pathlib.Path) -> Mapping[str, Model]:
    """Read and check one models file.

    Raises DeployError that names the file, the line and the reason when the file is not what it should be.
    """
    root = load(path)
    root.only("models")
    loaded: dict[str, Model] = {}
    for name, entry in root.child("models").unique_pairs():
        optional = ("measured",)
        entry.only(
            *(field.name for field in dataclasses.fields(Model) if field.name not in ("name", *optional)),
            optional=optional,
        )
        dims = _dims(entry.child("dims"))
        measured = entry.maybe("measured")
        loaded[name] = Model(
            name=name,
            summary=entry.child("summary").text(),
            family=entry.child("family").one_of("flash", "pro", "v4.1-flash", "tiny"),  # type: ignore[arg-type]
            repo=entry.child("repo").text_or_null(),
            sources=entry.child("sources").links(),
            default_tp=entry.child("default_tp").count(),
            default_max_model_len=entry.child("default_max_model_len").count(),
            weight_bytes=entry.child("weight_bytes").count(),
            traits=_traits(entry.child("traits")),
            dims=dims,
            measured=_measured(measured) if measured else None,
        )
        if loaded[name].default_max_model_len > dims.max_position_embeddings:
            raise entry.child("default_max_model_len").wrong("longer than max_position_embeddings")
    return loaded


def _dims(node: Node) -> Dims:
    node.only(*COUNTS, "num_hash_layers", "compress_ratios")
    ratios = _ratios(node.child("compress_ratios"))
    counts = {name: node.child(name).count() for name in COUNTS}
    if len(ratios) != counts["num_hidden_layers"]:
        raise node.child("compress_ratios").wrong(
            f"{len(ratios)} layers listed, and num_hidden_layers is {counts['num_hidden_layers']}"
        )
    return Dims(**counts, num_hash_layers=node.child("num_hash_layers").number(), compress_ratios=ratios)


def _ratios(node: Node) -> tuple[int, ...]:
    """Runs of layers, written as `[ratio, ...] x times`: each item is a pattern and how often it repeats."""
    ratios: list[int] = []
    for run in node.items():
        run.only("pattern", "times")
        ratios += [ratio.number() for ratio in run.child("pattern").items()] * run.child("times").count()
    return tuple(ratios)


def _traits(node: Node) -> Traits:
    node.only("model_type", "expert_dtype", "draft", optional=("q_head_norm", "fp8_block"))
    draft = node.child("draft")
    draft.only("kind", optional=("layers", "block"))
    kind = draft.child("kind").one_of("none", "mtp", "dspark")
    sizes = {}
    for name in ("layers", "block"):
        value = draft.maybe(name)
        if (value is None) != (kind == "none"):
            raise draft.wrong(f"a draft of kind {kind} has {'no' if kind == 'none' else 'a'} {name!r}")
        sizes[name] = value.count() if value else 0
    norm, block = node.maybe("q_head_norm"), node.maybe("fp8_block")
    return Traits(
        model_type=node.child("model_type").one_of(*MODEL_TYPES),
        expert_dtype=node.child("expert_dtype").one_of("fp4", "fp8"),  # type: ignore[arg-type]
        draft=Draft(kind, **sizes),  # type: ignore[arg-type]
        q_head_norm=norm.flag() if norm else True,
        fp8_block=block.count() if block else FP8_BLOCK,
    )


def _measured(node: Node) -> MeasuredWeights:
    node.only(*(field.name for field in dataclasses.fields(MeasuredWeights)))
    return MeasuredWeights(
        split_gib=node.child("split_gib").gibibytes(),
        replicated_gib=node.child("replicated_gib").gibibytes(),
        other_gib=node.child("other_gib").gibibytes(),
        other_from=node.child("other_from").text(),
        source=node.child("source").link(),
    )
