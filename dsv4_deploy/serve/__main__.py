"""`python -m dsv4_deploy.serve PORT`: the supervisor of what `up` has recorded for that port, in this process.

In: the record in the state directory, and DSV4_INSTANCE, which must name it. Out: the supervisor's exit code.
`up` starts it in a session of its own; people use `dsv4-deploy serve`.
"""

from __future__ import annotations

import dataclasses
import os
import sys

from dsv4_deploy.errors import DeployError, render
from dsv4_deploy.plan.watch import Watch
from dsv4_deploy.serve import procs, state
from dsv4_deploy.triage.diagnosis import TERMINATION_LOG


def main() -> int:
    from dsv4_deploy.serve import endpoints, supervisor

    store = state.Store(state.root(os.environ), lambda text: print(f"warning: {text}", file=sys.stderr))
    try:
        record = store.load(int(sys.argv[1]))
        if record is None or record.instance != os.environ.get(procs.MARKER):
            raise DeployError(
                f"nothing is recorded for port {sys.argv[1]}",
                why="The deployment was stopped, or replaced, before it had begun.",
            )
        # `up` writes this process's identity into the record as well, but maybe after it was read here.
        me = procs.identify(os.getpid())
        record = dataclasses.replace(record, pid=os.getpid(), start_ticks=me.start_ticks if me else 0)
        watch = Watch(**record.watch)
        listener = endpoints.bind(watch.host, watch.port)
        return supervisor.supervise(record, store, listener, passed_on=None, termination_log=TERMINATION_LOG)
    except DeployError as error:
        print(render(error), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
