"""Tensor parallelism with transformers' own plans: a model that is split over ranks equals the model of one process."""

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import replace_layer_number_by_wildcard

import luna_mega
from tests.marks import slow_but
from tests.modeling import decoders, luna, mega, megalodon_decoders

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are a gloo group on CPUs")

NO_DROPOUT = {"luna": luna.NO_DROPOUT, "mega": mega.NO_DROPOUT, "megalodon": {}}
# Name -> (head, fields) of the encoder test.
ENCODERS = {
    "luna Model": ("Model", {}),
    "luna masked, untied, 2 pack heads": ("ForMaskedLM", {"tie_key_value": False, "num_pack_attention_heads": 2}),
    "luna sequence, pre-norm": ("ForSequenceClassification", {"pre_norm": True, "pooling": "packed_attention"}),
    "luna pair, shared layers": ("ForSequencePairClassification", {"share_layers": True}),
    "luna choice, P not contextual": ("ForMultipleChoice", {"contextual_projection": False}),
    "luna token, unpadded": ("ForTokenClassification", {"unpad_inputs": True}),
    "luna answers": ("ForQuestionAnswering", {"position_embedding_type": "sinusoidal"}),
    "mega Model, batch norm": ("Model", mega.VARIANTS["batchnorm, norms around"]),
    "mega masked": ("ForMaskedLM", {}),
    "mega sequence, laplace chunks": ("ForSequenceClassification", mega.VARIANTS["laplace chunks"]),
    "mega pair, post-norm": ("ForSequencePairClassification", mega.VARIANTS["relu2 simple post-norm"]),
    "mega choice, no ffn": ("ForMultipleChoice", mega.VARIANTS["simple chunks, shift, no ffn"]),
    "mega token, unpadded": ("ForTokenClassification", {"unpad_inputs": True}),
    "mega answers, truncated": ("ForQuestionAnswering", mega.VARIANTS["one direction, truncated"]),
    "luna token, untied keys": ("ForTokenClassification", {"tie_key_value": False}),
}
ADAPTIVE = dict.fromkeys(("adaptive_input_cutoffs", "adaptive_softmax_cutoffs"), [10, 20])
ADAPTIVE |= dict.fromkeys(("adaptive_input_factor", "adaptive_softmax_factor"), 2)
# Name -> (name in `decoders.DECODERS`, fields) of the decoder test.
DECODERS = {
    "luna": ("luna: softplus", {}),
    "luna untied": ("luna: elu, untied", {"num_pack_attention_heads": 2, "tie_word_embeddings": False}),
    "luna translation": ("luna seq2seq: elu, untied, pre-norm", {}),
    "luna two vocabularies": ("luna seq2seq: two vocabularies, other decoder", {"decoder_vocab_size": 34}),
    "mega": ("mega: softmax", {}),
    "mega chunks, truncated": ("mega: truncated", {}),
    "mega adaptive": ("mega: laplace", ADAPTIVE),
    "mega translation": ("mega seq2seq: softmax", {}),
    "megalodon": ("megalodon: heads", {}),
    "megalodon gated, tied": ("megalodon: one head, gated, tied", {"num_attention_heads": 4}),
    "mega two vocabularies": (
        "mega seq2seq: softmax simple, two vocabularies, other decoder",
        {"decoder_vocab_size": 24},
    ),
}


def make_encoder(name):
    """Return a model of `ENCODERS` and its inputs with labels."""
    family, (head, fields) = name.split()[0], ENCODERS[name]
    model = {"luna": luna, "mega": mega}[family].make(head, **NO_DROPOUT[family] | fields)
    inputs = luna.head_inputs(head, (9, 4, 7))
    return model, inputs | luna.labels(head, inputs)


def make_decoder(name, **more):
    """Return a model of `DECODERS` in float64 and its inputs with labels."""
    shape, fields = DECODERS[name]
    model = decoders.make(shape, **NO_DROPOUT[name.split()[0]] | fields | more)
    ids, mask = decoders.padded([7, 3, 5], 7, "right")
    labels = ids.masked_fill(mask == 0, -100)
    return model, decoders.source(model, 3) | decoders.target(model, ids, mask, labels=labels)


