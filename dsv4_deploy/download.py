"""One pinned revision of a model from the hub into a directory: resumed, checked against the hub's digests, marked.

In: repository, commit, directory. Out: the files and, when all of them are right, the file COMPLETE, which holds the
commit. Whoever needs the weights waits for that file, so a half-written model is never loaded. The transfer is
huggingface_hub's, which keeps partial files and goes on with them:
https://huggingface.co/docs/huggingface_hub/guides/download
"""

from __future__ import annotations

import os
import pathlib
import re
import time
from collections.abc import Callable

from dsv4_deploy.errors import DeployError, refused
from dsv4_deploy.facts import checkpoint

COMPLETE = ".dsv4-complete"
POLL_S = 5.0
SPEAK_S = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}")

Say = Callable[[str], None]


def fetch(repository: str, revision: str, directory: pathlib.Path, workers: int, say: Say) -> None:
    """Download, check and mark. Does nothing where the mark says that it is done.

    Raises DeployError for a revision that is no commit, a hub that does not give the files, and files that are not
    what the hub says they are.
    """
    if not _COMMIT.fullmatch(revision):
        raise refused(
            f"{revision!r} is no commit",
            why="A branch or tag can change under a running deployment.",
            fix=f"git ls-remote https://huggingface.co/{repository} main prints the commit, 40 hexadecimal digits.",
        )
    if marked(directory) == revision:
        say(f"{directory} holds {repository} at {revision[:12]} already.")
        return
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError as error:
        raise DeployError(
            "huggingface_hub is not installed here",
            why=f"The hub's own library does the transfer ({error}).",
            fix="Run it in the image, or: pip install 'huggingface_hub>=1.1'",
        ) from error

    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / COMPLETE).unlink(missing_ok=True)
        say(f"Fetching {repository} at {revision[:12]} into {directory} ({workers} files at a time).")
        snapshot_download(repository, revision=revision, local_dir=directory, max_workers=workers)
        say("Checking every file against the hub's digests.")
        found = HfApi().verify_repo_checksums(repository, revision=revision, local_dir=directory)
    except (HfHubHTTPError, HFValidationError) as error:
        raise DeployError(
            f"the hub does not give {repository} at {revision[:12]}",
            why=" ".join(str(error).split())[:300],
            fix="Check the names. A repository with a licence to accept needs HF_TOKEN; a mirror is HF_ENDPOINT.",
        ) from error
    except OSError as error:
        raise DeployError(
            f"{repository} could not be fetched completely",
            why=str(error) or type(error).__name__,
            fix="Run it again: it goes on where it stopped. A full disk or a lost connection are the usual causes.",
        ) from error
    wrong = [str(mismatch["path"]) for mismatch in found.mismatches] + [
        str(path) for path in found.missing_paths
    ]
    for path in wrong:
        # What is kept would be taken for finished the next time.
        (directory / path).unlink(missing_ok=True)
    if wrong:
        raise DeployError(
            f"{len(wrong)} file(s) are not what the hub has: {', '.join(wrong[:5])}",
            why="They were changed on the way or on the disk.",
            fix="They are removed. Run it again to fetch them anew; when it repeats, look at the disk.",
        )
    checkpoint.read(directory)
    _mark(directory, revision)


def wait(directory: pathlib.Path, say: Say) -> None:
    """Return when the directory is marked complete; say now and then that it is not."""
    spoken = -SPEAK_S
    while marked(directory) is None:
        now = time.monotonic()
        if now - spoken >= SPEAK_S:
            say(
                f"Waiting for {directory / COMPLETE}: the download's Job writes it when every file is checked."
            )
            spoken = now
        time.sleep(POLL_S)


def marked(directory: pathlib.Path) -> str | None:
    """The commit that is complete there, None if none is."""
    try:
        return (directory / COMPLETE).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def _mark(directory: pathlib.Path, revision: str) -> None:
    temporary = directory / f"{COMPLETE}.{os.getpid()}"
    temporary.write_text(f"{revision}\n", encoding="ascii")
    temporary.replace(directory / COMPLETE)
