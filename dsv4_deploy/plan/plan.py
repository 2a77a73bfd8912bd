"""make_plan: what was asked for and what is here become vLLM's environment and command line, with reasons.

In: a ServingSpec and Facts. Out: a Plan; the same input always gives the same Plan. Nothing is read or
started here. In order: the plan's own choices (recipes, profiles), the operator's over them, the rules that
change, the rules that refuse, the memory plan, and the rules that look at it. Nothing after this module
decides a flag.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from dsv4_deploy import catalog
from dsv4_deploy.catalog import Card, Dims, Draft, Family, Model, Traits
from dsv4_deploy.catalog.release import image_version
from dsv4_deploy.errors import refused
from dsv4_deploy.facts.gpu import describe, visible
from dsv4_deploy.plan import memory as memory_plan
from dsv4_deploy.plan import profiles, recipes, rules
from dsv4_deploy.plan.memory import Layout, Memory
from dsv4_deploy.plan.profiles import Limits, Profile
from dsv4_deploy.plan.rules.base import DIGITS, Case, Value, count, seconds
from dsv4_deploy.plan.rules.deployment import GPU_RESOURCE, MEMORY_FACTOR, SHM_BYTES, grace_parts
from dsv4_deploy.plan.rules.engine import AITER_MOE, draft_tokens, runs_eager, speculation
from dsv4_deploy.plan.settings import Facts, Plan, Setting
from dsv4_deploy.spec import DEFAULT_PORT, Deployment, ServingSpec

__all__ = ["TINY", "Facts", "Plan", "Setting", "choose_device", "default_model", "make_plan"]

TINY = "tiny"
ROCM_DEFAULT_MODEL = "deepseek-v4-flash"
# From here on the figures of the Pro recipes hold: over an hour of loading, smaller batches.
LARGE_WEIGHT_BYTES = 400 * 10**9
ROOMY_CARD_BYTES = 230 * 10**9
# A rank whose weights take more of the card than this gets small batches, or its cache would hold nobody.
TIGHT_SHARE = 0.7
TIGHT = Limits(64, 2048)
TIGHT_LARGE = Limits(16, 2048, 32_768)
# V4.1 keeps its Engram tables in host memory: https://github.com/SemiAnalysisAI/InferenceX/pull/3337
ENGRAM_BYTES = 189 * 2**30
# Planned for where nobody says which GPU: the smaller of the memory sizes.
ASSUMED_CARD = "mi300x"

_NUMBERS = (
    "max-num-seqs",
    "max-num-batched-tokens",
    "data-parallel-size",
    "pipeline-parallel-size",
    "kv-cache-memory-bytes",
    "block-size",
)


@dataclasses.dataclass(frozen=True)
class _Subject:
    """What is to be served: `path` is what vLLM loads, `name` what was asked for, `served` what clients call
    it; `local` when vLLM need not download it."""

    name: str
    path: str
    served: str
    dims: Dims
    traits: Traits
    family: Family
    weight_bytes: int
    default_tp: int
    default_len: int
    local: bool
    model: Model | None
    quantization: str | None


def choose_device(spec: ServingSpec, gpus: Sequence[str]) -> tuple[Literal["cpu", "rocm"], str]:
    """The device to serve on, and the plain line that says why."""
    if spec.gpu and spec.device != "cpu":
        number = f"{spec.gpu_count} x " if spec.gpu_count else ""
        return "rocm", f"Planned for {number}{catalog.find_card(spec.gpu).name}"
    if spec.device == "cpu":
        return "cpu", "Serving on the CPU, as asked"
    if spec.device == "rocm":
        return "rocm", "Serving on AMD GPUs, as asked"
    if gpus:
        return "rocm", f"Serving on the AMD GPUs of this host ({describe(gpus)})"
    return "cpu", "No AMD GPU here: serving on the CPU"


def default_model(device: Literal["cpu", "rocm"]) -> str:
    """The model that is served when nobody names one."""
    return TINY if device == "cpu" else ROCM_DEFAULT_MODEL


def make_plan(spec: ServingSpec, facts: Facts) -> Plan:
    """Decide everything about one deployment.

    Raises DeployError (exit code 2) when the model is unknown or a rule refuses the combination.
    """
    profile = profiles.find(spec.profile)
    environ = {**facts.environ, **spec.env}
    gpus = _gpus(spec, facts, environ)
    device, note = choose_device(spec, gpus or ())
    subject = _subject(spec, facts, device)
    card, virtual = _card(spec, facts, gpus, device)
    vllm = _vllm(spec, facts, device)
    tp = spec.tp or _default_tp(device, subject, profile, gpus)
    large = subject.weight_bytes > LARGE_WEIGHT_BYTES
    overrides = dict(spec.overrides)
    dp = count(str(overrides.get("data-parallel-size", "1"))) or 1
    limits, tight = _limits(profile, subject, card, tp, dp, overrides.get("enable-expert-parallel") is True)

    length, length_reason = _wanted_length(spec, profile, subject, limits, device)
    env = recipes.rocm_env(large, subject.traits) if device == "rocm" else recipes.cpu_env()
    if subject.local:
        env += recipes.offline_env()
    if profile.command is not None:
        env = [setting for setting in env if setting.name != "DO_NOT_TRACK"]
        flags = _exact_flags(profile, spec)
    else:
        flags = [
            Setting("host", spec.host, "the address to listen on (--host)"),
            Setting("port", str(spec.port), "the port to listen on (--port)"),
            Setting("served-model-name", subject.served, "the name that clients use"),
            Setting(
                "tensor-parallel-size",
                str(tp),
                "--tp" if spec.tp else f"default for {subject.name} on {device}",
            ),
            Setting("max-model-len", str(length), length_reason),
            *recipes.model_flags(subject.traits),
            *recipes.supervision_flags(),
        ]
        if device == "cpu":
            flags += recipes.cpu_flags(tp)
        else:
            flags += recipes.rocm_flags(
                limits,
                _utilization(subject, card),
                recipes.SINGLE_CARD_KV_BYTES if tight and not large else None,
                recipes.moe_setting(subject.family, subject.traits, tp, dp, vllm),
                prefetch=_holds_in_memory(facts, subject.weight_bytes),
            )
    planned = {flag.name: flag for flag in flags}
    values: dict[str, Value] = {**{name: flag.value for name, flag in planned.items()}, **overrides}
    if "kv-cache-memory-bytes" in planned and "gpu-memory-utilization" in overrides:
        # The operator sizes by share: our fixed pool would silently win over it.
        del planned["kv-cache-memory-bytes"], values["kv-cache-memory-bytes"]
    _check_numbers(values)

    case = Case(
        device=device,
        model=subject.name,
        family=subject.family,
        dims=subject.dims,
        traits=subject.traits,
        weight_bytes=subject.weight_bytes,
        tp=tp,
        max_model_len=length,
        gpus=gpus,
        card=card,
        virtual=virtual,
        host=facts.host,
        vllm=vllm,
        aiter=facts.aiter_version,
        image=_image(spec, vllm) if device == "rocm" else spec.image or "",
        port=spec.port,
        quantization=subject.quantization,
        served_name=subject.served,
        environ=environ,
        env={setting.name: str(setting.value) for setting in env},
        flags=values,
        explicit=frozenset(overrides),
        deployment=spec.deployment,
        unwritable=facts.unwritable,
        exact=profile.command is not None,
    )
    allow = spec.allow
    first = [rule for rule in rules.RULES if not rule.after_memory]
    then = [rule for rule in rules.RULES if rule.after_memory]
    case, notices = rules.settle(case, first, allow)
    notices += rules.refuse(case, first, allow)
    case = _with_memory(case, spec, subject)
    if "max-num-seqs" not in case.explicit and case.memory and device == "rocm" and not case.exact:
        case = _fewer_sequences(case, case.memory)
    case, more = rules.settle(case, then, allow)
    case = dataclasses.replace(case, memory=memory_plan.plan(_layout(case, subject)))
    notices += [*more, *rules.refuse(case, then, allow), *rules.warn(case, rules.RULES, allow)]
    return _finish(spec, facts, subject, profile, case, env, planned, notices, note, vllm)


def _finish(
    spec: ServingSpec,
    facts: Facts,
    subject: _Subject,
    profile: Profile,
    case: Case,
    env: list[Setting],
    planned: Mapping[str, Setting],
    notices: list[rules.Notice],
    note: str,
    vllm: str,
) -> Plan:
    """Put the settled case into a Plan."""
    final = [_final_flag(name, value, planned, spec, case) for name, value in case.flags.items()]
    # Ours in their order first, then the operator's by name.
    order = {name: number for number, name in enumerate(planned)}
    final.sort(key=lambda flag: (order.get(flag[0], len(order)), flag[0]))
    settings = [_final_variable(setting, spec, facts, case) for setting in env]
    known = {setting.name for setting in settings}
    settings += [
        Setting(
            name, case.env.get(name, spec.env.get(name, "")), case.reasons.get(name, "set by you (--env)")
        )
        for name in sorted({*spec.env, *case.env} - known)
    ]
    large = subject.weight_bytes > LARGE_WEIGHT_BYTES
    if case.device == "cpu":
        ready = recipes.CPU_READY_TIMEOUT_S
    else:
        ready = recipes.ROCM_READY_TIMEOUT_LARGE_S if large else recipes.ROCM_READY_TIMEOUT_S
    served = case.flags.get("served-model-name", subject.path)
    tail = ""
    if case.device == "rocm" and not spec.gpu and facts.host is None and facts.gpus is None:
        tail = (
            f" Memory is that of {case.card.name if case.card else ASSUMED_CARD} (name another with --gpu)."
        )
    return Plan(
        device=case.device,
        model=subject.path,
        served_name=_text("served-model-name", served),
        tp=case.tp,
        host=spec.host if profile.command is None else str(case.flags.get("host", spec.host)),
        port=spec.port,
        env=tuple(settings),
        flags=tuple(flag for _, flag in final),
        ready_timeout_s=ready,
        shutdown_timeout_s=_seconds(_text("shutdown-timeout", case.flags.get("shutdown-timeout", "0"))),
        note=f"{note}, with {_called(subject, facts)}, tensor-parallel size {case.tp}.{tail}",
        profile=profile.name,
        vllm=vllm,
        image=case.image,
        card=case.card,
        memory=case.memory,
        notices=tuple(notices),
        deployment=_deployment(case, subject, ready),
        weight_bytes=subject.weight_bytes,
    )


def _gpus(spec: ServingSpec, facts: Facts, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Architecture names of what the server will see; those of the named card when planning for other hardware
    than this host's, to which the variables of this shell say nothing."""
    if spec.gpu:
        card = catalog.find_card(spec.gpu)
        return (card.gfx,) * spec.gpu_count if spec.gpu_count else None
    return visible(facts.gpus, environ) if facts.gpus else facts.gpus


