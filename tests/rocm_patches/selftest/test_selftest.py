"""The self-test passes here, finds what is wrong, and says so to programs and people."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from rocm_patches import fp8
from rocm_patches.reference import (
    attention,
    compressor,
    experts,
    indexer,
    linear,
    mhc,
    output,
    prologue,
    rope,
    router,
)
from rocm_patches.registry import Measurement
from rocm_patches.selftest import __main__ as program
from rocm_patches.selftest import exact, references, suites
from tests.rocm_patches import independent

CPU = torch.device("cpu")


def test_everything_is_right_here() -> None:
    rows = list(references.measurements(CPU))
    assert [row for row in rows if not row.ok] == []
    assert {row.dialect for row in rows} == {"ocp", "fnuz", "e2m1", "-"}
    assert len(rows) > 50


def test_the_restatement_agrees_with_another_one() -> None:
    """tests.rocm_patches.independent was written separately, value by value."""
    for dialect in ("ocp", "fnuz"):
        values = exact.e4m3_values(dialect, CPU)
        assert torch.equal(values.nan_to_num(nan=1e9), independent.e4m3_values(dialect).nan_to_num(nan=1e9))
        x = independent.randn(4, 128, seed=1) * 10.0
        codes, (n,) = independent.quantise(x[0], 128, dialect)
        truth = independent.e4m3_values(dialect)[codes.long()] * 2.0**n
        assert torch.equal(exact.quantised(x[:1].double(), 128, dialect)[0].abs(), truth.abs())


def scaled(function: Callable[..., Any], factor: float = 1.01) -> Callable[..., Any]:
    """The function, a little wrong."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        return tuple(part * factor for part in out) if isinstance(out, tuple) else out * factor

    return wrong


SCALE = fp8.scale_exponent

# What is broken -> the group of measurements that has to notice.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], Callable[..., Iterator[Measurement]]]] = {
    "mhc.pre": (mhc, "pre", scaled(mhc.pre), references.hyper_connections),
    "mhc.post": (mhc, "post", scaled(mhc.post), references.hyper_connections),
    "mhc.head": (mhc, "head", scaled(mhc.head), references.hyper_connections),
    "sinkhorn": (mhc, "sinkhorn", lambda c, n, eps: c.softmax(-1), references.hyper_connections),
    "router.scores": (router, "scores", lambda g: g.sigmoid(), references.routing),
    "swiglu": (experts, "swiglu", lambda g, u, limit: torch.nn.functional.silu(g) * u, references.mlp),
    "fp4": (fp8, "dequantise_mxfp4", scaled(fp8.dequantise_mxfp4, 2.0), references.mlp),
    "rotate": (rope, "rotate", lambda x, *_, inverse=False: x.float(), references.rotation),
    "grouped": (output, "grouped_matmul", scaled(output.grouped_matmul), references.rotation),
}
WITH_DIALECT: dict[str, tuple[Any, str, Callable[..., Any], Callable[..., Iterator[Measurement]]]] = {
    "decode": (fp8, "decode_e4m3", scaled(fp8.decode_e4m3, 2.0), references.formats),
    "scale": (
        *(fp8, "scale_exponent", lambda amax, limit: SCALE(amax, limit * (1 - 1e-7))),
        references.formats,
    ),
    "query": (prologue, "rms_norm", scaled(prologue.rms_norm), references.caches),
    "logits": (indexer, "paged_logits", scaled(indexer.paged_logits), references.index),
    "attention": (attention, "attend", scaled(attention.attend), references.attend),
    "linear": (linear, "block_scaled_linear", scaled(linear.block_scaled_linear), references.projections),
    "pool": (compressor, "pool", scaled(compressor.pool, 1.2), references.compress),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_reference_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, attribute, wrong, measure = FAULTS[name]
    monkeypatch.setattr(module, attribute, wrong)
    assert any(not row.ok for row in measure(CPU))


@pytest.mark.parametrize("dialect", [fp8.OCP, fp8.FNUZ], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("name", WITH_DIALECT)
def test_a_wrong_reference_is_found_in_each_dialect(
    name: str, dialect: fp8.Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, attribute, wrong, measure = WITH_DIALECT[name]
    monkeypatch.setattr(module, attribute, wrong)
    if name == "pool":  # the norm behind it takes a factor out again
        monkeypatch.setattr(
            compressor, "pool", lambda state, slots, ratio: wrong(state, slots, ratio).flip(-1)
        )
    assert any(not row.ok for row in measure(CPU, dialect))


# --- the program ------------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One right, one wrong, one that is no number, and a suite that fails."""

    def good(_: torch.device) -> list[Measurement]:
        return [Measurement("right", "ocp", 1e-6, 1e-3), Measurement("wrong", "fnuz", 0.5, 1e-3)]

    def bad(_: torch.device) -> Iterator[Measurement]:
        yield Measurement("no number", "-", math.nan, 1)
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(suites, "SUITES", {"first": good, "second": bad})


def test_table(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["ok", "WRONG", "WRONG", "WRONG"]
    assert "RuntimeError: out of luck" in lines[4]
    assert lines[5].startswith("4 measurements on CPU") and lines[5].endswith("3 WRONG.")


def test_skip_by_name(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    skip = [word for name in ("wrong", "no number", "second") for word in ("--skip", name)]
    assert program.main(["--device", "cpu", *skip]) == 0
    assert capsys.readouterr().out.count("skipped") == 3


def test_json_is_json(few: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--device", "cpu", "--json"]) == 1

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert (found["ok"], len(found["rows"]), found["rows"][2]["error"]) == (False, 4, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--device", "cpu", "--skip", "nothing"], "no operator is called"), (["--device", "x"], "error: ")],
)
def test_wrong_usage(few: None, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert program.main(["--device", "cuda"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_the_command_runs_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dsv4_deploy", "selftest", "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("all right.")
