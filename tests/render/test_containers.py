"""docker, Compose and Quadlet: what their real readers understand is the container that was planned."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, example, given, settings

from dsv4_deploy import cli
from dsv4_deploy.errors import DeployError
from dsv4_deploy.facts import checkpoint
from dsv4_deploy.plan.plan import Facts, Plan, make_plan
from dsv4_deploy.render import compose, docker, quadlet
from dsv4_deploy.render.container import Container, container
from dsv4_deploy.render.source import Source
from dsv4_deploy.spec import Deployment, ServingSpec
from tests import small_checkpoint
from tests.render import golden, readers, sources

FIRST = sources.CASES[:3]


def words(box: Container) -> list[str]:
    return [word for group, _ in box.arguments for word in group]


def options(arguments: list[str], image: str) -> tuple[dict[str, list[str]], list[str]]:
    """`docker run` or `podman run` arguments as option -> values, and the words after the image."""
    place = arguments.index(image)
    found: dict[str, list[str]] = {}
    name = ""
    for word in arguments[:place]:
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            found.setdefault(name, [])
            if equals:
                found[name].append(value)
        elif name:
            found[name].append(word)
    return found, arguments[place + 1 :]


def docker_reads(source: Source) -> tuple[dict[str, list[str]], list[str]]:
    arguments, _ = readers.run_script(docker.render(source), "docker")
    assert arguments[0] == "run"
    return options(arguments[1:], container(source).image)


def quadlet_reads(source: Source) -> tuple[dict[str, list[str]], list[str]]:
    _, arguments = readers.quadlet(quadlet.render(source))
    assert arguments[:2] == ["/usr/bin/podman", "run"]
    return options(arguments[2:], container(source).image)


def compose_reads(source: Source) -> dict[str, Any]:
    server: dict[str, Any] = readers.compose(compose.render(source))["services"]["server"]
    return server


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_docker(case: sources.Named) -> None:
    source = sources.source(case.spec)
    box = container(source)
    given_, command = docker_reads(source)
    assert command == words(box)
    environment = dict(item.split("=", 1) for item in given_["--env"] if "=" in item)
    assert environment == {variable.name: variable.value for variable in box.variables}
    assert [item for item in given_["--env"] if "=" not in item] == ["VLLM_API_KEY", "HF_TOKEN"]
    assert given_["--device"] == ["/dev/kfd", "/dev/dri"]
    assert given_["--group-add"] == ["44", str(sources.RENDER_GID)]
    assert given_["--shm-size"] == [str(32 * 2**30)]
    assert given_["--entrypoint"] == ["dsv4-deploy"]
    assert given_["--publish"] == ["127.0.0.1:8000:8000", "127.0.0.1:8081:8081"]
    assert given_["--stop-timeout"] == [str(box.stop_timeout_s)]
    assert int(given_["--stop-timeout"][0]) > source.plan.shutdown_timeout_s + 90
    assert "--privileged" not in given_ and "--ipc" not in given_ and "--network" not in given_


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_compose(case: sources.Named) -> None:
    source = sources.source(case.spec)
    box = container(source)
    server = compose_reads(source)
    assert server["command"] == words(box)
    assert server["entrypoint"] == ["dsv4-deploy"]
    assert server["environment"] == {
        **{variable.name: variable.value for variable in box.variables}, "VLLM_API_KEY": None, "HF_TOKEN": None
    }  # fmt: skip
    assert server["group_add"] == ["44", str(sources.RENDER_GID)]
    assert server["shm_size"] == str(32 * 2**30)
    assert server["read_only"] is True and server["cap_drop"] == ["ALL"]
    assert server["ulimits"] == {"memlock": -1, "nofile": {"soft": 65536, "hard": 65536}}
    assert server["healthcheck"]["test"][1:4] == ["dsv4-deploy", "probe", "ready"]
    assert [(port["host_ip"], port["published"], port["target"]) for port in server["ports"]] == [
        ("127.0.0.1", "8000", 8000), ("127.0.0.1", "8081", 8081)
    ]  # fmt: skip


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_quadlet(case: sources.Named) -> None:
    source = sources.source(case.spec)
    box = container(source)
    given_, command = quadlet_reads(source)
    assert command == words(box)
    environment = dict(item.split("=", 1) for item in given_["--env"] if "=" in item)
    assert environment == {variable.name: variable.value for variable in box.variables}
    assert given_["--device"] == ["/dev/kfd", "/dev/dri"]
    assert given_["--group-add"] == ["44", str(sources.RENDER_GID)]
    assert given_["--entrypoint"] == ["dsv4-deploy"]
    assert given_["--name"] == ["dsv4"]
    assert given_["--health-cmd"] == ["dsv4-deploy probe ready --health-port 8081"]
    assert "--read-only" in given_ and given_["--cap-drop"] == ["all"]


@pytest.mark.parametrize("case", sources.CASES, ids=lambda case: case.name)
def test_golden_files_are_read_without_a_complaint(case: sources.Named) -> None:
    folder = golden.FOLDER / case.name
    assert "server" in readers.compose((folder / "compose.yaml").read_text())["services"]
    service, arguments = readers.quadlet((folder / "dsv4.container").read_text())
    assert arguments[0] == "/usr/bin/podman" and "WantedBy=multi-user.target" in service


@settings(max_examples=60, deadline=None)
@given(text=sources.HOSTILE)
def test_docker_no_value_breaks_out(text: str) -> None:
    source = sources.hostile(text)
    given_, command = docker_reads(source)
    assert command == words(container(source))
    assert f"DSV4_PROBE={text}" in given_["--env"]


@settings(max_examples=25, deadline=None)
@given(text=sources.HOSTILE)
@example("${HOME} $$ %h \\n\n\u2028\x7f '\"")
def test_compose_no_value_breaks_out(text: str) -> None:
    source = sources.hostile(text)
    server = compose_reads(source)
    assert server["command"] == words(container(source))
    assert server["environment"]["DSV4_PROBE"] == text


@settings(max_examples=25, deadline=None)
@given(text=sources.HOSTILE)
@example("${HOME} $$ %h \\n\n\u2028\x7f '\"")
def test_quadlet_no_value_breaks_out(text: str) -> None:
    assume(not re.search("[\x80-\x9f\xad]", text))
    source = sources.hostile(text)
    given_, command = quadlet_reads(source)
    assert command == words(container(source))
    assert f"DSV4_PROBE={text}" in given_["--env"]


@pytest.mark.parametrize("letter", ["\x80", "\x9f", "\xad"])
def test_quadlet_refuses_what_podman_would_change(letter: str) -> None:
    with pytest.raises(DeployError, match=f"U\\+00{ord(letter):02X}"):
        quadlet.render(sources.hostile(f"a{letter}"))


def test_quadlet_carries_what_follows_them() -> None:
    source = sources.hostile("\x7f\xa0\xac\xae\xff\u200b\ue000")
    assert quadlet_reads(source)[1] == words(container(source))


def planned_again(source: Source, facts: Facts) -> Plan:
    """The plan that `dsv4-deploy serve` makes from the container's words and variables, by the real command
    line: parsed by click, with the work of the command replaced by remembering the spec."""
    box = container(source)
    seen: list[ServingSpec] = []

    @cli.cli.command("serve-spec")
    @cli._deployment
    def remember(spec: ServingSpec, **_: Any) -> None:
        seen.append(spec)

    arguments = words(box)
    assert arguments[0] == "serve"
    try:
        result = CliRunner().invoke(cli.cli, ["serve-spec", *arguments[1:]], catch_exceptions=False)
    finally:
        del cli.cli.commands["serve-spec"]
    assert result.exit_code == 0, result.output
    environ = {variable.name: variable.value for variable in box.variables}
    return make_plan(seen[0], dataclasses.replace(facts, environ=environ))


@pytest.mark.parametrize("case", sources.CASES, ids=lambda case: case.name)
def test_what_was_planned_is_what_runs_in_the_container(case: sources.Named) -> None:
    source = sources.source(case.spec)
    there = dataclasses.replace(sources.ELSEWHERE, gpus=("gfx942",) * 8, vllm_version=source.plan.vllm)
    again = planned_again(source, there)
    assert again.model == source.plan.model

    def flags(plan: Plan) -> dict[str, Any]:
        return {flag.name: flag.value for flag in plan.flags if flag.name != "host"}

    assert flags(again) == flags(source.plan)
    assert source.plan.environment.items() <= again.environment.items()
    assert not again.from_environment


def test_the_no_gpu_mode() -> None:
    source = sources.no_gpu(port=9000)
    given_, command = docker_reads(source)
    assert "--device" not in given_ and "--group-add" not in given_
    assert command[:5] == ["serve", "--device", "cpu", "--model", "tiny"]
    assert given_["--publish"] == ["127.0.0.1:9000:9000", "127.0.0.1:9081:9081"]
    server = compose_reads(source)
    assert "devices" not in server and server["environment"]["DSV4_CACHE_DIR"] == "/var/cache/dsv4/dsv4"
    assert "--device" not in quadlet_reads(source)[0]
    again = planned_again(source, dataclasses.replace(sources.ELSEWHERE, gpus=(), vllm_version="0.32.0"))
    assert again.flags[1:] != () and again.tp == source.plan.tp


@pytest.fixture
def local(tmp_path: pathlib.Path) -> Source:
    from dsv4_deploy import catalog

    sizes = dataclasses.asdict(catalog.models()["deepseek-v4-flash"].dims)
    directory = small_checkpoint.write(tmp_path / "My V4 (50%) $x", **sizes)
    return sources.with_checkpoint(directory, checkpoint.read(directory))


def test_a_checkpoint_directory_is_mounted_read_only(local: Source) -> None:
    directory = pathlib.Path(local.plan.model)
    inside = f"/models/{directory.name}"
    given_, command = docker_reads(local)
    assert given_["--mount"] == [f"type=bind,source={directory},target={inside},readonly"]
    assert command[command.index("--model") + 1] == inside
    server = compose_reads(local)
    (mount,) = [volume for volume in server["volumes"] if volume["type"] == "bind"]
    assert (mount["source"], mount["target"], mount["read_only"]) == (str(directory), inside, True)
    podman, command = quadlet_reads(local)
    assert podman["--mount"] == [f"type=bind,source={directory},destination={inside},ro=true"]
    assert command[command.index("--model") + 1] == inside


def refusal(render: Any, source: Source) -> str:
    with pytest.raises(DeployError) as raised:
        render(source)
    assert raised.value.exit_code == 2
    assert raised.value.why and raised.value.fix
    return f"{raised.value.what} {raised.value.fix}"


@pytest.mark.parametrize("name", ["a,b", "a:b", 'a"b', "a\nb"])
def test_a_directory_that_no_mount_can_name(tmp_path: pathlib.Path, local: Source, name: str) -> None:
    source = dataclasses.replace(local, plan=dataclasses.replace(local.plan, model=str(tmp_path / name)))
    for render in (docker.render, compose.render, quadlet.render):
        assert "cannot be mounted" in refusal(render, source)


@pytest.mark.parametrize("image", ["x y", "X/y", "a:b c", "img@sha256:12", "--privileged", "a;b", "", "a\nb"])
def test_an_image_that_is_none(image: str) -> None:
    made = sources.source()
    source = dataclasses.replace(made, spec=dataclasses.replace(made.spec, image=image or "-"))
    assert "not the name of an image" in refusal(docker.render, source)


def test_the_image_that_is_asked_for() -> None:
    image = f"registry.example:5000/team/dsv4-deploy:v0.33.0@sha256:{'ab' * 32}"
    assert compose_reads(sources.source(image=image))["image"] == image


@pytest.mark.parametrize("name", ["-x", "a b", "A", "$(id)", "a/b", "x" * 60])
def test_a_name_that_is_none(name: str) -> None:
    made = sources.source()
    plan = dataclasses.replace(made.plan, deployment=dataclasses.replace(made.plan.deployment, name=name))
    assert "cannot name a container" in refusal(docker.render, dataclasses.replace(made, plan=plan))


def test_the_name_is_everywhere() -> None:
    source = sources.source(deployment=Deployment(name="flash-1"))
    assert docker_reads(source)[0]["--name"] == ["flash-1"]
    assert readers.compose(compose.render(source))["name"] == "flash-1"
    assert quadlet_reads(source)[0]["--name"] == ["flash-1"]
    assert "flash-1-cache-0.33.0:/var/cache/dsv4" in docker_reads(source)[0]["--volume"]


@pytest.mark.parametrize(
    ("host", "published"),
    [("0.0.0.0", "0.0.0.0:8000:8000"), ("localhost", "127.0.0.1:8000:8000"), ("::1", "[::1]:8000:8000")],  # noqa: S104
)
def test_who_may_send_requests(host: str, published: str) -> None:
    source = sources.source(host=host)
    assert docker_reads(source)[0]["--publish"][0] == published
    port = compose_reads(source)["ports"][0]
    assert port["host_ip"] == published.rsplit(":", 2)[0].strip("[]")
    assert quadlet_reads(source)[0]["--publish"][0] == published


def test_a_host_name_cannot_be_published() -> None:
    assert "--host gpu-1.example is a name" in refusal(docker.render, sources.source(host="gpu-1.example"))


def test_where_the_render_group_is_not_known() -> None:
    unknown = dataclasses.replace(sources.source(), render_gid=None)
    script = docker.render(unknown)
    readers.shellcheck(script)
    assert 'render_gid=$(stat -c %g "$1")' in script and '--group-add "$render_gid"' in script
    assert compose_needs_it(compose.render(unknown))
    project = readers.compose(compose.render(unknown), RENDER_GID="992")
    assert project["services"]["server"]["group_add"] == ["44", "992"]
    assert "stat -c %g /dev/dri/renderD128" in refusal(quadlet.render, unknown)


def compose_needs_it(text: str) -> bool:
    with pytest.raises(AssertionError, match="RENDER_GID"):
        readers.compose(text)
    return True


def test_secrets_are_named_and_not_written() -> None:
    environ = {"VLLM_API_KEY": "sk-secret", "HF_TOKEN": "hf_secret"}
    source = sources.source(facts=dataclasses.replace(sources.ELSEWHERE, environ=environ))
    for render in (docker.render, compose.render, quadlet.render):
        text = render(source)
        assert "secret" not in text.replace("secrets", "").replace("Secrets", "")
        assert "VLLM_API_KEY" in text and "HF_TOKEN" in text
    server = readers.compose(compose.render(source), **environ)["services"]["server"]
    assert server["environment"]["HF_TOKEN"] == "hf_secret", "compose takes it from where it is started"


def test_bytes_that_are_no_text_are_refused() -> None:
    from dsv4_deploy.render.source import checked

    made = sources.source()
    broken = dataclasses.replace(made, plan=dataclasses.replace(made.plan, model="/models/\udcff"))
    assert "not UTF-8" in refusal(checked, broken)
    nul = dataclasses.replace(made, plan=dataclasses.replace(made.plan, model="/models/\0"))
    assert "NUL" in refusal(checked, nul)


def test_compose_can_be_read_back_as_json() -> None:
    assert json.dumps(readers.compose(compose.render(sources.source())))
