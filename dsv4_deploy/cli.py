"""The `dsv4-deploy` program: commands parse, call and print.

Everything else is imported when a command runs, so that `--help` answers at once. Results go to stdout,
progress and notes to stderr. Exit codes: 0 fine, 1 failed, 2 wrong usage or refused by a rule, 128 + N after
signal N.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import click

from dsv4_deploy import __version__
from dsv4_deploy.errors import DeployError
from dsv4_deploy.errors import render as render_error
from dsv4_deploy.render import TARGETS
from dsv4_deploy.spec import DEFAULT_HOST, DEFAULT_PORT

if TYPE_CHECKING:
    from dsv4_deploy.k8s.api import Api
    from dsv4_deploy.k8s.release import Release
    from dsv4_deploy.plan.plan import Plan
    from dsv4_deploy.serve.state import Store
    from dsv4_deploy.serve.up import Result
    from dsv4_deploy.spec import ServingSpec

PORT = click.IntRange(1, 65535)


class _Length(click.ParamType):
    """A number of tokens, or the word auto."""

    name = "length"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else click.IntRange(min=1).convert(value, param, ctx)


LENGTH = _Length()
_port = click.option("--port", type=PORT, default=DEFAULT_PORT, show_default=True, help="The server's port.")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    from dsv4_deploy.serve.interrupts import Interrupted

    try:
        code = cli.main(args=arguments, prog_name="dsv4-deploy", standalone_mode=False)
        sys.stdout.flush()
    except DeployError as error:
        click.echo(render_error(error), err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except Interrupted as interrupted:
        click.echo(f"Interrupted ({interrupted}).", err=True)
        code = interrupted.exit_code
    except (click.Abort, KeyboardInterrupt):
        code = 130
    except BrokenPipeError:
        # The reader (`| head`) has gone, which is its right; nothing may be written to it at exit either.
        # The code is the one that click gives when it notices first.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="dsv4-deploy")
def cli() -> None:
    """Serve DeepSeek-V4 with vLLM on AMD MI300X-class GPUs, or a tiny one on a CPU."""


def _deployment(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a deployment, for every command that plans one; it gets them as `spec`."""

    @functools.wraps(command)
    def with_spec(
        model: str | None,
        tp: int | None,
        device: Any,
        host: str,
        port: int,
        max_model_len: Any,
        settings: tuple[str, ...],
        variables: tuple[str, ...],
        profile: str | None,
        allow: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        from dsv4_deploy.plan import asked, overrides
        from dsv4_deploy.spec import ServingSpec

        spec = ServingSpec(
            model=model,
            tp=tp,
            device=device,
            host=host,
            port=port,
            max_model_len=max_model_len,
            overrides=overrides.parse(settings),
            env=asked.variables(variables),
            profile=profile,
            allow=asked.allowed(allow),
        )
        return command(spec, **rest)

    for option in reversed(
        (
            click.option(
                "--model", metavar="NAME|DIR", help="A model of the catalog, or a checkpoint directory."
            ),
            click.option(
                "--tp", type=click.IntRange(1, 1024), metavar="N", help="Tensor-parallel size (ranks)."
            ),
            click.option(
                "--device",
                type=click.Choice(["auto", "rocm", "cpu"]),
                default="auto",
                show_default=True,
                help="auto: the AMD GPUs of this host, else the CPU with the tiny model.",
            ),
            click.option("--host", default=DEFAULT_HOST, show_default=True, help="The address to listen on."),
            _port,
            click.option(
                "--max-model-len",
                type=LENGTH,
                metavar="N|auto",
                help="Longest request, in tokens; auto: the longest that fits.",
            ),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="KEY=VALUE",
                help="Any other vLLM flag, e.g. --set max-num-seqs=16, --set enforce-eager=true, "
                "--set no-enable-prefix-caching. Wins over the plan.",
            ),
            click.option(
                "--env",
                "variables",
                multiple=True,
                metavar="NAME=VALUE",
                help="An environment variable for the server. Wins over the plan.",
            ),
            click.option(
                "--profile",
                metavar="NAME",
                help="default, latency, throughput, long-context, or pr41451 (the original command).",
            ),
            click.option(
                "--allow",
                multiple=True,
                metavar="RULE",
                help="Override a refusal or a change by the rule's name, or silence its warning.",
            ),
        )
    ):
        with_spec = option(with_spec)
    return with_spec


