# Copyright 2026 The luna-mega authors. Licensed under the Apache License, Version 2.0.
"""Validation of OpenAI-protocol requests before the handlers of transformers read them.

The handlers ignore some fields of the protocol and fail on others with an error 500, or after a stream has started.
A field is therefore either served, and its value is checked, or it is rejected unless its value changes nothing.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from luna_mega.errors import shown

LONGEST_STOP, MOST_STOPS = 256, 16
TEXT_PARTS = ("text", "input_text", "output_text")
# Arguments that the handlers or transformers pass.
_TEMPLATE_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
_TEMPLATE_ARGUMENTS |= {"load_audio_from_video", "messages"}


class RequestError(ValueError):
    """A request that cannot be served; `param` is the field at fault."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class Rule(NamedTuple):
    """A predicate of valid values and its description."""

    accepts: Callable[[Any], bool]
    description: str


class Endpoint(NamedTuple):
    """Fields that an endpoint serves, and the required one."""

    rules: Mapping[str, Rule]
    required: str


def _number(least: float, most: float) -> Rule:
    def accepts(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most

    return Rule(accepts, f"a number from {least} to {most}")


def _integer(least: int, most: int) -> Rule:
    def accepts(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

    return Rule(accepts, f"an integer from {least} to {most}")


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    valid = isinstance(texts, list) and len(texts) <= MOST_STOPS
    return valid and all(isinstance(text, str) and 1 <= len(text) <= LONGEST_STOP for text in texts)


def _is_bias(value: Any) -> bool:
    number = _number(-100, 100)
    return isinstance(value, dict) and all(
        re.fullmatch("[0-9]{1,9}", token) and number.accepts(bias) for token, bias in value.items()
    )


def _is_text(value: Any) -> bool:
    """Return whether `value` is a string or a list of text parts; a language model reads no other parts."""
    return isinstance(value, str) or isinstance(value, list) and all(map(_is_text_part, value))


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return (
        isinstance(function, dict) and isinstance(function.get("name"), str) and _is_object(function.get("arguments"))
    )


def _is_object(value: Any) -> bool:
    """Return whether `value` is an object or its JSON text."""
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except RequestError:
            return False
    return isinstance(value, dict)


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    calls, content = message.get("tool_calls") or [], message.get("content")
    if not isinstance(calls, list) or not all(map(_is_call, calls)):
        return False
    return content is None or _is_text(content)


def _is_item(item: Any) -> bool:
    """Return whether `item` is a message, a function call, its output or reasoning of the Responses API."""
    if not isinstance(item, dict) or "role" in item:
        return _is_message(item)
    kind, has_id = item.get("type"), isinstance(item.get("call_id"), str)
    if kind == "function_call":
        return has_id and _is_call(item)
    if kind == "function_call_output":
        return has_id and isinstance(item.get("output"), str)
    content = item.get("content") or []
    return (
        kind == "reasoning"
        and isinstance(content, list)
        and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content)
    )


def _is_input(value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str)
    if value and isinstance(value[0], dict) and "role" in value[0]:
        return all(map(_is_item, value))
    return bool(value) and all(map(_is_text_part, value))  # without a role, transformers reads one user message


def _is_tools(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(tool, dict) and isinstance(tool.get("function", tool), dict) and tool.get("type") == "function"
        for tool in value
    )


def _is_template_arguments(value: Any) -> bool:
    return isinstance(value, dict) and not _TEMPLATE_ARGUMENTS & value.keys()


TEXT = Rule(lambda value: isinstance(value, str), "a string")
FLAG = Rule(lambda value: isinstance(value, bool), "true or false")
COUNT = _integer(1, 2**31 - 1)
TEMPERATURE = Rule(lambda value: _number(0, 100).accepts(value) and not 0 < value < 0.01, "0, or from 0.01 to 100")
TOKEN_IDS = Rule(
    lambda value: all(map(_integer(0, 2**31 - 1).accepts, value if isinstance(value, list) else [value])),
    "a token id or a list of token ids",
)
_PROBABILITY = _number(0, 1)

GENERATION = {
    "do_sample": FLAG,
    "temperature": TEMPERATURE,
    "top_k": _integer(0, 2**31 - 1),
    "top_p": _PROBABILITY,
    "min_p": _PROBABILITY,
    "typical_p": _number(0.01, 1),
    "epsilon_cutoff": _number(0, 0.99),
    "eta_cutoff": _number(0, 0.99),
    "repetition_penalty": _number(0.01, 100),
    "no_repeat_ngram_size": _integer(0, 2**31 - 1),
    "max_new_tokens": COUNT,
    "min_new_tokens": COUNT,
    "bos_token_id": _integer(0, 2**31 - 1),
    "eos_token_id": TOKEN_IDS,
    "pad_token_id": _integer(0, 2**31 - 1),
}
_GENERATION_DEFAULTS = {"num_beams": 1, "num_return_sequences": 1, "length_penalty": 1.0, "use_cache": True}

_SHARED = {
    "model": TEXT,
    "stream": FLAG,
    "temperature": TEMPERATURE,
    "top_p": _PROBABILITY,
    "seed": _integer(-(2**63), 2**63 - 1),
    "generation_config": TEXT,
}
_STOP = Rule(_is_stop, f"a string or at most {MOST_STOPS} strings, each with 1 to {LONGEST_STOP} characters")
_SAMPLED = _SHARED | {"max_tokens": COUNT, "frequency_penalty": _number(-0.99, 2), "stop": _STOP}
_TOOLS = Rule(_is_tools, 'a list of objects with type "function"')
_TEXT_ONLY = "content is a string or a list of text parts"

COMPLETIONS = Endpoint(_SAMPLED | {"prompt": Rule(TEXT.accepts, "one string"), "suffix": TEXT}, "prompt")
CHAT = Endpoint(
    _SAMPLED
    | {
        "messages": Rule(
            lambda value: isinstance(value, list) and bool(value) and all(map(_is_message, value)),
            f"a non-empty list of messages whose role is a string and whose {_TEXT_ONLY}",
        ),
        "max_completion_tokens": COUNT,
        "logit_bias": Rule(_is_bias, "an object of numbers from -100 to 100 by token id"),
        "tools": _TOOLS,
        "chat_template_kwargs": Rule(
            _is_template_arguments, "an object of template variables, without arguments of apply_chat_template"
        ),
    },
    "messages",
)
RESPONSES = Endpoint(
    _SHARED
    | {
        "input": Rule(_is_input, f"a string, or a list of text parts or of messages whose {_TEXT_ONLY}"),
        "instructions": TEXT,
        "max_output_tokens": COUNT,
        "tools": _TOOLS,
    },
    "input",
)

# Fields that do not change the result. The last event of a stream always reports the usage.
LABELS = {"metadata", "prompt_cache_key", "safety_identifier", "stream_options", "user"}
# Fields that are not served, with the values that request nothing.
UNSERVED = {
    "background": (False,),
    "best_of": (1,),
    "echo": (False,),
    "include": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0, 0.0),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "text": ({"format": {"type": "text"}},),
    "tool_choice": ("auto",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def parse_json(text: bytes | str) -> dict[str, Any]:
    """Return the object in a JSON text.

    Raises:
        RequestError: If it is not a JSON object, or contains NaN, an infinite number or a lone surrogate.
    """
    try:
        content = json.loads(text, parse_constant=_reject_number, parse_float=_finite)
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the request contains a lone surrogate, which is not a character; send UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the request is not valid JSON ({error}); send a JSON object") from error
    if not isinstance(content, dict):
        raise RequestError(f"the request is {shown(content)}; send a JSON object")
    return content


def _reject_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is out of the range of floating-point numbers")
    return value


def check_request(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the endpoint serves; null values and fields that request nothing are omitted.

    Raises:
        RequestError: If a field is unknown, not supported or has an invalid value.
    """
    served: dict[str, Any] = {"stream": False}
    for name, value in body.items():
        if name in endpoint.rules:
            if value is not None:
                served[name] = _checked(name, endpoint.rules[name], _unwrapped(name, value))
        elif name not in LABELS and not _requests_nothing(name, value):
            raise RequestError(f"`{name}` = {shown(value)} is not supported by this server; omit it", name)
    if endpoint.required not in served:
        raise RequestError(f"`{endpoint.required}` is missing; send it", endpoint.required)
    if "generation_config" in served:
        served["generation_config"] = json.dumps(_generation_config(served["generation_config"]))
    if not served.get("stop", True):
        del served["stop"]
    if "logit_bias" in served:  # transformers rejects integers
        served["logit_bias"] = {token: float(bias) for token, bias in served["logit_bias"].items()}
    if "max_completion_tokens" in served:  # transformers before 5.23 only reads the older name
        served["max_tokens"] = served.pop("max_completion_tokens")
    return served


def _checked(name: str, rule: Rule, value: Any) -> Any:
    if not rule.accepts(value):
        raise RequestError(f"`{name}` must be {rule.description}, got {shown(value)}", name.partition(".")[0])
    return value


def _unwrapped(name: str, value: Any) -> Any:
    """Return the prompt in a list of one; several prompts are several requests."""
    return value[0] if name == "prompt" and isinstance(value, list) and len(value) == 1 else value


def _requests_nothing(name: str, value: Any) -> bool:
    known = UNSERVED.get(name)
    return known is not None and (value is None or json.dumps(value) in map(json.dumps, known))


def _generation_config(text: str) -> dict[str, Any]:
    """Return the fields of the JSON text in `generation_config`, which clients of transformers send."""
    try:
        fields = parse_json(text)
    except RequestError as error:
        raise RequestError(
            f"`generation_config` must be a string with a JSON object: {error}", "generation_config"
        ) from error
    checked = {}
    for name, value in fields.items():
        if value is None or name.startswith("_") or name == "transformers_version":
            continue
        if name in GENERATION:
            checked[name] = _checked(f"generation_config.{name}", GENERATION[name], value)
        elif value != _GENERATION_DEFAULTS.get(name, False):
            message = f"`generation_config.{name}` = {shown(value)} is not supported by this server; omit it"
            raise RequestError(message, "generation_config")
    return checked
