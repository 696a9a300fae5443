"""vLLM plugin: tokens equal the output of `generate`, with continuous batching and prefix caching."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch

vllm = pytest.importorskip("vllm", reason="vllm is not installed; make test-vllm has an environment with it")
if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
    pytest.skip("the tests access vLLM's process; make test-vllm sets what they need", allow_module_level=True)

from luna_mega.vllm import plugin  # noqa: E402
from luna_mega.vllm.slots import Sequences  # noqa: E402

SERVED_MODELS = ("mega", "megalodon", "luna")
COUNT = 100


@pytest.fixture(scope="module")
def folders(served, tmp_path_factory):
    """Return a function that returns the folder of a family; each family is saved once."""
    made = {}

    def get(family: str) -> str:
        if family not in made:
            made[family] = str(tmp_path_factory.mktemp(family))
            served(family, COUNT)[0].save_pretrained(made[family])
        return made[family]

    return get


@pytest.fixture(autouse=True)
def cpu():
    if os.environ.get("VLLM_TARGET_DEVICE") == "cpu":
        import vllm_cpu

        vllm_cpu.register()


def start(folder: str, **options):
    common = {"skip_tokenizer_init": True, "generation_config": "vllm", "enforce_eager": True}
    common |= {"enable_prefix_caching": False, "max_num_seqs": 8}
    return vllm.LLM(model=folder, **common | options)


def sampling(request):
    return vllm.SamplingParams(temperature=0, max_tokens=len(request.tokens), ignore_eos=True, logprobs=0)


def send(llm, requests):
    prompts = [{"prompt_token_ids": request.prompt} for request in requests]
    return llm.generate(prompts, [sampling(request) for request in requests], use_tqdm=False)


def compare(outputs, requests, complete=True):
    """Return the requests whose tokens differ, and the largest difference of log-probabilities before that."""
    wrong, worst = [], 0.0
    for number, (output, request) in enumerate(zip(outputs, requests, strict=True)):
        given = list(output.outputs[0].token_ids)
        if given != (request.tokens if complete else request.tokens[: len(given)]):
            wrong.append(number)
        for at, (token, known) in enumerate(zip(given, request.tokens, strict=False)):
            if token != known:  # vLLM does not return the log-probability of this token
                break
            worst = max(worst, abs(output.outputs[0].logprobs[at][known].logprob - request.chances[at]))
    return wrong, worst


SETTINGS = {
    "complete": {},
    "pieces-of-1": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "pieces-of-13": {"max_num_seqs": 4, "max_num_batched_tokens": 13},
    "pieces-of-512": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "prefixes": {"enable_prefix_caching": True, "block_size": 16},
    "compiled": {"enforce_eager": False, "compilation_config": {"mode": 3, "backend": "eager"}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", SERVED_MODELS)
def test_tokens_equal_generate(family, setting, folders, served):
    _, requests = served(family, COUNT)
    requests = requests[:25] if setting == "pieces-of-1" else requests
    llm = start(folders(family), **SETTINGS[setting])
    for again in range(2):  # the second run reuses slots and cached prefixes
        outputs = send(llm, requests)
        wrong, worst = compare(outputs, requests)
        assert not wrong and worst < 2 * max(request.rounding for request in requests)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        assert (cached > 0) == (setting == "prefixes" and again == 1)


@pytest.mark.parametrize("family", SERVED_MODELS)
def test_a_folder_without_options_equals_generate(family, folder, complete):
    llm, prompts = vllm.LLM(folder(family)), ["Hello world", "x", "".join(map(chr, range(33, 127))) * 5]
    outputs = llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [complete(family, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "fields", "options", "dtype", "length"),
    [
        ("mega", {}, {}, "float32", plugin.DEFAULT_LENGTH),
        ("mega", {}, {"max_model_len": 100_000}, "float32", 100_000),
        ("mega", {"max_positions": 65_536}, {}, "float32", 65_536),
        ("mega", {}, {"max_model_len": 64, "dtype": "bfloat16"}, "bfloat16", 64),
        ("mega", {"dtype": "bfloat16"}, {}, "bfloat16", plugin.DEFAULT_LENGTH),
        ("mega", {"dtype": "bfloat16"}, {"dtype": "float32"}, "float32", plugin.DEFAULT_LENGTH),
        ("mega", {"dtype": None}, {}, "float32", plugin.DEFAULT_LENGTH),
        ("megalodon", {}, {"max_model_len": -1}, "float32", plugin.DEFAULT_LENGTH),
        ("megalodon", {}, {"max_model_len": 100_000}, "float32", 100_000),
        ("luna", {}, {}, "float32", 512),
        ("luna", {}, {"max_model_len": 513}, "float32", None),
        ("luna", {"position_embedding_type": "sinusoidal"}, {"max_model_len": 40_000}, "float32", 40_000),
    ],
)
def test_dtype_and_length(family, fields, options, dtype, length, folders):
    arguments = vllm.EngineArgs(model=folders(family), skip_tokenizer_init=True, hf_overrides=fields, **options)
    if length is None:
        with pytest.raises(ValueError, match="max_position_embeddings=512"):
            arguments.create_model_config()
        return
    config = arguments.create_model_config()
    assert (config.dtype, config.max_model_len) == (getattr(torch, dtype), length)


def test_dtype_of_other_models_is_decided_by_vllm():
    decide = plugin.model_settings._resolve_auto_dtype
    assert decide("llama", torch.float32, is_pooling_model=False) != torch.float32


@pytest.mark.parametrize("family", ["mega", "megalodon"])
def test_prompt_above_the_default_length(family, folders, served):
    length, model = plugin.DEFAULT_LENGTH + 100, served(family, COUNT)[0]
    prompt = torch.randint(3, 101, (1, length), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": []}
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    request = SimpleNamespace(prompt=prompt[0].tolist(), tokens=text[0, length:].tolist())
    (output,) = send(start(folders(family), max_model_len=length + 8), [request])
    assert list(output.outputs[0].token_ids) == request.tokens


@pytest.mark.parametrize("family", SERVED_MODELS)
def test_bfloat16_error_equals_transformers(family, served, tmp_path):
    model, requests = served(family, 6)
    model_class = type(model)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    outputs = send(start(str(tmp_path), max_num_batched_tokens=64), requests)

    def chances(dtype):
        """Return the log-probabilities of vLLM's tokens, computed by one call of the model per text."""
        model, result = model_class.from_pretrained(tmp_path, dtype=dtype).eval(), []
        for output, request in zip(outputs, requests, strict=True):
            new = torch.tensor(output.outputs[0].token_ids)
            text = torch.cat([torch.tensor(request.prompt), new])[None]
            with torch.no_grad():
                logits = model(text, torch.ones_like(text)).logits[0, len(request.prompt) - 1 : -1].float()
            result.append(logits.log_softmax(-1).gather(1, new[:, None])[:, 0])
        return torch.cat(result)

    rows = (zip(o.outputs[0].token_ids, o.outputs[0].logprobs, strict=True) for o in outputs)
    given = torch.tensor([known[token].logprob for row in rows for token, known in row])
    exact = chances(torch.float32)
    ours, theirs = ((x - exact).abs() for x in (given, chances(torch.bfloat16)))
    assert theirs.mean() > 1e-4 and ours.mean() < 1.5 * theirs.mean() and ours.max() < 2.0 * theirs.max()


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("family", SERVED_MODELS)
def test_requests_start_finish_and_are_aborted(family, prefixes, folders, served):
    _, requests = served(family, COUNT)
    options = {"enable_prefix_caching": True, "block_size": 16} if prefixes else {}
    engine = start(folders(family), max_num_batched_tokens=64, **options).llm_engine
    generator, waiting, done = torch.Generator().manual_seed(2), list(range(COUNT)), {}
    left = set(range(5, COUNT, 7))
    while waiting or engine.has_unfinished_requests():
        for _ in range(int(torch.randint(0, 3, (), generator=generator))):
            if waiting:
                number = waiting.pop(0)
                prompt = {"prompt_token_ids": requests[number].prompt}
                engine.add_request(f"r{number}", prompt, sampling(requests[number]))
        for output in engine.step():
            number = int(output.request_id.split("-")[0].removeprefix("r"))
            done[number] = output
            if number in left and len(output.outputs[0].token_ids) > len(requests[number].tokens) // 2:
                left.remove(number)
                engine.abort_request([f"r{number}"])
    wrong, worst = compare([done[n] for n in sorted(done)], [requests[n] for n in sorted(done)], complete=False)
    assert not wrong and worst < 2 * max(request.rounding for request in requests)
    short = [n for n in done if len(done[n].outputs[0].token_ids) < len(requests[n].tokens)]
    assert set(done) == set(range(COUNT)) and all(n % 7 == 5 for n in short) and short