def _server(command: Callable[..., Any]) -> Callable[..., Any]:
    """The argument and options that name a running server, for commands that get it as `url` and `model`."""

    @functools.wraps(command)
    def with_server(url: str | None, port: int, **rest: Any) -> Any:
        from dsv4_deploy.validate.server import base_url

        return command(url=base_url(url or f"http://{DEFAULT_HOST}:{port}"), **rest)

    for option in (
        click.option("--model", metavar="NAME", help="The served name; default: what the server has."),
        _port,
        click.argument("url", required=False),
    ):
        with_server = option(with_server)
    return with_server


def _elsewhere(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say what to plan for when it is not this host; they become part of the `spec`."""

    @functools.wraps(command)
    def with_target(
        spec: ServingSpec,
        gpu: str | None,
        vllm: str | None,
        image: str | None,
        deploy: tuple[str, ...],
        **rest: Any,
    ) -> Any:
        import dataclasses

        from dsv4_deploy.plan import asked

        name, number = asked.gpu(gpu) if gpu else (None, None)
        target = dataclasses.replace(
            spec, gpu=name, gpu_count=number, vllm=vllm, image=image, deployment=asked.deployment(deploy)
        )
        return command(target, **rest)

    for option in reversed(
        (
            click.option(
                "--gpu", metavar="NAME[:N]", help="Plan for N such GPUs, e.g. mi300x:8, not for this host."
            ),
            click.option("--vllm", metavar="VERSION", help="Plan for this vLLM; default: the image's."),
            click.option(
                "--image", metavar="IMAGE", help="The container image; its tag says which vLLM it holds."
            ),
            click.option(
                "--deploy",
                multiple=True,
                metavar="KEY=VALUE",
                help="What surrounds the server in a container or pod, e.g. --deploy replicas=2, "
                "--deploy shm=32Gi, --deploy name=dsv4.",
            ),
        )
    ):
        with_target = option(with_target)
    return _deployment(with_target)


def _watching(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say how a server is watched and stopped; the command gets those given as `watching`."""
    seconds = click.FloatRange(min=0.1)
    options = {
        "host": click.option(
            "--health-host", "watch_host", metavar="HOST", help="Where probes are answered; default: --host."
        ),
        "port": click.option(
            "--health-port",
            "watch_port",
            type=PORT,
            envvar="DSV4_HEALTH_PORT",
            help="Their port; default: 8081 for port 8000, and as far from any other.",
        ),
        "canary_period_s": click.option(
            "--canary-period",
            "watch_canary_period_s",
            type=seconds,
            metavar="S",
            help="Ask an idle server for one token this often.",
        ),
        "ready_window_s": click.option(
            "--ready-window",
            "watch_ready_window_s",
            type=seconds,
            metavar="S",
            help="Not ready after this long without an answer or progress.",
        ),
        "stall_s": click.option(
            "--stall-timeout",
            "watch_stall_s",
            type=seconds,
            metavar="S",
            help="Not alive after this long without progress while requests wait.",
        ),
        "drain_s": click.option(
            "--drain-timeout",
            "watch_drain_s",
            type=click.FloatRange(min=0),
            metavar="S",
            help="Wait this long for running requests when stopped.",
        ),
        "restarts": click.option(
            "--restarts",
            "watch_restarts",
            type=click.IntRange(min=0),
            metavar="N",
            help="Start vLLM again up to N times when it dies or hangs; default 0, for a container's "
            "runtime to do it.",
        ),
        "passthrough": click.option(
            "--vllm-metrics/--no-vllm-metrics",
            "watch_passthrough",
            default=None,
            help="Put vLLM's own metrics behind the supervisor's; default: on.",
        ),
    }  # fmt: skip

    @functools.wraps(command)
    def with_watching(*arguments: Any, **rest: Any) -> Any:
        watching = {name: rest.pop(f"watch_{name}") for name in options}
        return command(*arguments, watching=watching, **rest)

    for option in reversed(options.values()):
        with_watching = option(with_watching)
    return with_watching


def _cluster(*host_only: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that name a release on Kubernetes; the command gets it as `release`, None for this host.

    `host_only` are parameters that mean nothing there, and `release` may not be given without --target.
    """
    of_the_cluster = {"namespace": "--namespace", "release": "--release", "context": "--context"}
    of_the_cluster |= {
        "values": "--values",
        "cluster_gpu": "--gpu",
        "cluster_image": "--image",
        "previous": "--previous",
    }

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_release(
            *arguments: Any,
            target: str,
            namespace: str | None,
            release: str,
            context: str | None,
            **rest: Any,
        ) -> Any:
            asked = click.get_current_context()
            given = {
                name
                for name in asked.params
                if asked.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
            }
            if target == "host":
                wrong = [option for name, option in of_the_cluster.items() if name in given]
                if wrong:
                    raise click.UsageError(f"{wrong[0]} needs --target kubernetes.")
                return command(*arguments, release=None, **rest)
            names = [name for name in host_only if name in given]
            names += [name for name in sorted(given) if name.startswith("watch_")]
            if names:
                option = names[0].removeprefix("watch_").replace("_", "-")
                raise click.UsageError(
                    f"{option} means nothing with --target kubernetes; the chart's values say it."
                )
            from dsv4_deploy.k8s.release import Release

            space = namespace or _kubernetes(context).namespace
            return command(*arguments, release=Release(release, space, context), **rest)

        for option in reversed(
            (
                click.option(
                    "--target",
                    type=click.Choice(["host", "kubernetes"]),
                    default="host",
                    show_default=True,
                    help="This host, or a release of the Helm chart.",
                ),
                click.option("--namespace", help="Its namespace; default: the context's."),
                click.option("--release", default="dsv4", show_default=True, help="Its name."),
                click.option("--context", help="The kubeconfig's context; default: the current one."),
            )
        ):
            with_release = option(with_release)
        return with_release

    return decorate


def _kubernetes(context: str | None) -> Api:
    from dsv4_deploy.k8s import api

    return api.connect(context)


@cli.command()
@_deployment
@_watching
@_cluster("host", "port", "detach")
@click.option(
    "--values",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=pathlib.Path),
    metavar="FILE",
    help="Values for the chart; win over the plan's. For --target kubernetes.",
)
@click.option(
    "--gpu",
    "cluster_gpu",
    metavar="NAME[:N]",
    help="The cluster's GPU, e.g. mi325x. For --target kubernetes.",
)
@click.option(
    "--image", "cluster_image", metavar="IMAGE", help="The image of this bundle. For --target kubernetes."
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    metavar="S",
    help="Seconds to wait for readiness and for an answer.",
)
@click.option(
    "--detach/--foreground",
    default=True,
    show_default=True,
    help="Leave the server running and return, or follow its log until Ctrl-C, which stops it.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print environment and command line with reasons; start nothing."
)
def up(
    spec: ServingSpec,
    timeout: float | None,
    detach: bool,
    dry_run: bool,
    watching: dict[str, Any],
    release: Release | None,
    values: tuple[pathlib.Path, ...],
    cluster_gpu: str | None,
    cluster_image: str | None,
) -> None:
    """Start the server, wait until it answers, print the answer.

    Running it again with the same options changes nothing and asks again; with others it replaces the server
    on that port. The environment is passed on to vLLM, and a variable that you have set wins over the plan's.
    DSV4_VLLM_COMMAND names another launcher than this environment's `vllm` (a JSON list, or words as in a
    shell). State and logs are kept in $DSV4_STATE_DIR or ~/.local/state/dsv4-deploy, the tiny model in
    $DSV4_CACHE_DIR or ~/.cache/dsv4-deploy.

    With --target kubernetes it installs or upgrades the Helm chart with the plan's values (--dry-run prints
    them), says what the pods do, and ends when they are ready or with the cause when they cannot be. DSV4_HELM
    names another helm.
    """
    if release is not None:
        spec = _cluster_spec(spec, cluster_gpu, cluster_image)
        _cluster_up(spec, release, values, timeout, dry_run=dry_run)
        return
    from dsv4_deploy.plan.watch import make_watch
    from dsv4_deploy.preflight import run as preflight_run
    from dsv4_deploy.serve import up as serve
    from dsv4_deploy.serve.interrupts import Interrupts
    from dsv4_deploy.serve.logfile import Tail
    from dsv4_deploy.serve.report import report

    if dry_run:
        _print_plan(serve.plan_for(spec, dry_run=True, report=report()))
        return
    with Interrupts() as interrupts:
        talk = report()
        plan = serve.plan_for(spec, dry_run=False, report=talk)
        talk.note(plan.note)
        for setting in plan.from_environment:
            talk.note(f"{setting.name}={setting.value} {setting.reason}.")
        for notice in plan.notices:
            talk.note(notice.line())
        store = _store()
        watch = make_watch(plan, watching)
        preflight_run.before_start(spec, plan, os.environ, store, talk.note)
        result = serve.up(spec, plan, watch, store, talk, interrupts, timeout)
        _print_result(result, detached=detach)
        if not detach:
            serve.follow(result.record, store, interrupts, Tail(store.log(spec.port), from_end=True))


@cli.command()
@_deployment
@_watching
@click.option(
    "--termination-log",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    default="/dev/termination-log",
    show_default=True,
    help="Where Kubernetes looks for the cause of a death; written when it exists.",
)
def serve(
    spec: ServingSpec,
    watching: dict[str, Any],
    termination_log: pathlib.Path,
) -> None:
    """Run vLLM under the supervisor, in this process: the entry point of a container or pod.

    vLLM's output goes to stdout and into its log. /startupz, /readyz, /livez and /metrics are answered on the
    health port. SIGTERM drains: no new request is taken, running ones are finished, then vLLM is stopped; a
    second signal stops at once. Exit codes: 0 stopped as asked, 1 vLLM died or hung, 3 requests were cut off at
    the deadline, 128 + N hurried by a second signal N.
    """
    from dsv4_deploy.plan.watch import make_watch
    from dsv4_deploy.preflight import run as preflight_run
    from dsv4_deploy.serve import foreground
    from dsv4_deploy.serve import up as start
    from dsv4_deploy.serve.report import Report

    talk = Report()
    plan = start.plan_for(spec, dry_run=False, report=talk)
    talk.note(plan.note)
    for setting in plan.from_environment:
        talk.note(f"{setting.name}={setting.value} {setting.reason}.")
    for notice in plan.notices:
        talk.note(notice.line())
    store = _store()
    preflight_run.before_start(spec, plan, os.environ, store, talk.note)
    watch = make_watch(plan, watching)
    sys.exit(foreground.serve(spec, plan, watch, store, talk.note, termination_log))


@cli.command()
@_deployment
def join(spec: ServingSpec) -> None:
    """Run this host's ranks of a model that another host leads: the entry point of a worker pod.

    Takes what `serve` on the leader got, with --set nnodes=N, node-rank=R and master-addr=LEADER. It becomes vLLM
    without an API server; nothing answers requests or probes here.
    """
    from dsv4_deploy.serve import join as worker
    from dsv4_deploy.serve import up as start
    from dsv4_deploy.serve.report import Report

    talk = Report()
    plan = start.plan_for(spec, dry_run=False, report=talk)
    talk.note(plan.note)
    worker.join(plan, os.environ)


@cli.command()
@click.argument("directory", type=click.Path(path_type=pathlib.Path))
@click.option("--repository", metavar="OWNER/NAME", help="Repository on the hub.")
@click.option("--revision", metavar="COMMIT", help="Its commit: 40 hexadecimal digits.")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=8,
    show_default=True,
    help="Files that are fetched at the same time.",
)
@click.option("--wait", is_flag=True, help="Fetch nothing; wait until somebody else's download is complete.")
def download(
    directory: pathlib.Path, repository: str | None, revision: str | None, workers: int, wait: bool
) -> None:
    """Fetch one revision of a model into DIRECTORY, check every file, and mark it complete.

    An interrupted download goes on where it stopped. HF_TOKEN is the hub's token, HF_ENDPOINT another hub.
    """
    from dsv4_deploy import download as weights

    def say(text: str) -> None:
        click.echo(text, err=True)

    if wait:
        weights.wait(directory, say)
        return
    if repository is None or revision is None:
        raise click.UsageError("--repository and --revision are needed, or --wait.")
    weights.fetch(repository, revision, directory, workers, say)
    click.echo(f"{directory} is complete.")


@cli.command()
@click.argument("which", type=click.Choice(["startup", "ready", "live"]))
@click.option("--health-host", default=DEFAULT_HOST, show_default=True, help="Where probes are answered.")
@click.option(
    "--health-port",
    type=PORT,
    default=8081,
    show_default=True,
    envvar="DSV4_HEALTH_PORT",
    help="Their port.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.01),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Seconds to wait for the answer.",
)
def probe(which: str, health_host: str, health_port: int, timeout: float) -> None:
    """Ask a deployment's supervisor whether it has started, is ready, or lives: for exec probes.

    Exit code 0 or 1, and the reason in one line; the same answers as /startupz, /readyz and /livez.
    """
    from dsv4_deploy.serve import probe as probes

    host = f"[{health_host}]" if ":" in health_host else health_host
    good, reason = probes.verdict(f"http://{host}:{health_port}", which, timeout)
    click.echo(reason)
    if not good:
        sys.exit(1)


@cli.command()
@_deployment
@_cluster("host", "port", "rocm")
@click.option(
    "--gpu",
    "cluster_gpu",
    metavar="NAME[:N]",
    help="The cluster's GPU, e.g. mi325x. For --target kubernetes.",
)
@click.option(
    "--rocm", metavar="VERSION", help="ROCm of the image that will run; default: the one installed here."
)
@click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")
def preflight(
    spec: ServingSpec, rocm: str | None, as_json: bool, release: Release | None, cluster_gpu: str | None
) -> None:
    """Check this host, or a cluster, for the deployment that `up` would start; change nothing.

    Each finding is ok, warn or fail, with cause and fix. Exit code 1 when one fails.
    """
    from dsv4_deploy.preflight import run

    if release is None:
        findings = run.examine(spec, os.environ, _store(), rocm=rocm)
    else:
        from dsv4_deploy.facts import cluster as facts
        from dsv4_deploy.preflight import cluster

        planned = _cluster_plan(_cluster_spec(spec, cluster_gpu, None))
        found = facts.read(_kubernetes(release.context), release.namespace)
        findings = cluster.examine(found, planned, release.namespace)
    if as_json:
        click.echo(run.as_json(findings))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        for finding in findings:
            first, *more = run.block(finding)
            click.echo(click.style(first[:5], fg=colours[finding.level]) + first[5:])
            for text in more:
                click.echo(text)
        click.echo(run.summary(findings))
    if not run.passed(findings):
        sys.exit(1)


@cli.command()
@_elsewhere
@click.option("--json", "as_json", is_flag=True, help="A JSON object, for programs.")
@click.option("--explain", is_flag=True, help="With the formula and source of every memory figure.")
def plan(spec: ServingSpec, as_json: bool, explain: bool) -> None:
    """Show what would run and why: memory, what rules changed or warn about, environment, command line.

    Nothing is started and nothing is read but this host and the checkpoint. Exit code 2 when a rule refuses.
    """
    from dsv4_deploy.plan import show
    from dsv4_deploy.plan.gather import gather
    from dsv4_deploy.plan.plan import make_plan
    from dsv4_deploy.serve import command

    made = make_plan(spec, gather(spec, os.environ, dry_run=True))
    if as_json:
        click.echo(show.as_json(made))
    else:
        click.echo("\n".join(show.text(made, command.shown_launcher(os.environ), explain=explain)))


@cli.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="A JSON list, for programs.")
@click.option("--markdown", is_flag=True, help="As docs/rules.md has them.")
def rules(name: str | None, as_json: bool, markdown: bool) -> None:
    """List the rules that refuse, change or warn, or show one of them."""
    from dsv4_deploy.plan import asked, show
    from dsv4_deploy.plan.rules import BY_ID, RULES

    wanted = [BY_ID[asked.rule(name)]] if name else list(RULES)
    if as_json:
        click.echo(show.rules_json(wanted))
    elif markdown:
        click.echo(show.rules_markdown(), nl=False)
    else:
        click.echo("\n".join(show.rule_text(wanted[0]) if name else show.rules_text(wanted)))


@cli.command()
@click.argument("target", metavar="TARGET", type=click.Choice(list(TARGETS)))
@_elsewhere
@click.option(
    "--render-gid",
    type=click.IntRange(min=0),
    metavar="N",
    help="Group of /dev/dri/renderD* on the machine that serves; default: asked there where that is possible.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    help="Write this file; default: stdout.",
)
def render(spec: ServingSpec, target: str, render_gid: int | None, output: pathlib.Path | None) -> None:
    """Write the plan for somewhere else, each value with its reason.

    TARGET: shell, docker, compose, quadlet (systemd and podman), env, helm-values, or kubernetes (by helm
    template). Nothing is started, and no secret is written. Exit code 2 when a rule refuses.
    """
    import shlex

    from dsv4_deploy import render as targets
    from dsv4_deploy.plan.gather import gather
    from dsv4_deploy.plan.plan import make_plan
    from dsv4_deploy.render.source import Source, checked, write

    made = make_plan(spec, gather(spec, os.environ, dry_run=True))
    command = shlex.join(["dsv4-deploy", *sys.argv[1:]])
    text = targets.renderer(target)(checked(Source(made, spec, command, render_gid)))
    if output is None:
        click.echo(text, nl=False)
    else:
        write(output, text, executable=target in targets.EXECUTABLE)
        click.echo(f"Wrote {output}", err=True)


@cli.command()
@_port
@_cluster("port", "every", "timeout")
@click.option("--all", "every", is_flag=True, help="Stop every server that this user has started.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds the server gets to finish running requests and end; then it is killed.",
)
def down(port: int, every: bool, timeout: float | None, release: Release | None) -> None:
    """Stop a server, or remove a release. Where nothing runs it says so and succeeds, so it can be repeated."""
    if release is not None:
        from dsv4_deploy.k8s import commands

        commands.down(release, _say)
        return
    from dsv4_deploy.serve import manage
    from dsv4_deploy.serve.interrupts import Interrupts
    from dsv4_deploy.serve.report import report

    store = _store()
    talk = report()
    with Interrupts() as interrupts:
        ports = store.ports() if every else [port]
        for one in ports:
            manage.down(one, store, talk, interrupts, timeout)
    if not ports:
        talk.note("Nothing is running.")


@cli.command()
@_cluster()
@click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")
def status(as_json: bool, release: Release | None) -> None:
    """List the servers that this user has started, or the pods of a release and what is wrong with each.

    Exit code 1 when a server has died, or a release is not completely ready.
    """
    if release is not None:
        from dsv4_deploy.k8s import commands

        api = _kubernetes(release.context)
        if as_json:
            text, good = commands.status_json(api, release)
        else:
            listed, good = commands.status_lines(api, release)
            text = "\n".join(listed)
        click.echo(text)
        if not good:
            sys.exit(1)
        return
    import dataclasses
    import json

    from dsv4_deploy.serve import manage

    rows = manage.status(_store())
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
    elif rows:
        for line in _table(rows):
            click.echo(line)
    else:
        click.echo("Nothing is running.")
    if any(row.state in ("dead", "stale") for row in rows):
        sys.exit(1)


@cli.command()
@_port
@_cluster("port")
@click.option("-f", "--follow", is_flag=True, help="Go on until the server ends or Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="How many of the last lines.",
)
@click.option(
    "--previous", is_flag=True, help="Of the containers before the last restart. For --target kubernetes."
)
def logs(port: int, follow: bool, lines: int, previous: bool, release: Release | None) -> None:
    """Print the log of the server, also after it has ended, or those of a release's pods."""
    if release is not None:
        from dsv4_deploy.k8s import commands

        for line in commands.logs(_kubernetes(release.context), release, lines, follow, previous):
            click.echo(line)
        return
    from dsv4_deploy.serve import manage

    for line in manage.logs(port, _store(), lines, follow):
        click.echo(line)