def load(folder, **plan):
    """Return the model of the folder twice: tensor-parallel, and on one process."""
    model_class = getattr(luna_mega, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    config = DistributedConfig(tp_size=dist.get_world_size(), **plan)
    return model_class.from_pretrained(folder, distributed_config=config), model_class.from_pretrained(folder)


def full(tensor):
    """Return the complete tensor if the ranks have parts of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(folder, inputs, checkpointing, plan=None):
    """Train five steps with and without tensor parallelism; return largest loss, gradient and weight differences."""
    pair = load(folder, **({} if plan is None else {"tp_plan": plan}))
    losses, differences = [], []
    for model in pair:
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable()
    optimizers = [torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05) for model in pair]
    for _ in range(5):
        for model, optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            output = model(**inputs)
            loss = output.loss if "loss" in output else output.last_hidden_state.square().mean()
            loss.backward()
            losses.append(loss.item())
        for (name, split), complete in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
            assert (split.grad is None) == (complete.grad is None), name
            if complete.grad is not None:
                differences.append((full(split.grad) - complete.grad).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
    weights = [(full(split) - complete).abs().max().item() for split, complete in zip(*map(_values, pair), strict=True)]
    return max(abs(a - b) for a, b in zip(losses[::2], losses[1::2], strict=True)), max(differences), max(weights)


def _values(model):
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("name", slow_but(["luna masked, untied, 2 pack heads"], ENCODERS))
def test_encoders_train_as_in_one_process(ranks, tmp_path, name):
    model, inputs = make_encoder(name)
    model.save_pretrained(tmp_path)
    for differences in ranks(2, train, str(tmp_path), inputs, list(ENCODERS).index(name) % 2 == 0):
        assert max(differences) < 1e-6


@pytest.mark.parametrize("name", slow_but(["mega chunks, truncated"], DECODERS))
def test_decoders_train_as_in_one_process(ranks, tmp_path, name):
    model, inputs = make_decoder(name)
    model.save_pretrained(tmp_path)
    checkpointing = list(DECODERS).index(name) % 2 == 0
    for differences in ranks(2, train, str(tmp_path), inputs | {"use_cache": False}, checkpointing):
        assert max(differences) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("name", ["luna", "mega chunks, truncated"])
def test_four_ranks_train_as_one_process(ranks, tmp_path, name):
    model, inputs = make_decoder(name, vocab_size=32)
    model.save_pretrained(tmp_path)
    for differences in ranks(4, train, str(tmp_path), inputs | {"use_cache": False}, False):
        assert max(differences) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("name", ["luna", "mega"])
def test_a_vocabulary_that_the_ranks_do_not_divide(ranks, tmp_path, name):
    model, inputs = make_decoder(name, vocab_size=33)
    model.save_pretrained(tmp_path)
    for differences in ranks(2, train, str(tmp_path), inputs | {"use_cache": False}, False):
        assert max(differences) < 1e-11


def train_with_dropout(folder, inputs):
    """Run a training step; return the loss and the gradients of replicated parameters."""
    model, _ = load(folder)
    loss = model.train()(**inputs).loss
    loss.backward()
    complete = [parameter.grad for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    return loss.item(), [gradient for gradient in complete if gradient is not None]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["luna translation", "mega translation"])
def test_ranks_with_one_seed_drop_the_same(ranks, tmp_path, name):
    model, inputs = make_decoder(name)
    for field in NO_DROPOUT[name.split()[0]]:
        setattr(model.config, field, 0.3)
    model.save_pretrained(tmp_path)
    (loss, gradients), other = ranks(2, train_with_dropout, str(tmp_path), inputs)
    assert loss == other[0] != model(**inputs).loss.item()
    for mine, theirs in zip(gradients, other[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0.0)


def answer(folder, inputs, options):
    """Generate greedily and with beams, and check that tensor parallelism does not change the tokens.

    Return the tokens, the bytes of both caches, and the names of the sharded parameters.
    """
    pair, results = load(folder), []
    for model in pair:
        greedy = model.generate(**inputs, do_sample=False, **options)
        beams = model.generate(**inputs, do_sample=False, num_beams=3, **options)
        results.append((greedy, beams))
    for split, complete in zip(*results, strict=True):
        torch.testing.assert_close(torch.stack(split.scores), torch.stack(complete.scores), atol=1e-10, rtol=0.0)
        assert torch.equal(split.sequences, complete.sequences)
    parts = [name for name, parameter in pair[0].named_parameters() if isinstance(parameter, DTensor)]
    return results[0][0].sequences, results[0][0].cache.nbytes, results[1][0].cache.nbytes, parts


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["luna untied", "megalodon"],
        ["luna untied", "luna translation", "mega", "mega adaptive", "mega two vocabularies", "megalodon"],
    ),
)
def test_generation_equals_one_process(ranks, tmp_path, name):
    model, inputs = make_decoder(name)
    model.save_pretrained(tmp_path)
    ids, mask = decoders.padded([5, 2], 5, "left")
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "output_scores": True, "return_dict_in_generate": True}
    (tokens, part, complete, split), other = ranks(2, answer, str(tmp_path), decoders.prompt(model, ids, mask), options)
    assert torch.equal(tokens, other[0])
    assert part < complete  # a rank caches only its own heads
    assert ("lm_head.weight" in split or any("word_embeddings" in name for name in split)) == ("adaptive" not in name)


def save(folder, inputs, target):
    """Train for a step, save, and return the complete weights."""
    model, _ = load(folder)
    model.train()
    model(**inputs).loss.backward()
    torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05).step()
    model.save_pretrained(target)
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    "name",
    slow_but(["mega adaptive"], ["luna two vocabularies", "mega adaptive", "mega translation"]),
)
def test_saved_folder_equals_one_process(ranks, tmp_path, name):
    model, inputs = make_decoder(name)
    model.save_pretrained(tmp_path / "before")
    folders = str(tmp_path / "before"), str(tmp_path / "after")
    weights = ranks(2, save, folders[0], inputs | {"use_cache": False}, folders[1])[0]
    loaded = type(model).from_pretrained(folders[1])
    assert loaded.state_dict().keys() == weights.keys()
    for key, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, weights[key]), key
    assert [file.name for file in sorted((tmp_path / "before").iterdir())] == [
        file.name for file in sorted((tmp_path / "after").iterdir())
    ]
    before, after = ((tmp_path / folder / "config.json").read_text(encoding="utf-8") for folder in ("before", "after"))
    assert before == after


def compare(folder, calls):
    """Check that every tensor of the outputs of calls is the same with and without tensor parallelism."""
    for model in (pair := load(folder)):
        model.eval()
    for call in calls:
        with torch.no_grad():
            split, complete = (model(**call).to_tuple() for model in pair)
        torch.testing.assert_close(split, complete, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("module", [luna, mega, megalodon_decoders])
def test_padding_free_batches_and_attention_weights_equal_one_process(ranks, tmp_path, module):
    inputs = luna.tokens((9, 4, 7), side="left")
    ids = inputs["input_ids"][inputs["attention_mask"].bool()][None]
    positions = torch.cat([torch.arange(length) for length in (9, 4, 7)])[None]
    weights = {"output_attentions": True, "output_hidden_states": True}
    if module is luna:
        weights["output_packed_attentions"] = True
    fields = {}
    if module is megalodon_decoders:
        fields, weights["use_cache"] = {"vocab_size": 40}, False
    module.make("Model", **fields).save_pretrained(tmp_path)
    ranks(2, compare, str(tmp_path), [{"input_ids": ids, "position_ids": positions}, inputs | weights])


@pytest.mark.slow
def test_attention_weights_of_a_translation_equal_one_process(ranks, tmp_path):
    model, inputs = make_decoder("luna translation")
    model.save_pretrained(tmp_path)
    ranks(2, compare, str(tmp_path), [inputs | {"output_attentions": True, "use_cache": False}])


@pytest.mark.slow
def test_plan_may_leave_layers_unsharded(ranks, tmp_path):
    model = luna.make("ForMaskedLM", num_attention_heads=3, **NO_DROPOUT["luna"]).double()
    model.save_pretrained(tmp_path)
    inputs = luna.head_inputs("ForMaskedLM", (9, 4, 7))
    inputs |= luna.labels("ForMaskedLM", inputs)
    plan = {rule: "replicate" for rule in model.tp_plan if ".attention." in rule}
    for differences in ranks(2, train, str(tmp_path), inputs, False, plan):
        assert max(differences) < 1e-11


def error_of(folder, plan):
    """Return the error message of loading with each plan ("" if there is none)."""
    messages = []
    for options in plan:
        try:
            load(folder, **options)
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize(
    ("module", "fields", "parts"),
    [
        (luna, {"num_attention_heads": 3}, "`tp_size=2` does not divide the 3 heads of encoder.layers.0.attention."),
        (
            luna,
            {"num_pack_attention_heads": 1},
            "`tp_size=2` does not divide the 1 heads of encoder.layers.0",
        ),
        (luna, {"intermediate_size": 33}, "`tp_size=2` does not divide the 33 columns of encoder.layers.0.fc1"),
        (mega, {"intermediate_size": 31}, "`tp_size=2` does not divide the 31 columns of layers.0.mega_layer.v_proj"),
        (mega, {"nffn_hidden_size": 21}, "`tp_size=2` does not divide the 21 columns of layers.0.nffn.fc1"),
        (megalodon_decoders, {"num_attention_heads": 1}, "`tp_size=2` does not divide the 1 heads of layers.0.mega.wv"),
    ],
)
def test_indivisible_sizes_raise(ranks, tmp_path, module, fields, parts):
    module.make("Model", **fields).save_pretrained(tmp_path)
    for (message,) in ranks(2, error_of, str(tmp_path), [{}]):
        assert parts in message
        assert "change `tp_size`, or pass a `tp_plan` without" in message
        assert "\n" not in message


def test_incompatible_plans_raise(ranks, tmp_path):
    model = luna.make("Model")
    model.save_pretrained(tmp_path)
    rules = dict(model.tp_plan)
    plans = ["all", {"encoder.layers.*.fc1": "rows"}, {**rules, "encoder.layers.*.fc2": "colwise"}]
    name, style, replicated = ranks(2, error_of, str(tmp_path), [{"tp_plan": plan} for plan in plans])[0]
    assert name == "`tp_plan` must be 'auto' or a dictionary from modules to styles, got 'all'"
    assert "rows" in style
    assert replicated == (
        "`tp_plan` changes only encoder.layers.*.fc2, but the 2 rules of encoder.layers.* are correct only together; "
        "change all or none of them"
    )


def test_unmatched_plan_rules_raise(ranks, tmp_path):
    mega.make("Model").save_pretrained(tmp_path)
    ((message,), _) = ranks(2, error_of, str(tmp_path), [{"tp_plan": {"layers.*.attention.query": "colwise"}}])
    assert "layers.*.attention.query" in message


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_every_rule_of_a_plan_is_for_a_layer(name):
    model, _ = (make_encoder if name in ENCODERS else make_decoder)(name)
    names = {replace_layer_number_by_wildcard(module) for module, _ in model.named_modules()}
    assert model.tp_plan.keys() <= names
    assert {rule.rpartition(".")[2] for rule in model.tp_plan} >= {
        "luna": {"query", "output", "all_heads", "fc1", "fc2"},
        "mega": {"v_proj", "h_proj", "whole", "own_columns"},
        "megalodon": {"wv", "wr", "wh2", "own_heads", "all_heads", "fc1", "fc2"},
    }[name.split()[0]]