def _card(
    spec: ServingSpec, facts: Facts, gpus: tuple[str, ...] | None, device: Literal["cpu", "rocm"]
) -> tuple[Card | None, bool]:
    """The kind of GPU that is planned for, and whether it is a virtual function."""
    if device == "cpu":
        return None, False
    if spec.gpu:
        return catalog.find_card(spec.gpu), False
    if facts.host and facts.host.gpus:
        known = [(gpu, catalog.card_by_device_id(gpu.device_id)) for gpu in facts.host.gpus]
        # The plan is for the least of what is there: an unknown card before a known one, then the fewest units.
        first, found = min(known, key=lambda one: (one[1] is not None, one[0].compute_units))
        if found:
            card = found[0]
            measured = min(gpu.hbm_bytes for gpu in facts.host.gpus) or card.hbm_bytes
            virtual = any(one is not None and one[1] for _, one in known)
            return dataclasses.replace(card, hbm_bytes=min(card.hbm_bytes, measured)), virtual
        unknown = Card(
            name="unknown",
            gfx=first.gfx,
            target=first.gfx == "gfx942",
            hbm_bytes=max(min(gpu.hbm_bytes for gpu in facts.host.gpus), 1),
            compute_units=max(first.compute_units, 1),
            device_ids=(first.device_id,),
            vf_device_ids=(),
            fp8="fnuz" if first.gfx == "gfx942" else "ocp",
            tuned_gemm_rows=None,
            sources=(),
        )
        return unknown, False
    if gpus and "gfx950" in gpus:
        return catalog.cards()["mi350x"], False
    return catalog.cards()[ASSUMED_CARD], False