@cli.command()
@click.argument("log", required=False)
@_port
@click.option(
    "--exit-code",
    type=click.IntRange(-64, 255),
    metavar="N",
    help="How vLLM ended, where that is known: 137 for a kill, for example.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON object, for programs.")
@click.option(
    "--termination-log",
    type=click.Path(dir_okay=False, path_type=pathlib.Path),
    default="/dev/termination-log",
    show_default=True,
    help="Where Kubernetes looks for the cause of a death; written when it exists.",
)
def triage(
    log: str | None, port: int, exit_code: int | None, as_json: bool, termination_log: pathlib.Path
) -> None:
    """Name the cause of a failure from vLLM's log: the first real error, what it means, what to do.

    LOG is a file, or - for standard input: kubectl logs POD | dsv4-deploy triage -. Without it, the log of the
    server on --port is read. Exit code 0 when the cause is known or nothing failed, 1 when no rule knows it.
    """
    import json

    from dsv4_deploy import triage as causes

    found = causes.diagnose_named(log or str(_store().log(port)), exit_code)
    click.echo(json.dumps(found.to_dict(), indent=2) if as_json else found.text(), nl=as_json)
    try:
        causes.write_termination_log(found, termination_log)
    except OSError as error:
        click.echo(f"warning: cannot write {termination_log}: {error.strerror}", err=True)
    if found.verdict == "unknown":
        sys.exit(1)


