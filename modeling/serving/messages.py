"""The messages of a chat, checked."""

from typing import Any

from .errors import wrong
from .fields import Check, only, string, take

MOST_MESSAGES = 4096
ROLES = "system", "developer", "user", "assistant"


def messages(name: str, value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not 0 < len(value) <= MOST_MESSAGES:
        raise wrong(name, value, f"an array of 1 to {MOST_MESSAGES} messages")
    return [message(f"{name}[{i}]", one) for i, one in enumerate(value)]


def message(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong(name, value, "an object with role and content")
    checks: dict[str, Check] = {
        "role": string(), "content": content, "name": string(1, 64),
        "refusal": only(), "tool_calls": only([]), "function_call": only(), "audio": only(),
        "annotations": only([]), "tool_call_id": only(),
    }  # fmt: skip
    taken = take(value, checks, f"{name}.")
    if taken.get("role") not in ROLES:
        raise wrong(f"{name}.role", value.get("role"), f"one of {', '.join(ROLES)}")
    if "content" not in taken:
        raise wrong(f"{name}.content", None, "a string or an array of text parts")
    role = "system" if taken["role"] == "developer" else taken["role"]
    named = {"name": taken["name"]} if "name" in taken else {}
    return {"role": role, "content": taken["content"], **named}


def content(name: str, value: Any) -> str:
    if isinstance(value, str):
        return string()(name, value)
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "a string or an array of text parts")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise wrong(f"{name}[{i}]", part, 'a part of type "text"', "unsupported_parameter")
        taken = take(part, {"type": string(), "text": string()}, f"{name}[{i}].")
        if "text" not in taken:
            raise wrong(f"{name}[{i}].text", None, "a string")
        texts.append(taken["text"])
    return "".join(texts)