def _subject(spec: ServingSpec, facts: Facts, device: Literal["cpu", "rocm"]) -> _Subject:
    name = spec.model or default_model(device)
    found = facts.checkpoint
    if found is None:
        entry = catalog.find_model(name)
        return _Subject(
            name=name,
            path=str(facts.tiny_directory) if entry.repo is None else entry.repo,
            served=entry.name,
            dims=entry.dims,
            traits=entry.traits,
            family=entry.family,
            weight_bytes=entry.weight_bytes,
            default_tp=entry.default_tp,
            default_len=entry.default_max_model_len,
            local=entry.repo is None,
            model=entry,
            quantization=None,
        )
    traits = found.traits or Traits(found.model_type, "fp4", Draft())
    twin = next((model for model in catalog.models().values() if model.dims == found.dims), None)
    if device == "cpu":
        tp, length = 1, catalog.models()[TINY].default_max_model_len
    elif twin:
        tp, length = twin.default_tp, twin.default_max_model_len
    else:
        tp = max(rules.legal_tp(found.dims, traits.fp8_block), default=1)
        length = found.dims.max_position_embeddings
    if found.draft is None:  # config.json may promise a draft whose tensors are not there
        traits = dataclasses.replace(traits, draft=Draft())
    return _Subject(
        name=name,
        path=str(found.directory),
        served=found.directory.name,
        dims=found.dims,
        traits=traits,
        family=twin.family if twin else catalog.family_of(found.dims),
        weight_bytes=found.weight_bytes,
        default_tp=tp,
        default_len=length,
        local=True,
        model=twin,
        quantization=found.quantization,
    )