@cli.command()
@_server
def curl(url: str, model: str | None) -> None:
    """Print ready-to-paste curl lines: completion, chat, thinking, tools, streams, health, metrics.

    Nothing is sent. With VLLM_API_KEY set the lines use that variable; its value is not printed.
    """
    from dsv4_deploy.validate import curl as lines

    for line in lines.lines(url, model, with_key="VLLM_API_KEY" in os.environ):
        click.echo(line)


@cli.command()
@_server
@_cluster("url", "port")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.1),
    default=120.0,
    show_default=True,
    metavar="S",
    help="Seconds for each answer, from the connection to its last byte.",
)
@click.option("--json", "as_json", is_flag=True, help="A JSON object, for programs.")
def validate(url: str, model: str | None, timeout: float, as_json: bool, release: Release | None) -> None:
    """Send a server the requests that `curl` prints and check the answers: form, token counts, finite
    log-probabilities, complete streams, valid tool calls.

    Exit code 1 when one of them is not right.
    """
    import json

    from dsv4_deploy.validate.run import validate as send

    with contextlib.ExitStack() as block:
        if release is not None:
            from dsv4_deploy.k8s import forward

            url = block.enter_context(forward.to_server(_kubernetes(release.context), release))
        report = send(url, model=model, timeout_s=timeout)
    click.echo(json.dumps(report.to_dict(), indent=2) if as_json else "\n".join(report.lines()))
    if not report.passed:
        sys.exit(1)


