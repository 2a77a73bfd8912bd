"""Facts as data: models, GPUs, releases and vLLM's flags, from the YAML files beside this module.

In: a YAML file. Out: frozen dataclasses. Whatever is wrong in a file is reported with its line and the
reason, never guessed around. Each value names its source in the file.
"""

from __future__ import annotations

from dsv4_deploy.catalog.card import Card, card_by_device_id, cards, find_card, load_cards
from dsv4_deploy.catalog.flags import VLLM_FLAGS_FILE, VllmFlags, other_variables, vllm_flags
from dsv4_deploy.catalog.model import (
    MODELS_FILE,
    Dims,
    Draft,
    Family,
    Model,
    Traits,
    dims_of,
    family_of,
    find_model,
    load_models,
    models,
    traits_of,
)
from dsv4_deploy.catalog.release import Releases, load_releases, releases, version

__all__ = [
    "MODELS_FILE",
    "VLLM_FLAGS_FILE",
    "Card",
    "Dims",
    "Draft",
    "Family",
    "Model",
    "Releases",
    "Traits",
    "VllmFlags",
    "card_by_device_id",
    "cards",
    "dims_of",
    "family_of",
    "find_card",
    "find_model",
    "load_cards",
    "load_models",
    "load_releases",
    "models",
    "other_variables",
    "releases",
    "traits_of",
    "version",
    "vllm_flags",
]