def _vllm(spec: ServingSpec, facts: Facts, device: Literal["cpu", "rocm"]) -> str:
    if spec.vllm:
        if not catalog.version(spec.vllm):
            raise refused(
                f"{spec.vllm!r} is not a version of vLLM",
                why="The plan has to know what that vLLM can do.",
                fix=f"Use --vllm {catalog.releases().default}.",
            )
        return spec.vllm
    if device == "rocm" and spec.image:
        named = image_version(spec.image)
        if named:
            return named
    # A plan for another machine is made for the version that the image of this bundle has.
    return facts.vllm_version or catalog.releases().default


def _image(spec: ServingSpec, vllm: str) -> str:
    if spec.image:
        return spec.image
    table = catalog.releases()
    if vllm != table.default:
        return f"{table.image.rpartition(':')[0]}:v{vllm}"
    return f"{table.image}@{table.image_digest}" if table.image_digest else table.image


def _default_tp(
    device: Literal["cpu", "rocm"], subject: _Subject, profile: Profile, gpus: tuple[str, ...] | None
) -> int:
    wanted = profile.tp or subject.default_tp
    if device == "cpu":
        return 1
    if not gpus:
        return wanted
    legal = rules.legal_tp(subject.dims, subject.traits.fp8_block)
    return max((tp for tp in legal if tp <= min(wanted, len(gpus))), default=1)


def _limits(
    profile: Profile, subject: _Subject, card: Card | None, tp: int, dp: int, ep: bool
) -> tuple[Limits, bool]:
    """The profile's limits for this model and card, and whether the weights leave little room."""
    roomy = card is None or card.hbm_bytes >= ROOMY_CARD_BYTES
    large = subject.weight_bytes > LARGE_WEIGHT_BYTES
    limits = (profile.large_roomy if roomy else profile.large) if large else profile.limits
    if card is None or profile.command is not None:
        return limits, False
    layout = Layout(
        subject.dims, subject.traits, card, catalog.releases().default, tp, 256, dp=dp, ep=ep,
        measured=subject.model.measured if subject.model else None,
    )  # fmt: skip
    if memory_plan.plan(layout).load < TIGHT_SHARE * card.hbm_bytes:
        return limits, False
    small = TIGHT_LARGE if large else TIGHT
    length = limits.max_model_len if isinstance(limits.max_model_len, str) else None
    return (
        Limits(
            min(limits.max_num_seqs, small.max_num_seqs),
            min(limits.max_num_batched_tokens, small.max_num_batched_tokens),
            length
            or min(limits.max_model_len or small.max_model_len or 0, small.max_model_len or 2**31)
            or None
            if limits.max_model_len or small.max_model_len
            else None,
        ),
        True,
    )


def _wanted_length(
    spec: ServingSpec, profile: Profile, subject: _Subject, limits: Limits, device: Literal["cpu", "rocm"]
) -> tuple[int, str]:
    """The length to begin with, and its reason. The memory plan may shorten it when nobody named one."""
    most = subject.dims.max_position_embeddings
    if isinstance(spec.max_model_len, int):
        return spec.max_model_len, "--max-model-len"
    if spec.max_model_len == "auto":
        return most, "the longest that fits (--max-model-len auto)"
    if profile.command is not None:
        return most, "the model's own, as the command names none"
    if device == "cpu" or limits.max_model_len is None:
        return min(subject.default_len, most), f"default for {subject.name} on {device}"
    if limits.max_model_len == "auto":
        return most, f"the longest that fits (profile {profile.name})"
    return min(limits.max_model_len, most), f"profile {profile.name}"