@cli.command()
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N.")
@click.option("--skip", multiple=True, metavar="OPERATOR", help="Let its failure pass; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of the table.")
def selftest(device: str, skip: tuple[str, ...], as_json: bool) -> None:
    """Check the arithmetic of this machine against float64: references, kernels and patched operators.

    Takes less than a minute. `up` does this by itself on AMD GPUs and does not serve when one is wrong,
    unless DSV4_SELFTEST_SKIP='OPERATOR;OPERATOR' names it.
    """
    from dsv4_deploy import selftest as program

    sys.exit(program.show(device, skip, as_json=as_json))


@cli.command()
@click.argument("directory", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the random weights."
)
@click.option("--force", is_flag=True, help="Replace a checkpoint that is already there.")
def tiny(directory: pathlib.Path, seed: int, force: bool) -> None:
    """Write a tiny DeepSeek-V4 with random weights, in the published file format, to DIRECTORY."""
    from dsv4_deploy.tiny import write_tiny

    write_tiny(directory, seed=seed, force=force)
    click.echo(f"Wrote {directory}")


@cli.group()
def patches() -> None:
    """Show what this bundle changes in vLLM, and check that it fits."""


@patches.command("list")
def patches_list() -> None:
    """List all patches."""
    from dsv4_deploy import patches as told

    rows = [(p.id, ", ".join(p.platforms), ", ".join(p.releases), p.title) for p in told.PATCHES]
    click.echo("\n".join(told.columns(("PATCH", "PLATFORMS", "VLLM", "WHAT"), rows)))


