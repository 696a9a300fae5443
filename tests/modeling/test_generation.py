"""`generate` with decoders of all families: with and without a cache, from any prompt, and its errors."""

import pytest
import torch
from transformers import Trainer, TrainingArguments, pipeline

from tests.marks import diagonal
from tests.modeling.decoders import (
    DECODER_ONLY,
    DECODERS,
    PLAIN,
    SOME,
    TRANSLATING,
    WITH_ENCODER,
    make,
    make_plain,
    padded,
    prompt,
    source,
    with_each,
)


@pytest.fixture(params=[name for name in DECODER_ONLY if name in SOME])
def decoder(request):
    return make(request.param)


@pytest.fixture(params=[name for name in WITH_ENCODER if name in SOME])
def seq2seq(request):
    return make(request.param)


OTHERS = [name for name in DECODERS if name not in SOME]
OPTIONS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6}
    | {"early_stopping": True},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "constrained": {"num_beams": 2, "prefix_allowed_tokens_fn": lambda row, ids: [3 + len(ids) % 5, 9, 12 + row]},
}


@torch.no_grad()
@pytest.mark.parametrize("name, option", with_each(SOME + OTHERS, OPTIONS, slow=0, fast=SOME, weekly=True))
def test_generate(name, option):
    """Tokens do not depend on the cache, the padding side, how the mask is given, or other rows."""
    model, options = make(name), OPTIONS[option]
    ids, mask = padded([7, 3], 7, "left")
    given, results = [(prompt(model, ids, mask), True), (prompt(model, ids, mask), False)], []
    if model.config.is_encoder_decoder:
        given += [({"input_ids": source(model, 2, side)["input_ids"]}, True) for side in ("left", "right")]
    for inputs, use_cache in given:
        torch.manual_seed(1)
        results.append(model.generate(**inputs, max_new_tokens=4, use_cache=use_cache, **options))
    assert all(torch.equal(result, results[0]) for result in results)
    count, inputs = options.get("num_return_sequences", 1), given[0][0]
    assert len(results[0]) == 2 * count
    if "prefix_allowed_tokens_fn" in options:
        for row, tokens in enumerate(results[0][:, -4:].tolist()):
            assert set(tokens) <= {1, 2, *range(3, 8), 9, 12 + row}
    elif not options["do_sample"]:
        for row in range(2):
            tokens = inputs["input_ids"][row, inputs["attention_mask"][row].bool()][None]
            separate = model.generate(tokens, max_new_tokens=4, **options)
            begun = 0 if model.config.is_encoder_decoder else 7 - tokens.shape[1]
            together = results[0][row * count : (row + 1) * count, begun:]
            assert torch.equal(separate, together[:, : separate.shape[1]])


@torch.no_grad()
@pytest.mark.parametrize(("name", "cached"), diagonal([name for name in DECODER_ONLY if name in SOME], [4, 7, 10]))
def test_generate_continues_from_a_cache(name, cached):
    """`generate` continues from a cache of part of the prompt, the prompt, or prompt and output, also a static one."""
    decoder, (ids, mask) = make(name), padded([7, 3], 7, "left")
    options = {"do_sample": False, "eos_token_id": None}
    complete = decoder.generate(ids, attention_mask=mask, max_new_tokens=8, **options)
    mask = torch.cat([mask, mask.new_ones(2, 8)], 1)
    past = decoder(complete[:, :cached], mask[:, :cached], use_cache=True).cache
    if cached == 10:
        past.make_static(20)
    begun = complete[:, : max(cached + 1, 7)]
    length = begun.shape[1]
    options |= {"cache": past, "max_new_tokens": 15 - length}
    assert torch.equal(decoder.generate(begun, attention_mask=mask[:, :length], **options), complete)
    assert past.get_seq_length() == 14


@torch.no_grad()
def test_generate_continues_from_a_target_in_a_cache(seq2seq):
    cached = 2 if seq2seq.config.model_type == "luna_seq2seq" else 6
    given, options = source(seq2seq, 2), {"do_sample": False, "eos_token_id": None}
    complete = seq2seq.generate(**given, max_new_tokens=12, **options)
    past = seq2seq(**given, decoder_input_ids=complete[:, :cached], use_cache=True).cache
    options |= {"decoder_input_ids": complete[:, :8], "cache": past, "max_new_tokens": 5}
    assert torch.equal(seq2seq.generate(**given, **options), complete)
    assert past.get_seq_length() == 12


