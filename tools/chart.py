"""Writes what the Helm chart derives from other files: values.schema.json and README.md from the comments of
values.yaml, files/keys.yaml too, files/gpus.yaml from the catalog, profiles/ from the plan.

In: helm/dsv4/values.yaml and dsv4_deploy. Out: those files; with --check nothing is written, and a stale one is an
error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dsv4_deploy import catalog
from dsv4_deploy.plan.gather import gather
from dsv4_deploy.plan.plan import make_plan
from dsv4_deploy.render import helm_values
from dsv4_deploy.render.source import Source
from dsv4_deploy.spec import ServingSpec

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "dsv4"

# Kubernetes' own rules for names and labels:
# https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and .../labels/
_NAME = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DNS = rf"{_NAME}(\.{_NAME})*"
_LABEL_VALUE = "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"
_QUALIFIED = rf"^({_DNS}/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
_PATH = "(/[A-Za-z0-9_][A-Za-z0-9._-]*)+"
_PORT = "[1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
_ADDRESS = rf"https?://[A-Za-z0-9.-]+(:({_PORT}))?(/[A-Za-z0-9._~/-]*)?"
_QUANTITY = r"^[0-9]+(\.[0-9]{1,3})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

DEFINITIONS: Mapping[str, Any] = {
    "name": {"type": "string", "pattern": f"^{_DNS}$", "maxLength": 63},
    "dnsLabel": {"type": "string", "pattern": f"^{_NAME}$", "maxLength": 63},
    "nameOrEmpty": {"type": "string", "pattern": f"^({_DNS})?$", "maxLength": 63},
    "host": {"type": "string", "pattern": rf"^(\*\.)?{_DNS}$", "maxLength": 253},
    "hostOrEmpty": {"type": "string", "pattern": rf"^((\*\.)?{_DNS})?$", "maxLength": 253},
    "absolutePath": {"type": "string", "pattern": f"^{_PATH}$", "maxLength": 512},
    "absolutePathOrEmpty": {"type": "string", "pattern": f"^({_PATH})?$", "maxLength": 512},
    "addressOrEmpty": {"type": "string", "pattern": f"^({_ADDRESS})?$", "maxLength": 512},
    "labelValue": {"type": "string", "pattern": _LABEL_VALUE, "maxLength": 63},
    "port": {"type": "integer", "minimum": 1, "maximum": 65535},
    "duration": {"type": "string", "pattern": "^[1-9][0-9]{0,3}(s|m)$"},
    "variable": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$", "maxLength": 128},
    "secretKey": {"type": "string", "pattern": "^[-._a-zA-Z0-9]+$", "maxLength": 253},
    "qualifiedName": {"type": "string", "pattern": _QUALIFIED, "maxLength": 253},
    "labels": {
        "type": "object",
        "propertyNames": {"pattern": _QUALIFIED, "maxLength": 128},
        "additionalProperties": {"$ref": "#/definitions/labelValue"},
    },
    "annotations": {
        "type": "object",
        "propertyNames": {"pattern": _QUALIFIED, "maxLength": 128},
        "additionalProperties": {"type": "string"},
    },
    "quantities": {
        "type": "object",
        "propertyNames": {"pattern": _QUALIFIED, "maxLength": 128},
        "additionalProperties": {"type": "string", "pattern": _QUANTITY},
    },
    "resources": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "limits": {"$ref": "#/definitions/quantities"},
            "requests": {"$ref": "#/definitions/quantities"},
        },
    },
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}

INTRODUCTION = """\
# dsv4

DeepSeek-V4 with vLLM on AMD MI300X, MI308X and MI325X: a Helm chart for the dsv4-deploy image. Nothing of it has run
on AMD hardware; [docs/kubernetes/install.md](../../docs/kubernetes/install.md) says what was checked, and how to
install.

```
helm install dsv4 helm/dsv4 -f helm/dsv4/profiles/mi300x/flash-tp4.yaml \\
    --set image.repository=REGISTRY/dsv4-deploy --set model.source.claim=CLAIM
```

