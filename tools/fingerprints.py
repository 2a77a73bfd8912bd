"""Rewrites rocm_patches/fingerprints.json: digests of what the patches touch, for each supported vLLM. In:
the catalogue, and vLLM's sources for every release (`tools/vllm_sources.py`). Out: the file, and on stdout
what changed, so that a person looks at the new source before a patch is said to fit it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from vllm_sources import RELEASES, fetch

from rocm_patches import registry
from rocm_patches.patches import PATCHES


def digests(release: str, sources: registry.Sources) -> dict[str, dict[str, str]]:
    """What `registry.fingerprints` holds for one release. Raises ValueError where a target is missing."""
    files: dict[str, str] = {}
    symbols: dict[str, str] = {}
    for patch in PATCHES:
        if release not in patch.releases:
            continue
        for target in patch.targets:
            found = sources.digest(target)
            if found is None:
                raise ValueError(f"patch {patch.id}: {target.key} is not in vLLM {release}")
            symbols[target.key] = found
            files[target.file] = registry.file_digest((sources.root / target.file).read_bytes())
    return {"files": dict(sorted(files.items())), "symbols": dict(sorted(symbols.items()))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when it is stale")
    options = parser.parse_args()
    new = {release: digests(release, registry.Sources(fetch(release))) for release in RELEASES}
    path = registry.FINGERPRINTS
    old = json.loads(path.read_text()) if path.exists() else {}
    changes = []
    for release, kinds in new.items():
        before = old.get(release, {}).get("symbols", {})
        for key in sorted(kinds["symbols"].keys() | before.keys()):
            was, now = before.get(key), kinds["symbols"].get(key)
            if was != now:
                changes.append(f"{release}  {key}: {was or 'new'} -> {now or 'gone'}")
    print("\n".join(changes) or "No digest changed.")
    if options.check:
        return int(old != new)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