@patches.command("show")
@click.argument("id")
def patches_show(id: str) -> None:
    """Tell everything about one patch: symptom, cause, remedy, upstream, and what it touches."""
    from dsv4_deploy import patches as told

    patch = told.find(id)
    for heading, text in told.described(patch):
        if text:
            click.echo(f"{heading + ':':11}{text}")
    for target in patch.targets:
        click.echo(f"{'replaces' if target.replace else 'relies on'}: {target.key}")
        for old, new in told.edits(target):
            click.echo("\n".join([f"  - {line}" for line in old.splitlines()]))
            click.echo("\n".join([f"  + {line}" for line in new.splitlines()]))


@patches.command("verify")
@click.option(
    "--vllm-path",
    type=click.Path(path_type=pathlib.Path),
    metavar="DIR",
    help="An installation or a wheel, unpacked or not, instead of the vLLM of this Python.",
)
@click.option("--json", "as_json", is_flag=True, help="JSON, for programs.")
def patches_verify(vllm_path: pathlib.Path | None, as_json: bool) -> None:
    """Check that every patch fits a vLLM, by its source. Needs no GPU and imports nothing of it.

    Exit code 1 when one does not fit, or when the release is not supported.
    """
    import dataclasses
    import json

    from dsv4_deploy import patches as told

    result = told.verify(told.vllm_root(vllm_path))
    if as_json:
        told_as = dataclasses.asdict(result) | {"root": str(result.root), "ok": result.ok}
        click.echo(json.dumps(told_as, indent=2))
    else:
        click.echo(f"vLLM {result.release or '(release unknown)'} in {result.root}")
        rows = [(one.id, one.platforms, one.result) for one in result.verdicts]
        click.echo("\n".join(told.columns(("PATCH", "PLATFORMS", "RESULT"), rows)))
        for one in result.verdicts:
            for reason in one.reasons:
                click.echo(f"{one.id}: {reason}")
    if not result.ok:
        click.echo(f"error: {told.advice(result)}", err=True)
        sys.exit(1)


