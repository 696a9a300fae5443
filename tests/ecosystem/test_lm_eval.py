"""lm-eval evaluates folders of causal language models."""

import functools
import json
import logging

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import luna_mega

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SIZES = {"vocab_size": len(SPECIAL) + 256, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
FIELDS = {
    "luna": {"num_attention_heads": 2, "projection_length": 4, "position_embedding_type": "sinusoidal"},
    "mega": {"bidirectional": False, "use_chunking": True, "chunk_size": 32, "ema_projection_size": 4},
    "megalodon": {"shared_representation_size": 8, "value_size": 24, "chunk_size": 32}
    | {"ema_projection_size": 4, "norm_num_groups": 4, "pad_token_id": 1, "bos_token_id": 0},
}
ROWS = [
    {"text": "The sky is", "choices": [" blue", " a rather long word"], "label": 0},
    {"text": "One and one make", "choices": [" two", " three", " one"], "label": 0},
    {"text": "A", "choices": [" b", " c"], "label": 1},
    {"text": "The longest of all these texts is this one, and it ends", "choices": [" here", " there"], "label": 0},
    {"text": "Nothing", "choices": [" else", " more"], "label": 1},
]
TASKS = {
    "choice": 'output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: label\ndoc_to_text: "{{text}}"\n'
    'target_delimiter: ""',
    "rolling": 'output_type: loglikelihood_rolling\ndoc_to_text: ""\ndoc_to_target: "{{text}}"\n'
    "metric_list:\n  - metric: byte_perplexity",
    "writing": 'output_type: generate_until\ndoc_to_text: "{{text}}"\ndoc_to_target: "{{choices[label]}}"\n'
    'generation_kwargs:\n  max_gen_toks: 7\n  do_sample: false\n  until: ["\\n"]\n'
    "metric_list:\n  - metric: exact_match",
}


def config_of(family, **fields):
    config = getattr(luna_mega, f"{family.capitalize()}Config")
    return config(**SIZES | FIELDS[family] | {"is_decoder": True} | fields)


def save(family, folder, ending="ForCausalLM", **fields):
    torch.manual_seed(0)
    model = getattr(luna_mega, family.capitalize() + ending)(config_of(family, **fields)).eval()
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer in which each byte is a token."""
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


@pytest.fixture(scope="module", params=FIELDS)
def folder(request, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder):
    """Load the language model in a folder of the fixture."""
    family = folder.name.rstrip("0123456789")
    return getattr(luna_mega, f"{family.capitalize()}ForCausalLM").from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Write a local task of each kind and return their folder."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(source)}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + text + "\n", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def without_its_own_tasks(monkeypatch):
    """Disable lm-eval's thousands of tasks, and exceptions of logging to the closed stderr of an earlier test."""
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False))
    monkeypatch.setattr(logging, "raiseExceptions", False)


def evaluate(folder, manager, names, **options):
    """Return the results of `simple_evaluate` on a CPU."""
    arguments = {"pretrained": str(folder), "dtype": "float32"}
    options |= {"task_manager": manager, "device": "cpu", "bootstrap_iters": 0}
    return simple_evaluate(model="hf", model_args=arguments, tasks=names, **options)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_results_match_the_model(folder, tasks, tokenizer, batch_size):
    """Log-likelihoods of choices, rolling log-likelihoods and generated texts equal the model's for any batch size."""
    manager = TaskManager(include_path=str(tasks))
    samples = evaluate(folder, manager, list(TASKS), batch_size=batch_size)["samples"]
    found = {name: {row["doc"]["text"]: row["resps"] for row in rows} for name, rows in samples.items()}
    model = load(folder)

    def encode(text):
        return tokenizer(text, return_tensors="pt").input_ids

    def log_likelihood(context, ids):
        ids = torch.cat([context, ids], dim=1)
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < context.shape[1], -100)
        return -model(ids, labels=labels).loss.item() * (ids.shape[1] - context.shape[1])

    with torch.no_grad():
        for row in ROWS:
            prompt = encode(row["text"])
            choices = [log_likelihood(prompt, encode(choice)) for choice in row["choices"]]
            assert [resp[0][0] for resp in found["choice"][row["text"]]] == pytest.approx(choices, rel=1e-5)
            start = torch.tensor([[tokenizer.bos_token_id]])  # lm-eval prepends this token
            assert found["rolling"][row["text"]][0][0] == pytest.approx(log_likelihood(start, prompt), rel=1e-5)
            new = model.generate(prompt, max_new_tokens=7, do_sample=False, pad_token_id=1)[0, prompt.shape[1] :]
            text = tokenizer.decode(new, skip_special_tokens=True)
            assert found["writing"][row["text"]] == [[text.partition("\n")[0]]]