def _exact_flags(profile: Profile, spec: ServingSpec) -> list[Setting]:
    """The profile's command, with what the operator named by option in its place."""
    flags = {name: Setting(name, value, reason) for name, (value, reason) in (profile.command or {}).items()}
    if spec.host != ServingSpec().host:
        flags["host"] = Setting("host", spec.host, "the address to listen on (--host)")
    if spec.tp:
        flags["tensor-parallel-size"] = Setting("tensor-parallel-size", str(spec.tp), "--tp")
    if spec.port != DEFAULT_PORT:
        flags["port"] = Setting("port", str(spec.port), "the port to listen on (--port)")
    if isinstance(spec.max_model_len, int):
        flags["max-model-len"] = Setting("max-model-len", str(spec.max_model_len), "--max-model-len")
    return list(flags.values())


def _utilization(subject: _Subject, card: Card | None) -> str:
    roomy = card is not None and card.hbm_bytes >= ROOMY_CARD_BYTES
    return "0.85" if subject.family == "flash" and not roomy else "0.90"


def _holds_in_memory(facts: Facts, weight_bytes: int) -> bool:
    """Whether this host's memory holds the checkpoint with room, so that it can be read ahead."""
    if facts.host is None:
        return False
    memory = facts.host.memory
    return min(memory.total, memory.limit or memory.total) >= MEMORY_FACTOR * weight_bytes


def _check_numbers(values: Mapping[str, Value]) -> None:
    for name in _NUMBERS:
        value = values.get(name)
        if value is not None and (not isinstance(value, str) or not count(value)):
            raise refused(
                f"--set {name}={value if isinstance(value, str) else str(value).lower()} is not a number above 0",
                why=f"The memory plan is made with it (at most {DIGITS} digits), and vLLM would refuse it.",
                fix=f"Write --set {name}=8192, for example.",
            )
    share = values.get("gpu-memory-utilization")
    if share is not None:
        try:
            number = float(share) if isinstance(share, str) else 0.0
        except ValueError:
            number = 0.0
        if not 0 < number <= 1 or math.isnan(number):
            raise refused(
                f"--set gpu-memory-utilization={share} is not a share of memory",
                why="It is a number above 0 and at most 1.",
                fix="Write --set gpu-memory-utilization=0.9, for example.",
            )


def _layout(case: Case, subject: _Subject) -> Layout:
    """What the memory plan is made for, read from the flags as they stand."""
    backend = case.moe_backend or "auto"
    if backend in AITER_MOE:
        multiple = 256
    elif backend == "emulation":
        multiple = 32
    else:
        multiple = 128 if case.has("moe_pad_128") else 256
    speculating = bool(speculation(case).get("method"))
    if case.device == "cpu":
        space = count(case.variable("VLLM_CPU_KVCACHE_SPACE") or "") or recipes.CPU_KV_GIB
        # vllm/engine/arg_utils.py, v0.32.0: defaults of the API server on a CPU, where nothing is asynchronous
        batch, sequences = 2048 * case.tp, 128 * case.tp
        kv_bytes: int | None = space * 2**30
    else:
        batch = memory_plan.DEFAULT_MAX_NUM_BATCHED_TOKENS
        sequences = memory_plan.DEFAULT_MAX_NUM_SEQS
        kv_bytes = count(case.text("kv-cache-memory-bytes") or "")
    return Layout(
        dims=case.dims,
        traits=case.traits,
        card=case.card,
        vllm=case.vllm,
        tp=case.tp,
        max_model_len=case.max_model_len,
        max_num_batched_tokens=max(case.number("max-num-batched-tokens", batch), 1),
        max_num_seqs=max(case.number("max-num-seqs", sequences), 1),
        dp=max(case.dp, 1),
        pp=max(case.number("pipeline-parallel-size", 1), 1),
        ep=case.on("enable-expert-parallel"),
        experts_multiple=multiple if case.device == "rocm" else 1,
        draft=case.traits.draft if speculating else Draft(),
        draft_tokens=draft_tokens(case),
        utilization=float(case.text("gpu-memory-utilization") or memory_plan.DEFAULT_UTILIZATION),
        kv_bytes=kv_bytes,
        eager=runs_eager(case),
        asynchronous=case.device == "rocm" and case.flags.get("async-scheduling") is not False,
        measured=subject.model.measured if subject.model else None,
    )