This page is written by `make chart` from [values.yaml](values.yaml).
"""


@dataclasses.dataclass
class Value:
    """One documented key: its dotted path, default, comment, schema annotation and, for a section, the keys inside."""

    path: tuple[str, ...]
    default: Any
    text: str
    schema: dict[str, Any]
    section: str
    children: list[Value] = dataclasses.field(default_factory=list)


class ChartError(Exception):
    """Something in values.yaml that cannot be documented, with its line."""


def parse(text: str) -> list[Value]:
    """The keys of values.yaml in order, each with the comment above it. Raises ChartError.

    Only block style is looked into: what follows a key on its own line (`{}`, `[]`, a list) is one value.
    """
    defaults = yaml.safe_load(text)
    top: list[Value] = []
    stack: list[tuple[int, list[Value], Any, tuple[str, ...]]] = [(-1, top, defaults, ())]
    comment: list[str] = []
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped.startswith("## "):
            section, comment = stripped[3:], []
        elif stripped.startswith("#"):
            comment.append(stripped[1:].strip())
        elif not stripped:
            comment = []
        elif match := re.match(r"^( *)([A-Za-z_][A-Za-z0-9_]*):(?: (.*))?$", line):
            indent = len(match[1])
            while stack[-1][0] >= indent:
                stack.pop()
            _, siblings, values, parent = stack[-1]
            if not isinstance(values, dict) or match[2] not in values:
                continue  # a line inside a list or a plain map, which is one value
            value = _value(number, (*parent, match[2]), values[match[2]], comment, section)
            comment = []
            siblings.append(value)
            if match[3] is None and isinstance(value.default, dict) and not value.schema:
                stack.append((indent, value.children, value.default, value.path))
            else:
                stack.append((indent, [], None, value.path))
    return top


def _value(number: int, path: tuple[str, ...], default: Any, comment: list[str], section: str) -> Value:
    notes = [line.removeprefix("@schema").strip() for line in comment if line.startswith("@schema")]
    text = " ".join(line for line in comment if not line.startswith("@schema"))
    try:
        schema = json.loads(notes[0]) if notes else {}
    except ValueError as error:
        raise ChartError(
            f"values.yaml line {number}: @schema of {'.'.join(path)} is no JSON: {error}"
        ) from error
    if not text and not isinstance(default, dict):
        raise ChartError(f"values.yaml line {number}: {'.'.join(path)} has no comment. Say what it is for.")
    return Value(path, default, text, schema, section)


def schema(values: list[Value]) -> dict[str, Any]:
    """The JSON schema (draft 7, which both helm 3 and 4 read). Unknown keys are errors everywhere. None is required,
    so that a file of an operator, which has a few of them, is valid by itself: keys() guards the whole."""
    definitions = {name: dict(one) for name, one in DEFINITIONS.items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart dsv4",
        "definitions": definitions,
        **_object(values, {"global": {"type": "object", "description": "Helm's own; not used."}}),
    }


def _object(values: list[Value], more: dict[str, Any]) -> dict[str, Any]:
    properties = {value.path[-1]: _property(value) for value in values}
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {**properties, **more},
    }


def _property(value: Value) -> dict[str, Any]:
    if value.children:
        return {**({"description": value.text} if value.text else {}), **_object(value.children, {})}
    if "$ref" in value.schema:
        # Draft 7 ignores everything beside a $ref.
        return {"description": value.text, "allOf": [value.schema]}
    found = {"description": value.text, **value.schema}
    if "type" not in found and "enum" not in found:
        found["type"] = _TYPES[type(value.default)]
    return found


def readme(values: list[Value]) -> str:
    """The page: one table per section."""
    lines = [INTRODUCTION]
    section = None
    for value in _rows(values):
        if value.section != section:
            section = value.section
            lines += [f"## {section}", "", "| value | default | |", "|---|---|---|"]
        default = "" if value.children else f"`{_cell(json.dumps(value.default, ensure_ascii=False))}`"
        lines.append(f"| `{'.'.join(value.path)}` | {default} | {_cell(value.text)} |")
    text = "\n".join(lines) + "\n"
    return re.sub(r"(?<!\n)\n## ", "\n\n## ", text)


def _rows(values: list[Value]) -> list[Value]:
    """The rows of the tables: every value, and before a group's members the group, if something is said about it."""
    found = []
    for value in values:
        if value.children:
            found += [value] if value.text else []
            found += _rows(value.children)
        else:
            found.append(value)
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def keys(values: list[Value]) -> str:
    """files/keys.yaml: the path of every value, parents first. The chart refuses when one is missing."""
    lines = ["# Written by `make chart` from values.yaml; do not edit."]

    def walk(some: list[Value]) -> None:
        for value in some:
            lines.append(f"- {'.'.join(value.path)}")
            walk(value.children)

    walk(values)
    return "\n".join(lines) + "\n"


def gpus() -> str:
    """files/gpus.yaml: what the templates need of the catalog's cards."""
    lines = ["# Written by `make chart` from dsv4_deploy/catalog/gpus.yaml; do not edit."]
    for card in catalog.cards().values():
        if card.target:
            lines += [
                f"{card.name}:",
                f"  deviceIds: {json.dumps(list(card.device_ids))}",
                f"  vfDeviceIds: {json.dumps(list(card.vf_device_ids))}",
                f"  hbmGiB: {card.hbm_bytes / 2**30:.1f}",
            ]
    return "\n".join(lines) + "\n"


PROFILES = (
    ("flash-tp4", "deepseek-v4-flash", 4),
    ("flash-tp8", "deepseek-v4-flash", 8),
    ("pro-tp8", "deepseek-v4-pro", 8),
)


def profiles() -> dict[Path, str]:
    """One file per card and profile: what `dsv4-deploy render helm-values` writes for it."""
    found = {}
    for card in catalog.cards().values():
        for name, model, tp in PROFILES if card.target else ():
            spec = ServingSpec(model=model, tp=tp, device="rocm", gpu=card.name, gpu_count=8)
            plan = make_plan(spec, gather(spec, {}, dry_run=True))
            command = f"dsv4-deploy render helm-values --model {model} --tp {tp} --gpu {card.name}:8"
            text = helm_values.render(Source(plan, spec, command))
            found[CHART / "profiles" / card.name / f"{name}.yaml"] = text
    return found


def files() -> dict[Path, str]:
    """Every generated file with what it should hold."""
    values = parse((CHART / "values.yaml").read_text())
    return {
        CHART / "values.schema.json": json.dumps(schema(values), indent=1, ensure_ascii=False) + "\n",
        CHART / "README.md": readme(values),
        CHART / "files" / "gpus.yaml": gpus(),
        CHART / "files" / "keys.yaml": keys(values),
        **profiles(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    check = parser.parse_args().check
    try:
        wanted = files()
    except ChartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"error: {path.relative_to(ROOT)} is stale. Run `make chart`.", file=sys.stderr)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(wanted[path])
        temporary.replace(path)
        print(f"wrote {path.relative_to(ROOT)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
