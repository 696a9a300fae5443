"""Validation of requests: each field is supported and checked, or rejected unless its value has no effect."""

import json

import pytest

from luna_mega.serving.requests import CHAT, COMPLETIONS, RESPONSES, RequestError, check_request, parse_json

ENDPOINTS = {"completions": COMPLETIONS, "chat": CHAT, "responses": RESPONSES}
MESSAGE = {"role": "user", "content": "Hello"}
VALID = {"completions": {"prompt": "Hello"}, "chat": {"messages": [MESSAGE]}, "responses": {"input": "Hello"}}

TEXTS = [
    "[1]",
    "5",
    "null",
    "",
    "{",
    '{"a": NaN}',
    '{"a": Infinity}',
    '{"a": 1e400}',
    '{"a": "\\ud800"}',
    '{"\\udfff": 1}',
]
TEXTS += ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 5000 + "}"]

# Values that no endpoint serves, by field.
WRONG = {
    "temperature": [-1, 1e-30, 1e9, "1", True, [1], {}],
    "top_p": [-0.1, 1.1, "1", False],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "stream": [1, "true", []],
    "model": [5, []],
    "generation_config": [
        {},
        5,
        "[]",
        "{",
        "5",
        '{"pad_token_id": [1]}',
        '{"temperature": NaN}',
        '{"max_new_tokens": [1]}',
        '{"num_beams": 2}',
    ],
}
WRONG["generation_config"] += ['{"num_return_sequences": 3}', '{"return_dict_in_generate": true}', '{"top_k": 1.5}']
SAMPLED = {
    "max_tokens": [0, -1, 1.5, "8", [1], True, 10**30],
    "frequency_penalty": [-1, -2, 2.5, "0", [0]],
    "stop": [5, "", [""], [5], {"a": 1}, ["x"] * 17, "x" * 257],
    "n": [2, 0, 1.0, "1", [1]],
    "logprobs": [True, 5, 0, "a"],
    "presence_penalty": [0.5, -2, "0"],
    "response_format": [{"type": "json_object"}, 5],
    "unknown": [1, None],
}
OWN = {
    "completions": {
        "prompt": [5, None, ["a", "b"], [], [1, 2], {}, [["a"]]],
        "suffix": [5, [], {}],
        "echo": [True, 1],
        "best_of": [2, 0],
        "logit_bias": [{"5": 1}],
    },
    "chat": {
        "messages": [
            [],
            {},
            "Hello",
            None,
            [5],
            [{}],
            [{"content": "a"}],
            [{"role": 5}],
            [{"role": "user", "content": 5}],
        ],
        "max_completion_tokens": [0, [1], 1.5],
        "logit_bias": [5, {"a": 1}, {"1": "a"}, {"-1": 1}, {"9" * 30: 1}, {"1": 101}],
        "tools": [5, [5], [{}], [{"type": "function", "function": 5}]],
        "chat_template_kwargs": [
            5,
            {"tokenize": False},
            {"chat_template": "a"},
            {"return_tensors": "np"},
            {"messages": []},
        ],
        "top_logprobs": [1, True],
        "tool_choice": ["required", {"type": "function"}],
    },
    "responses": {
        "input": [5, [], {}, [5], [{"type": "input_image", "image_url": "a"}], [{"role": "user", "content": [5]}]],
        "instructions": [5, ["a"]],
        "max_output_tokens": [0, "8", [1]],
        "previous_response_id": ["a"],
        "background": [True],
        "store": [True],
    },
}
OWN["chat"]["messages"] += [
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
    [{"role": "assistant", "tool_calls": {"a": 1}}],
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}] for text in TEXTS[:-1]),
]
OWN["responses"]["input"] += [
    [MESSAGE, {"type": "function_call", "name": "f"}],
    [MESSAGE, {"type": "reasoning", "content": [{"text": 5}]}],
    [MESSAGE, {"type": "function_call_output", "call_id": "a"}],
    [MESSAGE, {"type": "item_reference", "id": "a"}],
    [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "a"}],
]


def malformed():
    """Yield an endpoint, a field and a value that is not valid."""
    for endpoint in ENDPOINTS:
        fields = WRONG | (SAMPLED if endpoint != "responses" else {}) | OWN[endpoint]
        yield from ((endpoint, name, value) for name, values in fields.items() for value in values)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:20] or "empty")
def test_a_text_that_is_not_a_json_object_is_an_error(text):
    with pytest.raises(RequestError, match="^the request "):
        parse_json(text)
    with pytest.raises(RequestError, match="^the request "):
        parse_json(b'{"a": "\xff"}')


@pytest.mark.parametrize(("endpoint", "name", "value"), list(malformed()))
def test_an_invalid_value_is_an_error_that_names_its_field(endpoint, name, value):
    with pytest.raises(RequestError, match=f"^`{name}") as raised:
        check_request(ENDPOINTS[endpoint], VALID[endpoint] | {name: value})
    assert raised.value.param == name and len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("endpoint", "fields", "served"),
    [
        ("completions", {}, {}),
        ("completions", {"prompt": ["Hello"]}, {"prompt": "Hello"}),
        ("completions", {"n": 1, "echo": False, "best_of": 1, "presence_penalty": 0.0, "logprobs": None}, {}),
        ("completions", {"user": "me", "stream_options": {"include_usage": True}, "stream": True}, {"stream": True}),
        ("completions", {"temperature": None, "stop": []}, {}),
        ("completions", {"stop": ["a", "b"], "seed": -1, "top_p": 1}, {"stop": ["a", "b"], "seed": -1, "top_p": 1}),
        ("chat", {"max_completion_tokens": 4}, {"max_tokens": 4}),
        ("chat", {"logprobs": False, "tool_choice": "auto", "response_format": {"type": "text"}, "metadata": {}}, {}),
        ("chat", {"logit_bias": {"5": -100}}, {"logit_bias": {"5": -100.0}}),
        ("responses", {"store": False, "truncation": "disabled", "tools": []}, {"tools": []}),
        ("responses", {"input": [MESSAGE]}, {"input": [MESSAGE]}),
    ],
)
def test_valid_fields_are_served_or_change_nothing(endpoint, fields, served):
    expected = {"stream": False} | VALID[endpoint] | served
    checked = check_request(ENDPOINTS[endpoint], VALID[endpoint] | fields)
    assert checked == expected
    assert all(type(bias) is float for bias in checked.get("logit_bias", {}).values())  # which transformers requires


def test_generation_config_of_the_client_of_transformers():
    fields = {"do_sample": True, "top_k": 5, "_from_model_config": True, "transformers_version": "5.24.0"}
    fields |= {"num_beams": 1, "use_cache": True, "eos_token_id": [1, 2], "min_p": None}
    body = check_request(COMPLETIONS, {"prompt": "a", "generation_config": json.dumps(fields)})
    assert json.loads(body["generation_config"]) == {"do_sample": True, "top_k": 5, "eos_token_id": [1, 2]}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_missing_field_is_an_error(endpoint):
    with pytest.raises(RequestError, match="is missing; send it"):
        check_request(ENDPOINTS[endpoint], {})
