"""vllm_flags.yaml and variables.yaml: what vLLM's command line and environment look like, without importing
vLLM. Out: `VllmFlags` for reading `--set`, and the variables of others (ROCm, AITER, Hugging Face) that a
plan may set, each with the page that documents it.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping

from dsv4_deploy.catalog.document import load

VLLM_FLAGS_FILE = pathlib.Path(__file__).with_name("vllm_flags.yaml")
VARIABLES_FILE = pathlib.Path(__file__).with_name("variables.yaml")


@dataclasses.dataclass(frozen=True)
class VllmFlags:
    """What `--set` has to know about vLLM's command line. Names are without leading dashes."""

    switches_with_no_form: frozenset[str]
    switches: frozenset[str]
    valued: frozenset[str]
    aliases: Mapping[str, str]

    def knows(self, name: str) -> bool:
        """Whether vLLM 0.32 has a flag of that name (what follows a dot is a key inside its value)."""
        head = name.partition(".")[0]
        return head in self.valued or head in self.switches or head in self.switches_with_no_form


@functools.cache
def vllm_flags() -> VllmFlags:
    """vLLM's switches and the other spellings of its flags."""
    root = load(VLLM_FLAGS_FILE)
    root.only("switches_with_no_form", "switches", "valued", "aliases")
    return VllmFlags(
        switches_with_no_form=frozenset(item.text() for item in root.child("switches_with_no_form").items()),
        switches=frozenset(item.text() for item in root.child("switches").items()),
        valued=frozenset(root.child("valued").text().split()),
        aliases={name: node.text() for name, node in root.child("aliases").pairs()},
    )


@functools.cache
def other_variables() -> Mapping[str, str]:
    """Environment variables that are not vLLM's own: name -> the public page that documents it."""
    root = load(VARIABLES_FILE)
    root.only("variables")
    return {name: node.link() for name, node in root.child("variables").unique_pairs()}
