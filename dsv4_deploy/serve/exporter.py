"""The supervisor's own metrics, in Prometheus's text form, with vLLM's behind them when that is wished.

In: events of the supervisor. Out: the body of /metrics. Names start with dsv4_; those of vLLM with vllm:.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dsv4_deploy.serve.counters import patch_lines
from dsv4_deploy.serve.health import Health, Phase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# A canary is one token: 5 ms on a GPU, tens of milliseconds on a CPU, seconds when something is wrong.
_LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Exporter:
    """One registry of its own, so that nothing of the process's default registry comes in."""

    def __init__(self, *, passthrough: bool) -> None:
        self._passthrough = passthrough
        self._vllm = b""
        registry = self._registry = CollectorRegistry()
        self._startup = Gauge("dsv4_startup", "1 when /startupz answers 200.", registry=registry)
        self._ready = Gauge("dsv4_ready", "1 when /readyz answers 200.", registry=registry)
        self._live = Gauge("dsv4_live", "1 when /livez answers 200.", registry=registry)
        self._draining = Gauge("dsv4_draining", "1 from SIGTERM on.", registry=registry)
        self._progress_age = Gauge(
            "dsv4_progress_age_seconds",
            "How long work has been waiting without any movement; 0 while it moves or there is none.",
            registry=registry,
        )
        self._pending = Gauge(
            "dsv4_pending_requests", "Requests that vLLM's engines run or hold.", registry=registry
        )
        self.canaries = Counter("dsv4_canaries", "Canaries by result.", ["result"], registry=registry)
        self.canary_latency = Histogram(
            "dsv4_canary_latency_seconds",
            "Answered canaries, from request to answer.",
            buckets=_LATENCY_BUCKETS,
            registry=registry,
        )
        self.canary_success = Gauge(
            "dsv4_canary_last_success_timestamp_seconds",
            "When the last canary was answered, in seconds since the epoch; 0 for never.",
            registry=registry,
        )
        self.restarts = Counter("dsv4_restarts", "How often vLLM was started again.", registry=registry)
        self.warm_up = Gauge(
            "dsv4_warm_up_seconds", "The warm-up's requests, by prompt.", ["prompt"], registry=registry
        )
        self.unread = Counter(
            "dsv4_polls_failed", "Looks at vLLM's metrics that got no answer.", registry=registry
        )
        for result in ("ok", "failed", "refused"):
            self.canaries.labels(result)

    def vllm(self, text: bytes) -> None:
        """What vLLM's /metrics said last; empty when it does not answer, so that old values do not look new."""
        self._vllm = text

    def body(self, health: Health) -> bytes:
        """The answer to a scrape."""
        self._startup.set(health.startup().ok)
        self._ready.set(health.ready().ok)
        self._live.set(health.live().ok)
        self._draining.set(health.phase in (Phase.DRAINING, Phase.STOPPING))
        self._progress_age.set(health.stalled_s())
        self._pending.set(health.pending())
        own: bytes = generate_latest(self._registry)
        return own + (self._vllm if self._passthrough else patch_lines(self._vllm))
