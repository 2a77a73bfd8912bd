"""Reads a Secret in Kubernetes' protobuf form, which is how helm writes its releases.

In: the request's bytes. Out: the object as JSON would have it. The form:
https://kubernetes.io/docs/reference/using-api/api-concepts/#protobuf-encoding; the field numbers: `generated.proto` of
api/core/v1 and apimachinery/meta/v1. Nothing else of it is needed here.
"""

from __future__ import annotations

import base64
from typing import Any

MAGIC = b"k8s\0"


def secret(data: bytes) -> dict[str, Any]:
    """The Secret in an envelope of type runtime.Unknown."""
    (raw,) = _fields(data.removeprefix(MAGIC))[2]
    fields = _fields(raw)
    meta = _fields(fields[1][0])
    names = {1: "name", 3: "namespace", 6: "resourceVersion"}
    metadata: dict[str, Any] = {
        name: meta[number][0].decode() for number, name in names.items() if meta.get(number)
    }
    metadata["labels"] = {key: value.decode() for key, value in _map(meta.get(11, [])).items()}
    content = {key: base64.b64encode(value).decode() for key, value in _map(fields.get(2, [])).items()}
    kind = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": content}
    return {**kind, "type": fields[3][0].decode()} if fields.get(3) else kind


def _map(entries: list[bytes]) -> dict[str, bytes]:
    found = {}
    for entry in entries:
        fields = _fields(entry)
        found[fields[1][0].decode()] = fields.get(2, [b""])[0]
    return found


def _fields(data: bytes) -> dict[int, list[bytes]]:
    """Field number -> its length-delimited values; numbers are passed over."""
    found: dict[int, list[bytes]] = {}
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        if tag & 7 == 0:
            _, place = _varint(data, place)
            continue
        assert tag & 7 == 2, f"wire type {tag & 7}"
        size, place = _varint(data, place)
        found.setdefault(tag >> 3, []).append(data[place : place + size])
        place += size
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        shift, place = shift + 7, place + 1
        if byte < 128:
            return value, place
