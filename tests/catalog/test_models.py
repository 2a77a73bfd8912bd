"""The catalog's files are complete, agree with what this bundle writes itself, and complain with a line
number."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from dsv4_deploy import catalog, tiny
from dsv4_deploy.errors import DeployError


def test_the_catalog_names_its_models_and_where_they_are_public() -> None:
    assert list(catalog.models()) == [
        "tiny",
        "deepseek-v4-flash",
        "deepseek-v4-flash-0731",
        "deepseek-v4-flash-dspark",
        "deepseek-v4-flash-base",
        "deepseek-v4-pro",
        "deepseek-v4-pro-0813",
        "deepseek-v4.1-flash",
    ]
    for name, model in catalog.models().items():
        assert model.sources
        if model.repo is not None:
            assert any(source.endswith(model.repo) for source in model.sources), name


def test_tiny_is_what_the_tiny_writer_writes() -> None:
    entry = catalog.models()["tiny"]
    assert catalog.dims_of(tiny.CONFIG) == (entry.dims, "")
    assert catalog.traits_of(tiny.CONFIG) == entry.traits


def test_tiny_weighs_what_it_says(tiny_checkpoint: pathlib.Path) -> None:
    size = sum(shard.stat().st_size for shard in tiny_checkpoint.glob("*.safetensors"))
    assert size == pytest.approx(catalog.models()["tiny"].weight_bytes, rel=0.25)


def test_flash_is_the_default_of_transformers() -> None:
    from transformers import DeepseekV4Config

    published = DeepseekV4Config()
    dims = catalog.models()["deepseek-v4-flash"].dims
    # transformers keeps the two lists under names of its own.
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    assert len(published.layer_types) == dims.num_hidden_layers
    assert {kinds[ratio] for ratio in set(dims.compress_ratios)} >= set(published.layer_types)
    assert published.mlp_layer_types.count("hash_moe") == dims.num_hash_layers
    for field in dataclasses.fields(dims):
        if field.name not in ("compress_ratios", "num_hash_layers"):
            assert getattr(published, field.name) == getattr(dims, field.name), field.name


def test_an_unknown_model_gets_the_nearest_names() -> None:
    with pytest.raises(DeployError) as raised:
        catalog.find_model("deepseek-v4-flsh")
    assert raised.value.exit_code == 2
    assert "deepseek-v4-flash" in raised.value.fix
    with pytest.raises(DeployError) as raised:
        catalog.find_model("zzz")
    assert "tiny" in raised.value.why


def test_the_layers_of_flash_and_pro_are_those_of_the_published_layout() -> None:
    # compress_ratios in config.json of https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash and -Pro
    flash, pro = (catalog.models()[name].dims for name in ("deepseek-v4-flash", "deepseek-v4-pro"))
    assert (flash.layers(0), flash.layers(4), flash.layers(128)) == (2, 21, 20)
    assert (pro.layers(0), pro.layers(4), pro.layers(128)) == (0, 30, 31)
    assert flash.compress_ratios[:6] == (0, 0, 4, 128, 4, 128)
    assert pro.compress_ratios[:4] == (128, 128, 4, 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "256"}, "hidden_size"),
        ({"o_groups": 0}, "o_groups"),
        ({"num_hash_layers": -1}, "num_hash_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"compress_ratios": [0, 4]}, "4 layers need one each"),
        ({"compress_ratios": "0,4"}, "compress_ratios"),
        ({"compress_ratios": [0, 4, -1, 4]}, "compress_ratios"),
    ],
)
def test_a_config_that_cannot_be_used(change: dict[str, object], words: str) -> None:
    dims, problem = catalog.dims_of({**tiny.CONFIG, **change})
    assert dims is None
    assert words in problem


def test_draft_entries_after_the_backbone_are_left_out() -> None:
    dims, _ = catalog.dims_of({**tiny.CONFIG, "compress_ratios": [0, 4, 128, 4, 0, 0, 0]})
    assert dims == catalog.models()["tiny"].dims


@pytest.mark.parametrize(
    ("config", "draft"),
    [
        ({}, catalog.Draft()),
        ({"num_nextn_predict_layers": 0}, catalog.Draft()),
        ({"num_nextn_predict_layers": 1}, catalog.Draft("mtp", 1, 1)),
        ({"num_nextn_predict_layers": 1, "dspark_block_size": 5}, catalog.Draft("dspark", 3, 5)),
        ({"dspark_target_layer_ids": [40, 41, 42], "n_mtp_layers": 2}, catalog.Draft("dspark", 2, 0)),
    ],
)
def test_the_draft_module_of_a_config(config: dict[str, object], draft: catalog.Draft) -> None:
    assert catalog.traits_of(config).draft == draft


def test_the_variant_follows_from_the_sizes() -> None:
    for name, family in (
        ("deepseek-v4-flash-0731", "flash"),
        ("deepseek-v4-pro-0813", "pro"),
        ("deepseek-v4.1-flash", "v4.1-flash"),
        ("tiny", "tiny"),
    ):
        assert catalog.family_of(catalog.models()[name].dims) == family
    odd = dataclasses.replace(catalog.models()["tiny"].dims, hidden_size=512)
    assert catalog.family_of(odd) == "other"


GOOD = catalog.MODELS_FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("before", "after", "line_of", "reason"),
    [
        ("hidden_size: 256", "hidden_size: many", "hidden_size: many", "'many'"),
        ("hidden_size: 256", "hidden_size: 0", "hidden_size: 0", "positive"),
        ("hidden_size: 256", "hiden_size: 256", "hiden_size: 256", "unknown key 'hiden_size'"),
        ("      head_dim: 512\n", "", "      hidden_size: 256", "'head_dim' is missing"),
        ("default_tp: 1\n", "default_tp: 1\n    default_tp: 2\n", "default_tp: 1", "given twice"),
        (
            "    dims:\n      hidden_size: 256",
            "    dims: [1, 2]\n    x:\n      y: 1",
            "    x:",
            "unknown key 'x'",
        ),
        (
            "default_max_model_len: 4608",
            "default_max_model_len: 9000",
            "default_max_model_len: 9000",
            "longer",
        ),
        ("  deepseek-v4-flash:\n", "  tiny:\n", '  tiny:\n    summary: "Deep', "listed twice"),
        ("family: tiny", "family: big", "family: big", "expected one of flash"),
        ("[0, 4, 128, 4]", "[0, 4]", "compress_ratios: [{pattern: [0, 4]", "2 layers listed"),
        ("draft: {kind: none}", "draft: {kind: none, block: 5}", "draft: {kind: none", "has no 'block'"),
        ("split_gib: 256", "split_gib: -1", "split_gib: -1", "positive number"),
        ("      - dsv4_deploy/tiny.py", "      - everybody knows", "      - everybody", "https://"),
    ],
)
def test_a_wrong_file_is_reported_with_its_line(
    tmp_path: pathlib.Path, before: str, after: str, line_of: str, reason: str
) -> None:
    assert before in GOOD
    text = GOOD.replace(before, after, 1)
    path = tmp_path / "models.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DeployError) as raised:
        catalog.load_models(path)
    assert reason in raised.value.what
    line = text[: text.index(line_of)].count("\n") + 1
    assert raised.value.what.startswith("models.yaml, line ")
    assert abs(int(raised.value.what.split()[2].rstrip(":")) - line) <= 1


def test_a_file_that_is_no_yaml(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models:\n  a: [1, 2\nb: 3\n", encoding="utf-8")
    with pytest.raises(DeployError, match=r"models\.yaml, line 3"):
        catalog.load_models(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(DeployError, match="empty"):
        catalog.load_models(path)
