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
        "deepseek-v4-pro",
        "deepseek-v4-pro-0813",
    ]
    for name, model in catalog.models().items():
        assert model.sources
        if model.repo is not None:
            assert any(source.endswith(model.repo) for source in model.sources), name


def test_tiny_is_what_the_tiny_writer_writes() -> None:
    entry = catalog.models()["tiny"]
    written = {field.name: tiny.CONFIG[field.name] for field in dataclasses.fields(catalog.Dims)}
    assert dataclasses.asdict(entry.dims) == written


def test_tiny_weighs_what_it_says(tiny_checkpoint: pathlib.Path) -> None:
    size = sum(shard.stat().st_size for shard in tiny_checkpoint.glob("*.safetensors"))
    assert size == pytest.approx(catalog.models()["tiny"].weight_bytes, rel=0.25)


def test_flash_is_the_default_of_transformers() -> None:
    from transformers import DeepseekV4Config

    published = DeepseekV4Config()
    for field, value in dataclasses.asdict(catalog.models()["deepseek-v4-flash"].dims).items():
        assert getattr(published, field) == value, field


def test_an_unknown_model_gets_the_nearest_names() -> None:
    with pytest.raises(DeployError) as raised:
        catalog.find_model("deepseek-v4-flsh")
    assert raised.value.exit_code == 2
    assert "deepseek-v4-flash" in raised.value.fix
    with pytest.raises(DeployError) as raised:
        catalog.find_model("zzz")
    assert "tiny" in raised.value.why


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
