"""DSML as DeepSeek-V4 writes it, by hand and independent of the code under test, and the ways that it goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

D = "｜DSML｜"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "ratio": {"type": "number"},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "options": {"type": "object", "properties": {"unit": {"type": "string"}, "depth": {}}},
                "anything": {},
                "level": {"anyOf": [{"$ref": "#/$defs/Level"}, {"type": "null"}]},
                "note": {"type": ["string", "null"]},
                "size": {"type": ["integer", "string"]},
            },
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}


def param(name: str, value: str, string: str | None = "true") -> str:
    attribute = "" if string is None else f' string="{string}"'
    return f'<{D}parameter name="{name}"{attribute}>{value}</{D}parameter>'


def invoke(name: str, *parameters: str) -> str:
    return f'<{D}invoke name="{name}">\n' + "".join(f"{one}\n" for one in parameters) + f"</{D}invoke>"


def block(*invokes: str, tag: str = "tool_calls") -> str:
    return f"<{D}{tag}>\n" + "\n".join(invokes) + f"\n</{D}{tag}>"


BERLIN = param("city", "Berlin")
CALL = invoke("get_weather", BERLIN, param("days", "3", "false"))
MEANT = ("get_weather", {"city": "Berlin", "days": 3})


@dataclass(frozen=True)
class Case:
    """One output of the model and what a client must get from it."""

    id: str
    text: str
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    content: str | None = None
    reasoning: str | None = None
    thinking: bool = False
    choice: str = "auto"  # none, auto, named, required
    incomplete: bool = False  # a call was begun that did not arrive whole
    stock: bool = False  # vLLM's own parser gives the same
    tools: bool = True


def value(
    id: str, name: str, text: str, meant: Any, string: str | None = "false", stock: bool = False
) -> Case:
    call = block(invoke("get_weather", param(name, text, string)))
    return Case(f"value {id}", call, [("get_weather", {name: meant})], stock=stock)


DEEP = "[" * 3000
HTML = '<p class="a">1 > 0 && "x" \\ \n\t</p>\n'

CASES = [
    # --- as documented ------------------------------------------------------------------------------
    Case("one call", block(CALL), [MEANT], stock=True),
    Case("text before", "Let me see.\n\n" + block(CALL), [MEANT], "Let me see.\n\n", stock=True),
    Case("blank before", "\n\n" + block(CALL), [MEANT], stock=True),
    Case("text after is not kept", block(CALL) + "\n\nDone.", [MEANT], stock=True),
    Case("two calls", block(CALL, invoke("clock")), [MEANT, ("clock", {})], stock=True),
    Case("two blocks", block(CALL) + "\n" + block(CALL), [MEANT, MEANT], stock=True),
    Case("no parameters", block(invoke("clock")), [("clock", {})], stock=True),
    Case(
        "no parameters, one line",
        f'<{D}tool_calls><{D}invoke name="clock"></{D}invoke></{D}tool_calls>',
        [("clock", {})],
        stock=True,
    ),
    Case(
        "unknown function",
        block(invoke("other", param("a", "1", "false"))),
        [("other", {"a": 1})],
        stock=True,
    ),
    Case("reasoning, then a call", "Hm.</think>\n\n" + block(CALL), [MEANT], None, "Hm.", True, stock=True),
    Case(
        "reasoning, text, a call", "Hm.</think>Yes." + block(CALL), [MEANT], "Yes.", "Hm.", True, stock=True
    ),
    Case("reasoning not closed", "Hm." + block(CALL), [MEANT], None, "Hm.", True, stock=True),
    Case("reasoning only", "Hm.</think>Four.", [], "Four.", "Hm.", True, stock=True),
    Case("opened twice", "<think>Hm.</think>Four.", [], "Four.", "Hm.", True, stock=True),
    Case("plain text", "a < b, c > d", [], "a < b, c > d", stock=True),
    # --- values -------------------------------------------------------------------------------------
    value("text", "city", 'say "hi"\n\t\\ 杭州 🙂', 'say "hi"\n\t\\ 杭州 🙂', "true", stock=True),
    value("markup", "city", HTML * 3, HTML * 3, "true", stock=True),
    value("empty text", "city", "", "", "true", stock=True),
    value("number as text", "city", "5", "5", "true", stock=True),
    value("number", "days", "3", 3, stock=True),
    value("negative", "ratio", "-2.5e-3", -0.0025, stock=True),
    value("boolean", "exact", "true", True, stock=True),
    value("list", "tags", '["a", "b\\n"]', ["a", "b\n"], stock=True),
    value(
        "object",
        "options",
        '{"unit": "c", "more": [1, {"x": null}]}',
        {"unit": "c", "more": [1, {"x": None}]},
        stock=True,
    ),
    value("text where a number is declared", "days", "7", 7, "true", stock=True),
    value("number where text is declared", "city", "7", "7", stock=True),
    value("null", "note", "null", None, stock=True),
    value("version where text is declared", "city", "1.10", "1.10"),
    value("exponent where text is declared", "city", "1e3", "1e3"),
    value(
        "long number where text is declared", "city", "10000000000000000000000.5", "10000000000000000000000.5"
    ),
    value("object where text is declared", "city", '{"a": 1}', '{"a": 1}'),
    value("list where text is declared", "city", "[1, 2]", "[1, 2]"),
    value("JSON text where text is declared", "city", '"a\\n"', "a\n", stock=True),
    value("null in words where text is allowed", "note", "null", "null", "true"),
    value("number as text where both are allowed", "size", "5", "5", "true"),
    value("number where both are allowed", "size", "5", 5, stock=True),
    value("no attribute, number", "days", "3", 3, None, stock=True),
    value("no attribute, text", "city", "Berlin", "Berlin", None, stock=True),
    value("number where nothing is declared", "anything", "5", 5),
    value("boolean where nothing is declared", "anything", "true", True),
    value("nested number where nothing is declared", "options", '{"depth": 2}', {"depth": 2}),
    value("number behind a $ref", "level", "2", 2),
    value("not declared at all", "colour", "2", 2, stock=True),
    value("not a number", "colour", "NaN", "NaN"),
    value("infinite", "colour", "1e999", "1e999"),
    value("half of a pair", "city", '"\\ud800"', "\ud800"),
    value("very deep", "tags", DEEP, DEEP),
    value("not JSON", "tags", "[1, 2", "[1, 2", stock=True),
    value("the mark in a value", "city", f"a{D}b<{D}c", f"a{D}b<{D}c", "true", stock=True),
    value("a start tag in a value", "city", f"x <{D}parameter y", f"x <{D}parameter y", "true", stock=True),
    value(
        "a block's tag in a value",
        "city",
        f"see </{D}tool_calls> there",
        f"see </{D}tool_calls> there",
        "true",
    ),
    value(
        "a call's tags in a value",
        "city",
        f'<{D}invoke name="x"> </{D}invoke>',
        f'<{D}invoke name="x"> </{D}invoke>',
        "true",
    ),
    value("thinking in a value", "city", "<think>a</think>b", "<think>a</think>b", "true"),
    # --- malformed, and what was meant is clear -----------------------------------------------------
    Case("no block tag", CALL, [MEANT], stock=True),
    Case("no opening block tag", CALL + f"\n</{D}tool_calls>", [MEANT], stock=True),
    Case("no closing block tag", f"<{D}tool_calls>\n{CALL}", [MEANT], stock=True),
    Case(
        "no opening block tag after reasoning", "Hm.</think>" + CALL, [MEANT], None, "Hm.", True, stock=True
    ),
    Case("tool block", block(CALL, tag="tool"), [MEANT], stock=True),
    Case("toolcalls block", block(CALL, tag="toolcalls"), [MEANT], stock=True),
    Case("V3.2's block", block(CALL, tag="function_calls"), [MEANT]),
    Case("ASCII bars", block(CALL).replace("｜", "|"), [MEANT]),
    Case(
        "call not closed, block is",
        f'<{D}tool_calls>\n<{D}invoke name="get_weather">\n{BERLIN}\n</{D}tool_calls>',
        [("get_weather", {"city": "Berlin"})],
        stock=True,
    ),
    Case(
        "call not closed, next begins",
        f'<{D}tool_calls>\n<{D}invoke name="get_weather">\n{BERLIN}\n{CALL}\n</{D}tool_calls>',
        [("get_weather", {"city": "Berlin"}), MEANT],
    ),
    Case(
        "parameter not closed, next begins",
        block(
            invoke(
                "get_weather", f'<{D}parameter name="city" string="true">Berlin', param("days", "3", "false")
            )
        ),
        [MEANT],
    ),
    Case(
        "number not closed, next begins",
        block(invoke("get_weather", f'<{D}parameter name="days" string="false">3', BERLIN)),
        [("get_weather", {"days": 3, "city": "Berlin"})],
        stock=True,
    ),
    Case("space in the tag", block(CALL).replace('get_weather">', 'get_weather" >'), [MEANT]),
    Case("another attribute", block(CALL).replace('string="false"', 'type="int" string="false"'), [MEANT]),
    Case(
        "JSON for parameters",
        block(f'<{D}invoke name="get_weather">\n{{"city": "Berlin", "days": "3"}}\n</{D}invoke>'),
        [MEANT],
    ),
    Case(
        "wrapped in arguments, JSON",
        block(invoke("get_weather", param("arguments", '{"city": "Berlin", "days": 3}', "false"))),
        [MEANT],
        stock=True,
    ),
    Case(
        "wrapped in arguments, text",
        block(invoke("get_weather", param("arguments", '{"city": "Berlin", "days": 3}'))),
        [MEANT],
    ),
    Case(
        "wrapped in input, and more",
        block(invoke("get_weather", param("input", "x"), BERLIN)),
        [("get_weather", {"input": "x", "city": "Berlin"})],
        stock=True,
    ),
    Case(
        "wrapper that is none",
        block(invoke("get_weather", param("input", '{"other": 1}'))),
        [("get_weather", {"input": '{"other": 1}'})],
        stock=True,
    ),
    # --- nothing to call ----------------------------------------------------------------------------
    Case("empty block", block() + "\nSorry.", [], "\nSorry."),
    Case("empty block behind a call", block(CALL) + block() + "\nSorry.", [MEANT], stock=True),
    Case("empty block between", "One. " + f"<{D}tool_calls></{D}tool_calls>" + "Two.", [], "One. Two."),
    Case("closing tags of nothing", f"So </{D}invoke></{D}tool_calls>it is.", [], "So it is."),
    Case("closing tag of no parameter", f"So </{D}parameter>it is.", [], "So it is."),
    Case("parameter of no call", f"So {BERLIN}it is.", [], "So it is."),
    Case("unknown tag", f'So <{D}result id="1">it is.', [], "So it is."),
    Case("the bare mark", f"So {D}it is.", [], "So it is."),
    Case(
        "thought about",
        f"I could use <{D}invoke.</think>No.",
        [],
        "No.",
        f"I could use <{D}invoke.",
        True,
        stock=True,
    ),
    # --- cut or malformed: incomplete ---------------------------------------------------------------
    Case("name not closed", f'<{D}tool_calls>\n<{D}invoke name="get_weather city: Berlin\n', incomplete=True),
    Case(
        "name that is none",
        block(f'<{D}invoke name="get_weather" city="Berlin">\n</{D}invoke>'),
        incomplete=True,
    ),
    Case(
        "prose for parameters",
        block(f'<{D}invoke name="get_weather">\nBerlin\n</{D}invoke>'),
        incomplete=True,
    ),
    Case(
        "parameter without a name",
        block(f'<{D}invoke name="get_weather">\n<{D}parameter>Berlin</{D}parameter>\n</{D}invoke>'),
        incomplete=True,
    ),
    Case(
        "last parameter not closed",
        block(f'<{D}invoke name="get_weather">\n<{D}parameter name="days" string="false">3</{D}invoke>'),
        incomplete=True,
    ),
    Case(
        "second call cut",
        block(CALL)[: -len(f"\n</{D}tool_calls>")] + f'\n<{D}invoke name="clock">\n',
        [MEANT],
        incomplete=True,
    ),
    Case("cut after reasoning", f"Hm.</think><{D}tool_calls>\n<{D}inv", [], None, "Hm.", True, stock=True),
    # --- the other choices --------------------------------------------------------------------------
    Case("none", block(CALL), [], choice="none", stock=True),
    Case("none, text before", "No tools.\n" + block(CALL), [], "No tools.\n", choice="none", stock=True),
    Case(
        "none, cut",
        f'Hi <{D}tool_calls>\n<{D}invoke name="get_weather">',
        [],
        "Hi ",
        choice="none",
        stock=True,
    ),
    Case(
        "none, after reasoning", "Hm.</think>" + block(CALL), [], None, "Hm.", True, choice="none", stock=True
    ),
    Case("no tools offered", block(CALL), [], tools=False, choice="none", stock=True),
    Case("named", block(CALL), [MEANT], choice="named", stock=True),
    Case(
        "named, after reasoning", "Hm.</think>" + block(CALL), [MEANT], None, "Hm.", True, "named", stock=True
    ),
    Case("named, empty block", block(), choice="named", stock=True),
    Case("required", block(CALL), [MEANT], choice="required", stock=True),
    Case("required, two", block(CALL, CALL), [MEANT, MEANT], choice="required", stock=True),
    Case("required, text only", "No.", [], "No.", choice="required", stock=True),
    Case("required, cut", f"<{D}tool_calls>\n" + CALL[:-5], choice="required", incomplete=True),
]
