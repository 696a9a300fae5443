"""lm-eval loads causal folders, through its Python interface and `luna-mega eval`."""

import functools
import json
import logging
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytest.importorskip("lm_eval", reason="lm_eval is not installed")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import luna_mega
from luna_mega import cli

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
    "choice": 'output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: label\ndoc_to_text: "{{text}}"',
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
    """A byte is a token."""
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
    """Return the language model in a folder of the fixture."""
    family = folder.name.rstrip("0123456789")
    return getattr(luna_mega, f"{family.capitalize()}ForCausalLM").from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with a local task of each kind."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    source = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {json.dumps(source)}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(head + text + "\n")
    return folder


@pytest.fixture(autouse=True)
def without_its_own_tasks(monkeypatch):
    """lm-eval would load its thousands of tasks, and log to the standard error of an earlier test."""
    monkeypatch.setattr(TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False))
    monkeypatch.setattr(logging, "raiseExceptions", False)


def run(*arguments):
    """The exit status of `luna-mega eval`."""
    try:
        return cli.main(["eval", *map(str, arguments)])
    except SystemExit as stop:
        return stop.code


def test_all_task_types_are_independent_of_the_batch_size(folder, tasks):
    manager = TaskManager(include_path=str(tasks))
    found = []
    for batch_size in (1, 4):
        found.append(
            simple_evaluate(
                model="hf",
                model_args={"pretrained": str(folder), "dtype": "float32"},
                tasks=list(TASKS),
                task_manager=manager,
                batch_size=batch_size,
                device="cpu",
                bootstrap_iters=0,
            )
        )
    one, four = ({name: [row["resps"] for row in rows] for name, rows in each["samples"].items()} for each in found)
    assert one.keys() == TASKS.keys() and all(len(rows) == len(ROWS) for rows in one.values())
    assert one["writing"] == four["writing"] and all(isinstance(text, str) for [[text]] in one["writing"])
    for name in ("choice", "rolling"):
        for ours, theirs in zip(one[name], four[name], strict=True):
            scores = ([resp[0][0] if name == "choice" else resp[0] for resp in rows] for rows in (ours, theirs))
            assert next(scores) == pytest.approx(next(scores), rel=1e-5)


def test_scores_match_the_model(folder, tasks, tokenizer):
    found = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder), "dtype": "float32"},
        tasks=["rolling"],
        task_manager=TaskManager(include_path=str(tasks)),
        device="cpu",
        bootstrap_iters=0,
    )
    model = load(folder)
    for row in found["samples"]["rolling"]:
        ids = tokenizer(row["doc"]["text"], return_tensors="pt").input_ids
        ids = torch.cat([torch.tensor([[tokenizer.bos_token_id]]), ids], dim=1)  # lm-eval puts it before a text
        with torch.no_grad():
            expected = -model(ids, labels=ids).loss * (ids.shape[1] - 1)
        assert row["resps"][0][0] == pytest.approx(expected.item(), rel=1e-5)


def test_command_line(folder, tasks, tmp_path, capsys):
    before = list(sys.argv)
    options = ["--include_path", tasks, "--device", "cpu", "--batch_size", 2, "--limit", 3]
    options += ["--model_args", "dtype=float32", "--output_path", tmp_path]
    assert run(folder, "--tasks", "choice,writing", *options) == 0
    assert sys.argv == before
    output = capsys.readouterr().out
    assert "|choice " in output and "exact_match" in output and "limit: 3.0" in output
    [written] = tmp_path.rglob("results_*.json")
    written = json.loads(written.read_text())
    assert written["config"]["model_args"] == {"pretrained": str(folder), "dtype": "float32"}
    assert written["config"]["model_num_parameters"] > 0


def test_results_as_json(folder, tasks, tmp_path, capsys):
    options = ["--tasks", "choice", "--include_path", tasks, "--device", "cpu", "--limit", 3]
    assert run("--json", folder, *options) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["results"].keys() == {"choice"} and "|choice" in output.err
    assert run("--json", folder, *options, "--output_path", tmp_path) == 1