@patches.command("status")
@click.argument("url", default=f"http://127.0.0.1:{DEFAULT_PORT}")
def patches_status(url: str) -> None:
    """Show which patches each process of a running server has. URL is vLLM's own address.

    `armed` means that the process has not loaded what the patch changes, and would get it changed.
    """
    from dsv4_deploy import patches as told

    processes = told.status(url)
    ids = sorted({id for process in processes for id in process.patches})
    click.echo(f"vLLM {processes[0].vllm}, platform {processes[0].platform}")
    header = ("PATCH", *(f"{process.name} ({process.pid})" for process in processes))
    rows = [(id, *(process.patches.get(id, "-") for process in processes)) for id in ids]
    click.echo("\n".join(told.columns(header, rows)))


def _say(text: str) -> None:
    click.echo(text, err=True)


def _cluster_spec(spec: ServingSpec, gpu: str | None, image: str | None) -> ServingSpec:
    """What was asked for, for a cluster: AMD GPUs unless the CPU is named, and nothing of this host."""
    import dataclasses

    from dsv4_deploy.plan import asked

    device: Literal["cpu", "rocm"] = "cpu" if spec.device == "cpu" else "rocm"
    name, number = asked.gpu(gpu) if gpu else (None, None)
    if device == "rocm":
        name, number = name or "mi300x", number or 8
    return dataclasses.replace(spec, device=device, gpu=name, gpu_count=number, image=image)


