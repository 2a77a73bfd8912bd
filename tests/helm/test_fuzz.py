"""Whatever the schema accepts renders and is valid, or is refused by the chart's own words; and no text of an operator
breaks out of the place where it belongs."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helm import admission, chart, schemas

SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())
# Kubernetes' own structures, which are passed on as they are: their inside is the operator's.
PASSED_ON = {
    "podAffinity",
    "podAntiAffinity",
    "preferredNodes",
    "extraInitContainers",
    "extraContainers",
    "extraObjects",
}
PASSED_ON |= {
    "extraEnv",
    "extraEnvFrom",
    "extraVolumes",
    "extraVolumeMounts",
    "ingressFrom",
    "metricsFrom",
    "extraEgress",
}
PASSED_ON |= {"topologySpreadConstraints", "nodeMatchExpressions", "global"}

# U+0085 is not among them: Go's YAML writer, and so every chart's `toYaml`, makes a space of it.
HOSTILE = [
    '"',
    "'",
    "\\",
    "\n- injected",
    "\r\n",
    "\t",
    " # no comment",
    ": ",
    "{{ .Release.Name }}",
    "{{ fail `x` }}",
    "}}{{",
    "`id`",
    "$(id)",
    "${HOME}",
    "; rm -rf /",
    "*anchor",
    "&a",
    "!!python/object:os.system",
    "- ",
    "|",
    ">",
    "%",
    "@",
    "null",
    "true",
    "0x1F",
    "1e3",
    "\u2028",
    "ü漢🙂",
    "</script>",
    "<prefix>",
    "<job>",
]
hostile = st.lists(st.sampled_from(HOSTILE) | st.text(string.printable, max_size=5), max_size=6).map("".join)


def strategy(node: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a part of the schema accepts."""
    for part in node.get("allOf", []):
        return strategy(part)
    if "$ref" in node:
        return strategy(SCHEMA["definitions"][node["$ref"].rpartition("/")[2]])
    if "enum" in node:
        return st.sampled_from(node["enum"])
    kind = node.get("type", "string")
    if isinstance(kind, list):
        return st.one_of([strategy({**node, "type": one}) for one in kind])
    if kind == "object":
        return _object(node)
    if kind == "array":
        most = min(node.get("maxItems", 3), 3)
        return st.lists(
            strategy(node["items"]), min_size=node.get("minItems", 0), max_size=most, unique_by=json.dumps
        )
    if kind == "boolean":
        return st.booleans()
    if kind == "integer":
        return st.integers(node.get("minimum", 0), node.get("maximum", 2**31))
    if kind == "number":
        return st.floats(node.get("minimum", -1e9), node.get("maximum", 1e9), allow_nan=False)
    return _text(node)


def _text(node: Mapping[str, Any]) -> st.SearchStrategy[str]:
    longest = node.get("maxLength", 200)
    if "pattern" not in node:
        return hostile.filter(lambda text: len(text) <= longest)
    # "$" in a pattern also holds before a final line feed; JSON schema's does not.
    texts = st.from_regex(node["pattern"].replace("$", r"\Z"), alphabet=st.characters(codec="ascii"))
    return texts.filter(lambda text: len(text) <= longest)


def _object(node: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    properties = node.get("properties", {})
    required = {name: strategy(properties[name]) for name in node.get("required", [])}
    optional = {
        name: strategy(part)
        for name, part in properties.items()
        if name not in required | dict.fromkeys(PASSED_ON)
    }
    fixed = st.fixed_dictionaries(required, optional=optional)
    extra = node.get("additionalProperties")
    if not isinstance(extra, dict):
        return fixed
    names = strategy({"type": "string", **node.get("propertyNames", {})})
    return st.dictionaries(names, strategy(extra), max_size=3)


def changes() -> st.SearchStrategy[dict[str, Any]]:
    """A few sections of the values, each with some of its keys."""
    sections = {name: strategy(part) for name, part in SCHEMA["properties"].items() if name not in PASSED_ON}
    names = st.lists(st.sampled_from(sorted(sections)), min_size=1, max_size=5, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: sections[name] for name in chosen}))


SITUATIONS = [path for path in chart.ci_files() if path.stem not in ("extras-values", "image-volume-values")]
careful = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


@careful
@given(path=st.sampled_from(SITUATIONS), values=changes(), kube=st.sampled_from(("1.30", "1.33", "1.37")))
def test_what_the_schema_accepts_is_valid_or_refused_in_our_words(
    path: Any, values: dict[str, Any], kube: str
) -> None:
    try:
        objects = chart.template(path, values=values, kube=kube)
    except chart.RefusedError as refusal:
        assert "dsv4: " in str(refusal), f"{path.name} {json.dumps(values)}: {refusal}"
        return
    for item in objects:
        schemas.check(item, kube)
    admission.check(objects)


@settings(careful, max_examples=25)
@given(texts=st.lists(hostile, min_size=4, max_size=4))
def test_hostile_text_stays_where_it_belongs(texts: list[str]) -> None:
    argument, variable, annotation, setting = texts
    values = {
        "extraArgs": [argument],
        "env": {"HOSTILE": variable},
        "commonAnnotations": {"note": annotation},
        "settings": {"chat-template": setting},
    }
    plain = chart.template()
    objects = chart.template(values=values)
    assert [(item["kind"], item["metadata"]["name"]) for item in objects] == [
        (item["kind"], item["metadata"]["name"]) for item in plain
    ]
    server = chart.server(objects)
    assert server["args"][-1] == argument
    assert chart.variables(server)["HOSTILE"] == variable
    assert f"chat-template={setting}" in server["args"]
    for item in objects:
        assert item["metadata"]["annotations"]["note"] == annotation
    # No shell reads any of it: every command of ours is a list whose first word is a program.
    for one in (server, *chart.one(objects, "Pod")["spec"]["containers"]):
        assert one["command"][0] == "dsv4-deploy"