def test_invalid_inputs_raise(folder, tasks, tmp_path, capsys, monkeypatch):
    def error(*arguments):
        assert run(*arguments) == 1
        line = capsys.readouterr().err.strip().splitlines()
        assert not any("Traceback" in text for text in line)
        assert sum(text.startswith("luna-mega eval: error: ") for text in line) == 1
        return line[-1]

    include = ["--include_path", tasks, "--device", "cpu"]
    assert "nowhere: no such folder" in error(tmp_path / "nowhere", "--tasks", "choice")
    missing = tmp_path / "missing.yaml"
    assert f"Tasks not found: {missing}" in error(folder, "--tasks", missing, *include)
    assert "Tasks not found: nothing" in error(folder, "--tasks", "nothing", *include)
    assert "No tasks specified" in error(folder)
    assert "Tasks not found: choice" in error(folder, "--tasks", "choice", "--include_path", tmp_path / "no folder")
    assert run(folder, "--tasks", "choice", "--no_such_option") == 2
    capsys.readouterr()
    bare = tmp_path / "bare"
    save("mega", bare)
    assert "tokenizer" in error(bare, "--tasks", "choice", *include)
    encoder = tmp_path / "encoder"
    save("luna", encoder, "ForMaskedLM", is_decoder=False)
    assert "contains a LunaForMaskedLM; lm-eval requires a causal" in error(encoder, "--tasks", "choice", *include)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert "`pip install '.[eval]'`" in error(folder, "--tasks", "choice", *include)


@pytest.fixture
def passkey(repo_root, monkeypatch):
    monkeypatch.syspath_prepend(repo_root / "examples" / "passkey")
    import passkey

    yield passkey
    del sys.modules["passkey"]


def test_documents_of_the_passkey_task(folder, tokenizer, passkey):
    lengths = [1024, 4096]
    made = [passkey.documents(str(folder), max_length=4096, max_seq_lengths=lengths) for _ in range(2)]
    rows = made[0]["test"].to_list()
    assert rows == made[1]["test"].to_list() and len({row["key"] for row in rows}) == len(rows) == 2 * 5 * 4
    for row in rows:
        room = row["length"] - passkey.ANSWER
        assert room - len(passkey.FILL) < len(tokenizer(row["text"]).input_ids) <= room
        place = row["text"].index(row["key"]) / len(row["text"])
        assert abs(place - row["depth"]) < 0.2 and row["text"].count(row["key"]) == 2
        results = passkey.score(row, [f" {row['key']}."])
        assert results[str(row["length"])] == 1 and sum(results.values()) == 1 - 3
        assert passkey.score(row, ["nothing"])[str(row["length"])] == 0
    assert passkey.mean([-1, 1, 0, -1]) == 0.5 and passkey.mean([-1]) == -1
    with pytest.raises(ValueError, match="passkey of 4096 tokens exceeds the maximum length .*max_length=4096"):
        passkey.documents(str(folder), max_length=512, max_seq_lengths=lengths)
    with pytest.raises(ValueError, match="passkey of 100 tokens: its sentences without filler have"):
        passkey.documents(str(folder), max_seq_lengths=[100])


@torch.no_grad()
def test_state_size_does_not_depend_on_the_length(folder, tokenizer, passkey):
    model, found = load(folder), {}
    for row in passkey.documents(str(folder), max_length=4096, max_seq_lengths=[1024, 4096], num_samples=1)["test"]:
        ids = tokenizer(row["text"], return_tensors="pt").input_ids
        found.setdefault(row["length"], []).append(model(ids, logits_to_keep=1, use_cache=True).past_key_values.nbytes)
    assert max(found[4096]) <= max(found[1024])


def test_the_passkey_task_by_the_command_line(folder, repo_root, capsys):
    options = ["--tasks", "passkey", "--include_path", repo_root / "examples" / "passkey", "--device", "cpu"]
    short = ["--metadata", "max_seq_lengths=[1024]", "num_samples=1"]
    assert run(folder, *options, *short, "--model_args", "max_length=1024") == 0
    assert "|passkey|" in (table := capsys.readouterr().out) and "1024" in table
    assert run(folder, *options) == 1
    assert "add --model_args max_length=65536" in capsys.readouterr().err.splitlines()[-1]
