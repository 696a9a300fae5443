"""The study of local initialization: excluded weights are random, and RoBERTa's heads attend to neighbors."""

import random

import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from luna_mega import LunaConfig, LunaForMaskedLM
from luna_mega.modeling_luna.initialization_luna import LocalStart
from tests.examples.runs import assert_error, sentence, write

SIZES = {
    "vocab_size": 40,
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
SIZES |= {"initializer_range": 0.05}
LUNA = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16,projection_length=4"
OPTIONS = ("--local_options", "base=8,strength=4,mask_token_id=4")
ROBERTA = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=16"


@torch.no_grad()
def test_heads_of_roberta_attend_to_neighbors(script):
    config = RobertaConfig(**SIZES, max_position_embeddings=34, attn_implementation="eager")
    model = RobertaForMaskedLM(config).eval()
    script("mlm_start").start_roberta(model, LocalStart())
    # One repeated token, so that attention depends only on positions.
    (weights,) = model(torch.full((1, 32), 7), output_attentions=True).attentions
    means = [weights.diagonal(offset, 2, 3).mean((0, 2)) for offset in range(-4, 5)]
    assert (torch.stack(means).argmax(0) - 4).tolist() == [-1, 1, -2, 2]


@torch.no_grad()
def test_queries_of_roberta_ignore_the_mask_token(script):
    model = RobertaForMaskedLM(RobertaConfig(**SIZES, max_position_embeddings=34))
    script("mlm_start").start_roberta(model, LocalStart(mask_token_id=39))
    embeddings = model.roberta.embeddings.word_embeddings.weight
    query = model.roberta.encoder.layer[0].attention.self.query.weight
    assert (query @ embeddings[39]).norm() < 1e-5 < 1 < (query @ embeddings[38]).norm()


@pytest.mark.parametrize(
    "part, random_again",
    [
        ("positions", {"position_embeddings.weight"}),
        ("packed", {"packed_embeddings"}),
        ("identity", {f"attention.{name}.weight" for name in ("query", "pack_query", "key_value", "pack_key_value")}),
    ],
)
def test_excluded_weights_are_random(part, random_again, script):
    model = LunaForMaskedLM(LunaConfig(**SIZES, projection_length=8, initialization="local"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    script("mlm_start").leave_out(model, part)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name for name in changed if "output" not in name} == {
        name for name in before if any(name.endswith(f".{end}") for end in random_again)
    }
    for name in changed:
        torch.testing.assert_close(model.state_dict()[name].std().item(), 0.05, rtol=0.15, atol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--config_overrides", f"{LUNA},initialization=local", "--without", "identity"),
        ("--model_type", "roberta", "--config_overrides", ROBERTA, "--local_start", "true", *OPTIONS),
    ],
)
def test_run(arguments, call, tmp_path):
    draw = random.Random(0)
    for name in ("train", "validation"):
        write([{"text": sentence(True, draw)} for _ in range(30)], tmp_path / "data" / f"{name}.jsonl")
    data = ["--dataset_path", tmp_path / "data", "--vocab_size", 300, "--block_size", 12]
    run = ["--do_train", "--do_eval", "--max_steps", 2, "--output_dir", tmp_path / "out"]
    assert call("mlm_start", *data, *run, *arguments)["steps"] == 2


def test_unsupported_inputs_raise(call, tmp_path):
    write([{"text": sentence(True, random.Random(0))} for _ in range(30)], tmp_path / "train.jsonl")

    def assert_message(message, *arguments):
        options = ["--dataset_path", tmp_path, "--do_train", "--output_dir", tmp_path / "out"]
        assert_error(call, message, "mlm_start", *options, *arguments)

    assert_message("--without heads must be one of positions, packed, identity", "--without", "heads")
    assert_message("--local_start is for --model_type roberta", "--local_start", "true")
    assert_message("--local_options requires --local_start true", *OPTIONS)
    assert_message("--without for luna", "--model_type", "mega", "--without", "packed")
    start = ("--model_type", "roberta", "--local_start", "true", "--vocab_size", 300, "--block_size", 12)
    assert_message(
        "--local_options: .*mask_token_id must be a token from 0 to .*, got 300",
        *start,
        "--local_options",
        "mask_token_id=300",
    )
