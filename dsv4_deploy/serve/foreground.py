"""`dsv4-deploy serve`: this process becomes the supervisor, as the entry point of a container or a pod.

In: a Plan and a Watch. Out: the supervisor's exit code. What runs is recorded like a server of `up`, so status,
logs and down know it too.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable

from dsv4_deploy.errors import DeployError
from dsv4_deploy.plan.plan import Plan
from dsv4_deploy.plan.watch import Watch
from dsv4_deploy.serve import child, command, endpoints, probe, procs, state, supervisor, up
from dsv4_deploy.spec import ServingSpec


def serve(
    spec: ServingSpec,
    plan: Plan,
    watch: Watch,
    store: state.Store,
    note: Callable[[str], None],
    termination_log: pathlib.Path,
) -> int:
    """Run the deployment to its end. Raises DeployError when it cannot begin."""
    _fill_standard_descriptors()
    # A key that cannot be sent is told now, and not when the weights are loaded.
    probe.auth_headers()
    launcher = command.launcher(os.environ)
    with store.lock(plan.port, 0, lambda _holder: None) as locked:
        record = store.load(plan.port)
        if not locked or (record is not None and record.is_running()):
            raise DeployError(
                f"a server of dsv4-deploy runs, or is being started, on port {plan.port} already",
                why="`serve` is the entry point of a container: it begins where nothing runs.",
                fix=f"Use another --port, or stop the other one: dsv4-deploy down --port {plan.port}.",
            )
        if record is not None:
            for pid in child.stop(record.instance, record.leader, 0):
                note(f"ended process {pid}, left behind by an earlier run on port {plan.port}")
        up.check_ports(plan, watch)
        listener = endpoints.bind(watch.host, watch.port)
        me = procs.identify(os.getpid())
        record = dataclasses.replace(
            up.new_record(spec, plan, watch, launcher, store),
            pid=os.getpid(),
            start_ticks=me.start_ticks if me else 0,
        )
        store.save(record)
    return supervisor.supervise(record, store, listener, passed_on=1, termination_log=termination_log)


def _fill_standard_descriptors() -> None:
    """Whoever starts us with stdout closed (`>&-`) would have its number given to the next file that is opened,
    such as the state's lock, and vLLM's output written into that."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
