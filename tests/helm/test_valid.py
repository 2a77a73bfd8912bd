"""Every file in ci/ and profiles/ renders the same with both helms, and everything rendered is valid in every supported
Kubernetes."""

from __future__ import annotations

import pathlib

import pytest

from tests.helm import chart, schemas

FILES = [*chart.ci_files(), *chart.profile_files()]
# Values for which the chart renders other objects in other releases, or refuses the older ones.
NEEDS = {"dra": 32, "image-volume": 33}


def ids(path: pathlib.Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def test_there_are_at_least_twenty_situations() -> None:
    assert len(chart.ci_files()) >= 20
    for path in chart.ci_files():
        assert path.read_text().startswith("# "), f"{path.name} does not say which situation it is"


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_both_helms_agree_and_every_kubernetes_takes_it(path: pathlib.Path) -> None:
    name = path.stem.removesuffix("-values")
    objects = chart.template(path)
    assert objects == chart.template(path, helm=chart.HELMS[0])
    assert len({(item["kind"], item["metadata"]["name"]) for item in objects}) == len(objects)
    for kube in chart.KUBE_VERSIONS:
        if name in NEEDS:
            if int(kube.partition(".")[2]) < NEEDS[name]:
                with pytest.raises(chart.RefusedError, match=rf"needs? Kubernetes 1\.{NEEDS[name]}"):
                    chart.template(path, kube=kube)
                continue
            objects = chart.template(path, kube=kube)
        for item in objects:
            schemas.check(item, kube)


@pytest.mark.parametrize("helm", chart.HELMS)
def test_lint_and_package(helm: str, tmp_path: pathlib.Path) -> None:
    arguments = ["lint", "--strict", str(chart.CHART)]
    assert chart.run(helm, *arguments).returncode == 0
    for path in FILES:
        if path.stem.removesuffix("-values") in NEEDS:
            arguments = [*arguments[:3], "--kube-version", chart.DEFAULT_KUBE]
        done = chart.run(helm, *arguments, "--values", str(path))
        assert done.returncode == 0, done.stdout + done.stderr
    done = chart.run(helm, "package", str(chart.CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert [path.suffix for path in tmp_path.iterdir()] == [".tgz"]


def test_the_stated_range_of_kubernetes_is_kept() -> None:
    with pytest.raises(chart.RefusedError, match=r"chart requires kubeVersion: >=1\.30"):
        chart.template(kube="1.29")
    for kube in (chart.KUBE_VERSIONS[0], chart.KUBE_VERSIONS[-1]):
        assert chart.template(kube=kube)


def test_the_schemas_catch_what_they_should() -> None:
    deployment = chart.one(chart.template(), "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(schemas.InvalidError, match="livenesProbe"):
        schemas.check(deployment, "1.34")
    everything = chart.template(
        *(
            chart.CHART / "ci" / f"{name}-values.yaml"
            for name in ("monitoring", "keda", "gateway", "two-nodes")
        ),
    )
    for kind in (
        "PodMonitor",
        "PrometheusRule",
        "ScaledObject",
        "HTTPRoute",
        "InferencePool",
        "LeaderWorkerSet",
    ):
        item = chart.one(everything, kind)
        schemas.check(item, "1.34")
        with pytest.raises(schemas.InvalidError, match="surprise"):
            schemas.check({**item, "spec": {**item["spec"], "surprise": 1}}, "1.34")
    with pytest.raises(schemas.InvalidError, match="no such kind"):
        schemas.check({"apiVersion": "v1", "kind": "Depployment", "metadata": {"name": "x"}}, "1.34")