def _cluster_plan(spec: ServingSpec) -> Plan:
    from dsv4_deploy.plan.gather import gather
    from dsv4_deploy.plan.plan import make_plan

    return make_plan(spec, gather(spec, {}, dry_run=True))


def _cluster_up(
    spec: ServingSpec,
    release: Release,
    files: tuple[pathlib.Path, ...],
    timeout: float | None,
    *,
    dry_run: bool,
) -> None:
    from dsv4_deploy.k8s import commands, forward
    from dsv4_deploy.render import helm_values
    from dsv4_deploy.render.source import Source
    from dsv4_deploy.serve.interrupts import Interrupted, Interrupts
    from dsv4_deploy.validate import completion

    plan = _cluster_plan(spec)
    values = helm_values.render(Source(plan, spec, f"dsv4-deploy up {release.options}"))
    if dry_run:
        click.echo(values, nl=False)
        return
    _say(plan.note)
    for notice in plan.notices:
        _say(notice.line())
    api = _kubernetes(release.context)
    with Interrupts():
        try:
            commands.up(api, release, values, files, timeout, _say)
        except Interrupted:
            _say(f"The release goes on by itself: dsv4-deploy status {release.options}")
            raise
    with forward.to_server(api, release) as url:
        try:
            answer = completion.ask(url, timeout or 300.0)
        except DeployError as error:
            if "VLLM_API_KEY" in os.environ or "401" not in f"{error.what} {error.why}":
                raise
            _say("It is ready. Export VLLM_API_KEY to see an answer: the server wants a key.")
        else:
            import json

            click.echo(json.dumps(answer.body, indent=2, ensure_ascii=False))
    click.echo()
    click.echo(f"Check:  dsv4-deploy validate {release.options}")
    click.echo(f"Status: dsv4-deploy status {release.options}")
    click.echo(f"Logs:   dsv4-deploy logs -f {release.options}")
    click.echo(f"Remove: dsv4-deploy down {release.options}")


def _store() -> Store:
    from dsv4_deploy.serve import state

    return state.Store(state.root(os.environ), lambda text: click.echo(f"warning: {text}", err=True))


def _print_plan(plan: Plan) -> None:
    from dsv4_deploy.plan import show
    from dsv4_deploy.serve import command

    click.echo(f"# {plan.note}")
    for notice in plan.notices:
        click.echo(f"# {notice.line()}")
    click.echo("\n".join(show.command(plan, command.shown_launcher(os.environ))))


def _print_result(result: Result, *, detached: bool) -> None:
    import json

    from dsv4_deploy.validate import completion

    click.echo(json.dumps(result.answer.body, indent=2, ensure_ascii=False))
    click.echo()
    ready = "was already running" if result.ready_s is None else f"{result.ready_s:.1f} s"
    speed = result.answer.tokens_per_s
    click.echo(f"time to ready:       {ready}")
    click.echo(f"time to first token: {result.answer.first_token_s:.2f} s")
    click.echo(f"tokens per second:   {'-' if speed is None else f'{speed:.1f}'}")
    click.echo()
    click.echo("Ask again:")
    click.echo(f"  {completion.curl_line(result.record.url, with_key='VLLM_API_KEY' in os.environ)}")
    click.echo()
    port = "" if result.record.port == DEFAULT_PORT else f" --port {result.record.port}"
    if detached:
        click.echo(f"Log:  dsv4-deploy logs -f{port}")
        click.echo(f"Stop: dsv4-deploy down{port}")
    else:
        click.echo("Stop: Ctrl-C")


def _table(rows: Sequence[Any]) -> list[str]:
    header = ("PORT", "MODEL", "TP", "DEVICE", "PID", "STATE", "UPTIME", "URL")
    cells = [
        (
            str(row.port), row.model, str(row.tp), row.device, str(row.pid or "-"), row.state,
            "-" if row.uptime_s is None else _duration(row.uptime_s), row.url,
        )
        for row in rows
    ]  # fmt: skip
    widths = [max(len(line[column]) for line in [header, *cells]) for column in range(len(header))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *cells]
    ]


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