@torch.no_grad()
def test_generate_after_a_prefix_of_the_target(seq2seq):
    ids, mask = padded([5, 2], 5, "left")
    ids = ids.scatter(1, mask.argmax(1, keepdim=True), seq2seq.config.decoder_start_token_id)
    given, options = source(seq2seq, 2), {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    prefix = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    both = seq2seq.generate(**given, **prefix, **options)
    assert torch.equal(both, seq2seq.generate(**given, **prefix, use_cache=False, **options))
    one = {name: value[1:] for name, value in given.items()}
    separate = seq2seq.generate(**one, decoder_input_ids=ids[1:, 3:], **options)
    assert torch.equal(both[1, 3:], separate[0])


@torch.no_grad()
@pytest.mark.parametrize("family", TRANSLATING)
def test_generate_accepts_seq2seq_trainer_arguments(family):
    """`generate` ignores `labels` of a batch, applies `logits_to_keep` to the decoder, and accepts encoder outputs."""
    model = make_plain(family, is_encoder_decoder=True)
    given, options = source(model, 2, "left"), {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**given, **options)
    more = {"labels": torch.full((2, 3), 5), "logits_to_keep": 1, "num_beams": 1}
    assert torch.equal(model.generate(**given, **options, **more), expected)
    encoded = {"encoder_outputs": model.get_encoder()(**given), "attention_mask": given["attention_mask"]}
    assert torch.equal(model.generate(**encoded, **options), expected)
    embedded = {"inputs_embeds": model.get_input_embeddings()(given.pop("input_ids"))}
    assert torch.equal(model.generate(**embedded, **given, **options), expected)


@torch.no_grad()
def test_generate_from_chunks_and_embeddings(decoder):
    ids, mask = padded([7, 3], 7, "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    embeddings, expected = decoder.get_input_embeddings()(ids), decoder.generate(ids, **options)
    assert torch.equal(decoder.generate(ids, prefill_chunk_size=3, **options), expected)
    assert torch.equal(decoder.generate(inputs_embeds=embeddings, **options), expected[:, 7:])


@torch.no_grad()
def test_generate_keeps_unmasked_padding_tokens(decoder):
    """With a mask of ones, which transformers drops, padding tokens in the prompt still count as tokens."""
    ids = torch.tensor([[5, 1, 9, 1, 1, 4], [1, 8, 8, 1, 7, 1]])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    for options["use_cache"] in (True, False):
        logits = decoder.generate(ids, attention_mask=mask, **options).logits[0]
        torch.testing.assert_close(logits, decoder(ids, mask).logits[:, -1].float(), check_dtype=False)


@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_unsupported_inputs_raise(family, with_encoder):
    model = make_plain(family, is_encoder_decoder=with_encoder)
    ids, kind = torch.randint(3, 23, (2, 5)), "sources" if with_encoder else "prompts"
    width = model.config.hidden_size
    for empty in ({"input_ids": ids[:, :0]}, {"inputs_embeds": torch.zeros(2, 0, width).double()}):
        with pytest.raises(ValueError, match=f"{kind} have length 0"):
            model.generate(**empty)
    padding = torch.tensor([[4, 5], [1, 1]])
    for mask in ({}, {"attention_mask": torch.tensor([[1, 1], [0, 0]])}):
        for beams in (1, 3):
            with pytest.raises(ValueError, match=rf"the {kind} \[1\] contain only padding"):
                model.generate(padding, num_beams=beams, **mask)
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[4, 5]])
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.init_continuous_batching()
    if with_encoder:
        past = model(ids, decoder_input_ids=ids, use_cache=True).cache
        with pytest.raises(ValueError, match="contains 5 positions already, and `decoder_input_ids` has 1;"):
            model.generate(ids, cache=past)


@pytest.mark.parametrize(("family", "checkpointing"), [("luna", False), ("megalodon", True)])
def test_trains_with_the_defaults(tmp_path, family, checkpointing):
    """Trainer trains and evaluates without `use_cache`; the cache created in evaluation is not gathered."""
    model = make_plain(family, dtype=torch.float32)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 30, (8, 11))]
    options = {"use_cpu": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(
        tmp_path, max_steps=2, learning_rate=1e-3, gradient_checkpointing=checkpointing, **options
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.predict(data).predictions.shape == (8, 11, 30)
    assert trainer.evaluate()["eval_loss"] < before


@pytest.mark.parametrize("family", ["luna", "mega"])
def test_text_generation_pipeline(family, tokenizer):
    """The pipeline generates the same text for a single prompt as in a batch with longer prompts."""
    tokenizer.padding_side = "left"
    model = make_plain(family, vocab_size=len(tokenizer))
    generator = pipeline("text-generation", model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    prompts = ["w1 w2 w3 w4 w5", "w7", "w8 w9"]
    separate = [generator(text, **options)[0]["generated_text"] for text in prompts]
    assert all(text.strip() for text in separate) and len(set(separate)) > 1
    assert [outputs[0]["generated_text"] for outputs in generator(prompts, batch_size=3, **options)] == separate