@pytest.mark.parametrize("control", ["write", "new"])
@pytest.mark.parametrize("family", SERVED_MODELS)
def test_lost_or_swapped_state_is_detected(family, control, folders, served, monkeypatch):
    requests = served(family, COUNT)[1][:24]
    if control == "write":
        monkeypatch.setattr(Sequences, "write", lambda *_: None)
    else:  # a new sequence then reads the state of another one
        made = Sequences.__init__
        monkeypatch.setattr(Sequences, "__init__", lambda self, a, b, *rest: made(self, a, b.clamp(min=1), *rest))
    wrong, worst = compare(send(start(folders(family)), requests), requests)
    assert len(wrong) > len(requests) // 3 or worst > 1e-2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tensor_parallel_size": 2}, "tensor parallelism"),
        ({"pipeline_parallel_size": 2}, "(?i)pipeline parallelism"),
        ({"enable_lora": True}, "LoRA"),
        ({"quantization": "fp8"}, "quantization='fp8'"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
        ({"hf_overrides": {"truncation": 64}}, "truncation=64"),
        ({"hf_overrides": {"use_chunking": False}}, "without chunks"),
    ],
)
def test_unsupported_calls_name_the_argument(options, reason, folders):
    with pytest.raises(Exception, match=reason):
        start(folders("mega"), **options)


def test_registering_again_changes_nothing():
    operators = list(plugin.CompilationConfig._attention_ops)
    plugin.register()
    assert plugin.CompilationConfig._attention_ops == operators and operators.count(plugin.OPERATOR) == 1


def test_padding_rows_of_a_captured_graph_have_no_positions():
    filled = SimpleNamespace(
        num_decode_tokens=3,
        num_prefills=0,
        seq_lens=torch.tensor([7, 0, 0], dtype=torch.int32),
        state_indices_tensor_d=torch.tensor([[4], [0], [0]], dtype=torch.int32),
    )
    (group,) = plugin.SlotMetadata.groups.func(filled)
    assert group.before.tolist() == [6, 0, 0] and group.slots.tolist() == [4, 0, 0]
