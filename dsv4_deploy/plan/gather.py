"""Facts for a plan: what this machine and the checkpoint are, as far as the plan looks at them.

In: a ServingSpec and the environment. Out: `Facts`. Reads only; needs neither a GPU nor vLLM.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
from collections.abc import Mapping

from dsv4_deploy import catalog
from dsv4_deploy.facts import checkpoint, host
from dsv4_deploy.plan.plan import choose_device, default_model
from dsv4_deploy.plan.settings import Facts
from dsv4_deploy.spec import ServingSpec

# Where vLLM, its compilers and the hub write, and the directory under ~/.cache that they get instead.
CACHES: Mapping[str, str] = {
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
}


def gather(spec: ServingSpec, environ: Mapping[str, str], *, dry_run: bool) -> Facts:
    """Look at this host, or only at the checkpoint when the plan is for other hardware.

    A dry run for AMD GPUs on a host without any is a plan for another machine. Raises DeployError for a
    checkpoint directory that cannot be used.
    """
    from dsv4_deploy.serve import command, tiny_cache

    here = host.read()
    device, _ = choose_device(spec, here.gfx_names)
    name = spec.model or default_model(device)
    local = None
    named = pathlib.Path(name)
    if name not in catalog.models() and (checkpoint.is_directory(named) or name.startswith((".", "/", "~"))):
        local = checkpoint.read(checkpoint.expanded(name).absolute())
    elsewhere = bool(spec.gpu) or (dry_run and device == "rocm" and not here.gpus)
    return Facts(
        gpus=None if elsewhere else here.gfx_names,
        vllm_version=None if elsewhere else command.installed_version(),
        checkpoint=local,
        tiny_directory=tiny_cache.directory(environ),
        environ=environ,
        host=None if elsewhere else here,
        aiter_version=None if elsewhere else _version("aiter", "amd-aiter"),
        unwritable={} if elsewhere else unwritable_caches(environ),
    )


def unwritable_caches(environ: Mapping[str, str]) -> dict[str, str]:
    """The cache variables that name a directory which cannot be written, each with one that can."""
    home = pathlib.Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    found = {}
    for name, directory in CACHES.items():
        named = environ.get(name)
        if named and not _writable(pathlib.Path(named)):
            found[name] = str(home / directory)
    return found


def _writable(path: pathlib.Path) -> bool:
    """Whether files can be made there, or in the nearest directory above that exists."""
    for directory in (path, *path.parents):
        if directory.exists():
            return (
                directory.is_dir() and os.access(directory, os.W_OK | os.X_OK) and not _read_only(directory)
            )
    return False


def _read_only(directory: pathlib.Path) -> bool:
    # Root passes access() on every mode, but not on a volume that is mounted read-only.
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)


def _version(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
