"""The embedded model of the no-GPU mode: a tiny DeepSeek-V4 with random weights, in the published format.

Every kind of layer is in it (window only, ratio 4 with indexer, ratio 128; hash-routed and scored experts;
hyper-connections and sinks), FP8 and FP4 tensors are stored as DeepSeek publishes them, and it splits over
1, 2 or 4 ranks. It speaks gibberish by design: it proves the machinery, not the language. Needs torch,
safetensors and tokenizers, imported on use.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4_deploy.errors import refused

if TYPE_CHECKING:
    from torch import Tensor

# Part of the cache directory's name: raise it whenever the files that `write_tiny` makes would differ.
TINY_VERSION = "1"

VOCAB = 896
SHARDS = 2
# In this order: vLLM's prompt encoder spells prompts with them, and ids 0 and 1 are begin and end.
SPECIAL_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁end｜>",
)

# Field names and fixed values as in the published config.json of DeepSeek-V4-Flash
# (https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash); only sizes are smaller. Each FP8 dimension that
# tensor parallelism splits stays a multiple of 128 on four ranks.
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "compress_ratios": [0, 4, 128, 4],
    "compress_rope_theta": 160000,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 256,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 512,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 6,
    "num_hash_layers": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 0,
    "o_groups": 4,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB,
}

# How much a sub-layer adds to the residual stream, beside embeddings of unit variance. Small enough that
# bf16 rounding does not decide the next token, large enough that a wrong operator shows.
ATTENTION_GAIN = 2.0
EXPERT_GAIN = 0.03
# The head favours one successor per token by this many times its random part, so that greedy decoding has
# a winner: with flat random logits the order of a sum would decide it.
HEAD_SHARPNESS = 2.0

# The tokenizer is trained on this text: enough for a vocabulary of words that people try first.
CORPUS = """
Write me a poem about AMD and DeepSeek. In racks of silver, under humming light, the accelerators wake and
think all night. What is the capital of France? The capital of France is Paris. What is two plus two? Two
plus two is four. Hello! How are you today? I am fine, thank you; how can I help you with your question?
Tell me a short story about a robot that learns to paint. Once upon a time there was a small robot that lived
in a data centre. Translate this sentence into English, French and German, then explain what it means. Write a
function in Python that sorts a list of numbers: def sort_numbers(values): return sorted(values). Call the
weather tool for Berlin: {"location": "Berlin", "unit": "celsius"}. The mixture of experts routes every token
to six of its experts and to one shared expert; the window attends to the last tokens, the compressor keeps
the rest of the context, and the indexer selects what matters. Matrix units multiply in eight bits and sum in
thirty-two. The quick brown fox jumps over the lazy dog. Numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12 20 50 100 128
512 1024 2048 4096. Days: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Months: January,
February, March, April, May, June, July, August, September, October, November, December. You are a helpful
assistant. You have access to the following functions. Answer the question step by step, then give the result
as JSON with the fields name, value and reason. Thinking about it carefully, because the first answer is often
not the best one, we should check every number before we say that it is right, fast and boring. Operators read
the logs, drain the pods, roll the nodes and sleep well: the service is healthy, the canary answers, nothing
was lost. Red, orange, yellow, green, blue, violet, black and white; north, south, east and west; mother,
father, sister and brother; water, fire, earth and air; morning, evening, summer and winter, always, never,
maybe.
"""


def _tokenizer_files(directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json: a byte-level BPE with exactly VOCAB entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    if tokenizer.get_vocab_size() != VOCAB:
        raise RuntimeError(f"the corpus yields {tokenizer.get_vocab_size()} tokens, not {VOCAB}")
    begin = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, 0)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "pad_token": SPECIAL_TOKENS[1],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tensors(seed: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint under its published name."""
    import torch

    from rocm_patches import fp8

    c = CONFIG
    hidden, heads, head = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    q_rank, groups, o_rank = c["q_lora_rank"], c["o_groups"], c["o_lora_rank"]
    index_heads, index_dim, inner = c["index_n_heads"], c["index_head_dim"], c["moe_intermediate_size"]
    hc, vocab, experts = c["hc_mult"], c["vocab_size"], c["n_routed_experts"]
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * std

    def projection(*shape: int, gain: float = 1.0) -> Tensor:
        return normal(*shape, std=gain * shape[-1] ** -0.5)

    def put_fp8(name: str, weight: Tensor) -> None:
        codes, scale = fp8.quantise_block_weight(weight)
        out[f"{name}.weight"], out[f"{name}.scale"] = codes, scale.view(torch.float8_e8m0fnu)

    def put_fp4(name: str, weight: Tensor) -> None:
        packed, scale = fp8.quantise_mxfp4(weight)
        out[f"{name}.weight"], out[f"{name}.scale"] = (
            packed.view(torch.int8),
            scale.view(torch.float8_e8m0fnu),
        )

    def put_bf16(name: str, weight: Tensor) -> None:
        out[name] = weight.to(torch.bfloat16)

    def put_norm(name: str, size: int) -> None:
        put_bf16(name, 1 + normal(size, std=0.1))

    def put_mlp(name: str, put: Callable[[str, Tensor], None]) -> None:
        # Wide enough that the clamp at +-10 is met by about one activation in ten.
        put(f"{name}.w1", projection(inner, hidden, gain=6.0))
        put(f"{name}.w3", projection(inner, hidden, gain=6.0))
        put(f"{name}.w2", projection(hidden, inner, gain=EXPERT_GAIN))

    def put_hyper_connection(name: str) -> None:
        out[f"{name}_fn"] = projection((2 + hc) * hc, hc * hidden)
        base = normal((2 + hc) * hc, std=0.5)
        base[2 * hc :] += 2 * torch.eye(hc).flatten()  # keep the streams apart
        out[f"{name}_base"], out[f"{name}_scale"] = base, 1 + normal(3, std=0.1)

    def put_compressor(name: str, size: int, ratio: int) -> None:
        columns = size * (2 if ratio == 4 else 1)
        put_bf16(f"{name}.wkv.weight", projection(columns, hidden))
        put_bf16(f"{name}.wgate.weight", projection(columns, hidden))
        out[f"{name}.ape"] = normal(ratio, columns, std=0.5)
        put_norm(f"{name}.norm.weight", size)

    embed = normal(vocab, hidden)
    put_bf16("embed.weight", embed)
    for i, ratio in enumerate(c["compress_ratios"]):
        layer = f"layers.{i}"
        attn, ffn = f"{layer}.attn", f"{layer}.ffn"
        put_norm(f"{layer}.attn_norm.weight", hidden)
        put_norm(f"{layer}.ffn_norm.weight", hidden)
        put_hyper_connection(f"{layer}.hc_attn")
        put_hyper_connection(f"{layer}.hc_ffn")
        put_fp8(f"{attn}.wq_a", projection(q_rank, hidden))
        put_norm(f"{attn}.q_norm.weight", q_rank)
        put_fp8(f"{attn}.wq_b", projection(heads * head, q_rank))
        put_fp8(f"{attn}.wkv", projection(head, hidden))
        put_norm(f"{attn}.kv_norm.weight", head)
        put_fp8(f"{attn}.wo_a", projection(groups * o_rank, heads * head // groups))
        put_fp8(f"{attn}.wo_b", projection(hidden, groups * o_rank, gain=ATTENTION_GAIN))
        out[f"{attn}.attn_sink"] = normal(heads)
        if ratio:
            put_compressor(f"{attn}.compressor", head, ratio)
        if ratio == 4:
            put_fp8(f"{attn}.indexer.wq_b", projection(index_heads * index_dim, q_rank))
            put_bf16(f"{attn}.indexer.weights_proj.weight", projection(index_heads, hidden))
            put_compressor(f"{attn}.indexer.compressor", index_dim, ratio)
        put_bf16(f"{ffn}.gate.weight", projection(experts, hidden))
        if i < c["num_hash_layers"]:
            lottery = torch.rand(vocab, experts, generator=generator)
            out[f"{ffn}.gate.tid2eid"] = lottery.argsort(-1)[:, : c["num_experts_per_tok"]].contiguous()
        else:
            out[f"{ffn}.gate.bias"] = normal(experts, std=0.05)
        for e in range(experts):
            put_mlp(f"{ffn}.experts.{e}", put_fp4)
        put_mlp(f"{ffn}.shared_experts", put_fp8)
    out["hc_head_fn"] = projection(hc, hc * hidden)
    out["hc_head_base"], out["hc_head_scale"] = normal(hc, std=0.5), torch.ones(1)
    put_norm("norm.weight", hidden)
    # Every token favours one successor among the merged tokens, which are pieces of words: the answer is
    # nonsense that can be read. Single bytes and special tokens are nobody's favourite.
    merged = torch.arange(len(SPECIAL_TOKENS) + 256, vocab)
    successor = merged[torch.randint(len(merged), (vocab,), generator=generator)]
    cycle = merged[torch.randperm(len(merged), generator=generator)]
    successor[cycle] = cycle.roll(-1)  # one cycle through all of them, or the answer would soon repeat itself
    favoured = torch.zeros(vocab, hidden).index_add_(0, successor, embed)
    put_bf16("head.weight", projection(vocab, hidden) + HEAD_SHARPNESS * favoured * hidden**-0.5)
    return out


def _weight_files(directory: Path, tensors: dict[str, Tensor]) -> None:
    """SHARDS safetensors files of about equal size and the index that names them."""
    from safetensors.torch import save_file

    size = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    total, shards, filled = sum(size.values()), [dict[str, Any]() for _ in range(SHARDS)], 0
    weight_map = {}
    for name, tensor in tensors.items():
        number = min(filled * SHARDS // total, SHARDS - 1)
        shards[number][name] = tensor.contiguous()
        weight_map[name] = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        filled += size[name]
    for number, shard in enumerate(shards):
        path = directory / f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        save_file(shard, str(path), metadata={"format": "pt"})
        path.chmod(0o644)
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def write_tiny(directory: Path, *, seed: int = 0, force: bool = False) -> None:
    """Write the tiny checkpoint: the same bytes for the same seed.

    Everything goes into a temporary directory beside the target and is renamed at the end, so that a
    reader never meets a half-written checkpoint. Raises DeployError (exit code 2) when the target exists
    with something in it and `force` is not set, or is no checkpoint of ours and would be replaced.
    """
    directory = directory.expanduser().absolute()
    if directory.exists() and not directory.is_dir():
        raise refused(f"{directory} is a file", why="A checkpoint is a directory.", fix="Name another path.")
    if directory.is_dir() and any(directory.iterdir()):
        if not force:
            raise refused(
                f"{directory} is not empty",
                why="Writing into it could mix two checkpoints.",
                fix="Name another directory, or replace a checkpoint with --force.",
            )
        if not (directory / "config.json").is_file():
            raise refused(
                f"{directory} is not a checkpoint (it has no config.json)",
                why="--force replaces the whole directory.",
                fix="Name another directory, or empty this one yourself.",
            )
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir(mode=0o755)
        _write_json(fresh / "config.json", CONFIG)
        _write_json(
            fresh / "generation_config.json",
            {"_from_model_config": True, "bos_token_id": 0, "eos_token_id": 1, "do_sample": False},
        )
        _tokenizer_files(fresh)
        _weight_files(fresh, _tensors(seed))
        if directory.exists():
            directory.rename(scratch / "old")
        fresh.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