def _with_memory(case: Case, spec: ServingSpec, subject: _Subject) -> Case:
    """The case with its memory plan; a length that nobody named becomes the longest that fits."""
    memory = memory_plan.plan(_layout(case, subject))
    free_to_choose = spec.max_model_len in (None, "auto") and not case.exact and case.device == "rocm"
    if free_to_choose and not memory.fits and memory.longest >= rules.hardware.MIN_MODEL_LEN:
        flags = {**case.flags, "max-model-len": str(memory.longest)}
        reasons = {**case.reasons, "max-model-len": f"the longest that fits; {case.max_model_len} does not"}
        case = dataclasses.replace(case, max_model_len=memory.longest, flags=flags, reasons=reasons)
        memory = memory_plan.plan(_layout(case, subject))
    return dataclasses.replace(case, memory=memory)


def _fewer_sequences(case: Case, memory: Memory) -> Case:
    """The plan's own number of sequences, lowered to what the cache holds."""
    planned = case.number("max-num-seqs", memory_plan.DEFAULT_MAX_NUM_SEQS)
    if planned <= memory.sequences:
        return case
    reason = f"what the cache holds at a quarter of max-model-len each (the recipe has {planned})"
    return dataclasses.replace(
        case,
        flags={**case.flags, "max-num-seqs": str(memory.sequences)},
        reasons={**case.reasons, "max-num-seqs": reason},
    )


def _final_flag(
    name: str, value: Value, planned: Mapping[str, Setting], spec: ServingSpec, case: Case
) -> tuple[str, Setting]:
    """A flag as the plan prints it, with the reason of whoever decided it last. The first item is the name to
    sort by."""
    ours = planned.get(name)
    if name in case.reasons:
        reason = case.reasons[name]
    elif name in spec.overrides:
        reason = "set by you (--set)"
        if ours:
            reason += f"; the plan had {'on' if ours.value is True else ours.value}"
    else:
        reason = ours.reason if ours else ""
    if value is False:
        return name, Setting(f"no-{name}", True, reason)
    return name, Setting(name, value, reason)


def _final_variable(setting: Setting, spec: ServingSpec, facts: Facts, case: Case) -> Setting:
    if setting.name in case.reasons:
        return Setting(setting.name, case.env[setting.name], case.reasons[setting.name])
    theirs = case.environ.get(setting.name)
    if theirs is None or theirs == setting.value:
        return setting
    if setting.name in spec.env:
        return Setting(setting.name, theirs, f"set by you (--env); the plan had {setting.value}")
    reason = f"from your environment; the plan had {setting.value} ({setting.reason})"
    return Setting(setting.name, theirs, reason, theirs=True)


def _deployment(case: Case, subject: _Subject, ready: int) -> Deployment:
    """What surrounds the server, with everything decided that the operator left open."""
    asked = case.deployment
    shm = asked.shm_bytes or (SHM_BYTES if case.device == "rocm" else 2**30)
    if case.device == "rocm":
        host = int(MEMORY_FACTOR * case.weight_bytes) + (ENGRAM_BYTES if case.v41 else 0)
    else:
        host = 3 * 2**30 + (case.tp - 1) * 3 * 2**29
    defaults = Deployment(
        name="dsv4",
        replicas=1,
        gpu_resource=GPU_RESOURCE,
        shm_bytes=shm,
        memory_request_bytes=host + shm,
        startup_budget_s=ready,
        liveness_timeout_s=15,
        pre_stop_s=15,
        grace_s=sum(grace_parts(case)),
        max_surge=0,
        max_unavailable=1,
        service_links=False,
        egress=not subject.local,
        cached=subject.local,
    )
    return dataclasses.replace(
        defaults,
        **{
            field.name: value
            for field in dataclasses.fields(asked)
            if (value := getattr(asked, field.name)) is not None
        },
    )


def _called(subject: _Subject, facts: Facts) -> str:
    if subject.name == TINY:
        return "the tiny DeepSeek-V4 (random weights: its answers make no sense, everything else is real)"
    return f"the checkpoint in {facts.checkpoint.directory}" if facts.checkpoint else subject.name


def _text(name: str, value: Value) -> str:
    if isinstance(value, str):
        return value
    raise refused(
        f"--set {name} needs a value that is neither true nor false",
        why="It is not a switch.",
        fix=f"Write --set {name}=VALUE, or leave it out.",
    )


def _seconds(value: str) -> int:
    found = seconds(value)
    if found is not None:
        return found
    raise refused(
        f"--set shutdown-timeout={value} is not a number of seconds",
        why="vLLM takes whole seconds, 0 for none.",
        fix="Write --set shutdown-timeout=30.",
    )
