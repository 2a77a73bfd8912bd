"""vLLM's own log lines as the stages that a waiting person understands.

In: one log line after the other, from any of vLLM's processes. Out: each stage once, in order, as soon as a
line shows that it is reached. Wordings are those of vLLM 0.32.0 (default_loader.py, cpu_model_runner.py,
gpu/model_runner.py, kv_cache_utils.py, core.py, api_server/entry.py under
https://github.com/vllm-project/vllm/tree/v0.32.0/vllm) and of rocm_patches/plugin.py.
"""

from __future__ import annotations

import dataclasses
import enum
import re

from dsv4_deploy.serve.logfile import message


class Stage(enum.IntEnum):
    """How far a server has come. Later stages include the earlier ones."""

    STARTED = 0
    PLUGIN = 1
    LOADING = 2
    LOADED = 3
    ENGINE = 4
    LISTENING = 5
    READY = 6
    FIRST_TOKEN = 7


TITLES = {
    Stage.STARTED: "vLLM process started",
    Stage.PLUGIN: "plugin rocm_patches loaded",
    Stage.LOADING: "loading weights",
    Stage.LOADED: "weights loaded",
    Stage.ENGINE: "engine ready",
    Stage.LISTENING: "server listening",
    Stage.READY: "server ready",
    Stage.FIRST_TOKEN: "first token",
}

_SIGNS: tuple[tuple[Stage, re.Pattern[str]], ...] = (
    (Stage.PLUGIN, re.compile(r"^rocm_patches active\b[^(]*(?P<detail>\([^()]*\))?")),
    (Stage.LOADING, re.compile(r"^(Starting to load model\b|Loading model from scratch)")),
    (Stage.LOADED, re.compile(r"^Loading weights took (?P<detail>[\d.]+ seconds)")),
    (Stage.LOADED, re.compile(r"^Model loading took (?P<detail>.+)$")),
    (Stage.ENGINE, re.compile(r"^init engine \(.*?\) took (?P<detail>[\d.]+ s)")),
    (Stage.LISTENING, re.compile(r"^(Starting vLLM server on|(INFO:\s+)?Application startup complete)")),
)
_SHARDS = re.compile(
    r"^Loading safetensors checkpoint shards.*?\b(?P<percent>\d+)% Completed \| (?P<shards>\d+/\d+)"
)
_KV_CACHE = re.compile(r"^(?:\S+ )?KV cache size: (?P<tokens>[\d,]+) tokens")


@dataclasses.dataclass(frozen=True)
class Event:
    """A stage that was just reached, with a detail from the log ("" for none)."""

    stage: Stage
    detail: str = ""


class Progress:
    """Turns log lines into stages. `activity` says what vLLM does between two of them, for a live display."""

    def __init__(self) -> None:
        self.reached: Stage | None = None
        self.activity = ""
        self._kv_cache = ""

    def feed(self, line: str) -> Event | None:
        """The stage that this line shows to be reached, when it is a new one."""
        text = message(line)
        if shards := _SHARDS.match(text):
            event = self.reach(Stage.LOADING)
            if self.reached is Stage.LOADING:
                self.activity = f"{shards['shards']} files, {shards['percent']} %"
            return event
        if kv_cache := _KV_CACHE.match(text):
            self._kv_cache = f"KV cache for {kv_cache['tokens']} tokens"
            return None
        for stage, sign in _SIGNS:
            if match := sign.match(text):
                detail = match.groupdict().get("detail") or ""
                if stage is Stage.ENGINE and self._kv_cache:
                    detail = self._kv_cache
                return self.reach(stage, detail)
        return None

    def reach(self, stage: Stage, detail: str = "") -> Event | None:
        """Note a stage; None when it, or a later one, was reached before."""
        if self.reached is not None and stage <= self.reached:
            return None
        self.reached = stage
        self.activity = ""
        return Event(stage, detail.removeprefix("(").removesuffix(")"))
