"""`generate` with decoders of all families: with and without a cache, from any prompt, and its options."""

import copy
import re

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    CompileConfig,
    EncoderDecoderModel,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.utils import ModelOutput

from tests.marks import diagonal
from tests.modeling import decoders, luna, mega
from tests.modeling.contract import CLASSES
from tests.modeling.decoders import (
    DECODER_ONLY,
    DECODERS,
    PLAIN,
    SOME,
    TRANSLATING,
    WITH_ENCODER,
    make,
    make_plain,
    own_cache,
    padded,
    prompt,
    source,
    target,
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


ASSISTED = "assisted generation is not supported with stateful models"
FETCHED = "requires `trust_remote_code=True`"
OWN = "has its own cache; omit the argument, or pass cache_implementation='static'"
UNSUPPORTED = [  # options, and the error
    ({"prompt_lookup_num_tokens": 2}, ASSISTED),
    ({"use_mtp": True}, ASSISTED),
    ({"cache_implementation": "quantized"}, OWN),
    ({"cache_config": {"nbits": 4}}, OWN),
    ({"max_cache_len": 40}, "max_cache_len=40 requires cache_implementation='static'"),
    ({"cache_implementation": "static", "use_cache": False}, "requires use_cache=True"),
    ({"compile_config": CompileConfig()}, "`compile_config` is not supported"),
    ({"cache_implementation": "paged"}, "continuous batching"),
    ({"is_assistant": True}, "cannot be an assistant model"),
    ({"penalty_alpha": 0.5, "top_k": 4}, FETCHED),
    ({"dola_layers": "high"}, FETCHED),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0}, FETCHED),
    ({"num_beams": 3, "force_words_ids": [[5]]}, FETCHED),
]
ALONE = "is not supported by encoder-decoders; omit the argument"
DECODER_ONLY_OPTIONS = {"guidance_scale": 1.5, "prefill_chunk_size": 3, "token_healing": True}


@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_unsupported_options_raise(family, with_encoder):
    model = make_plain(family, is_encoder_decoder=with_encoder)
    inputs = prompt(model, *padded([7, 3], 7, "left"))
    rows = [*UNSUPPORTED, ({"assistant_model": model}, ASSISTED)]
    rows += [({name: value}, ALONE) for name, value in DECODER_ONLY_OPTIONS.items() if with_encoder]
    rows += [] if with_encoder else [({"guidance_scale": 1.5, "num_beams": 2}, "not supported with num_beams=2")]
    for options, reason in rows:
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(reason)) as error:
            model.generate(**inputs, max_new_tokens=5, **options)
        assert "\n" not in str(error.value).strip()


@torch.no_grad()
@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_options_that_this_package_handles(family, with_encoder):
    """Logits of steps, a static cache, an own loop, guidance by negative prompts, and beams that end with a text."""
    model = make_plain(family, is_encoder_decoder=with_encoder)
    inputs = prompt(model, *padded([7, 3], 7, "left"))
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **settings, output_logits=True)
    steps = torch.stack(plain.logits, 1)
    if not with_encoder:
        mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(2, 5)], 1)
        complete = model(plain.sequences, mask, use_cache=False).logits[:, -6:-1]
        negative = torch.tensor([[1, 8], [9, 7]])
        for prompts, kept in ((None, None), (negative.clamp(min=3), None), (negative, (negative > 1).long())):
            guidance = {"guidance_scale": 1.5, "negative_prompt_ids": prompts, "negative_prompt_attention_mask": kept}
            guided = model.generate(**inputs, **settings, **guidance, output_scores=True, output_logits=True)
            before = inputs["input_ids"][:, -1:] if prompts is None else prompts
            kept = torch.ones_like(before) if kept is None else kept
            bare = torch.cat([before, guided.sequences[:, -5:-1]], 1)
            mask = torch.cat([kept, kept.new_ones(2, 4)], 1)
            without = model(bare, mask).logits[:, -5:].log_softmax(-1)
            with_prompt = torch.stack(guided.logits, 1).log_softmax(-1)
            expected = (1.5 * (with_prompt - without) + without).float()
            torch.testing.assert_close(torch.stack(guided.scores, 1).float(), expected, atol=1e-5, rtol=1e-5)
    else:
        complete = model(**inputs, decoder_input_ids=plain.sequences, use_cache=False).logits[:, :-1]
    torch.testing.assert_close(steps, complete.to(steps.dtype), atol=1e-5, rtol=1e-5)

    def step(model, input_ids, logits_processor, stopping_criteria, generation_config, **given):
        inputs = model.prepare_inputs_for_generation(input_ids, **given)
        return torch.cat([input_ids, model(**inputs).logits[:, -1:].argmax(-1)], 1)

    one = model.generate(**inputs, max_new_tokens=5, eos_token_id=None, do_sample=False, custom_generate=step)
    assert torch.equal(one, plain.sequences[:, : one.shape[1]])
    assert not own_cache(plain["cache"]).is_static
    for options in ({}, {"max_cache_len": 40}):
        static = model.generate(**inputs, **settings, cache_implementation="static", **options)
        assert torch.equal(static.sequences, plain.sequences) and static["cache"].is_static
    ends = [
        model.generate(
            **inputs, num_beams=3, early_stopping=True, eos_token_id=[*range(20)], use_cache=use, max_new_tokens=5
        )
        for use in (True, False)
    ]
    assert torch.equal(*ends)


@torch.no_grad()
@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_names_of_the_cache(family, with_encoder):
    """`generate` accepts and returns the cache under either name, also in training mode with checkpoints."""
    model = make_plain(family, is_encoder_decoder=with_encoder)
    ids, mask = padded([7, 7], 7, "right")
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "return_dict_in_generate": True, "do_sample": False}
    first = model.generate(**prompt(model, ids, mask), **options)
    assert isinstance(first, ModelOutput) and first.cache is first.past_key_values is first["cache"]
    results = []
    for name in ("cache", "past_key_values"):
        given = {**source(model, 2), **target(model, first.sequences, torch.ones_like(first.sequences))}
        results.append(model.generate(**given, **{name: copy.deepcopy(first.cache)}, **options))
        assert own_cache(results[-1].cache).get_seq_length() == first.sequences.shape[1] + 2
    assert torch.equal(*(result.sequences for result in results))
    model.gradient_checkpointing_enable()
    assert model.train().generate(**prompt(model, ids, mask), max_new_tokens=3).shape[0] == 2


@torch.no_grad()
@pytest.mark.parametrize("name", ["luna: softplus", "mega: laplace chunks", "megalodon: heads"])
def test_generate_continues_a_batch_of_turns(name):
    """A second, left-padded turn after a cache has the same result for each row as its unpadded tokens."""
    model = decoders.make(name)
    turns = [[[5, 6, 7, 8, 9], [10, 11]], [[12, 13], [14, 15, 16, 17, 18, 19]]]
    ids = torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9, 0, 0, 0, 0, 10, 11], [0] * 6 + [12, 13, 14, 15, 16, 17, 18, 19]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1], [0] * 6 + [1] * 8])
    past = model(ids[:, :8], attention_mask=mask[:, :8], use_cache=True).cache
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    together = model.generate(ids, attention_mask=mask, cache=past, **options)[:, ids.shape[1] :]
    for row, (first, second) in enumerate(turns):
        prompt = torch.tensor([first + second])
        separate = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[:, prompt.shape[1] :]
        assert together[row].tolist() == separate[0].tolist()


IDS = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 7, 6, 5]])
BERT = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32}
ENCODERS = {
    "bert": lambda: luna.enlarged(BertModel, BertConfig(**BERT, num_attention_heads=2)),
    "luna": lambda: luna.make("Model"),
    "mega": lambda: mega.make("Model"),
}


@torch.no_grad()
@pytest.mark.parametrize("encoder", ENCODERS)
def test_decoder_of_an_encoder_decoder_model(encoder, tmp_path):
    """`generate` of transformers' `EncoderDecoderModel` has the same results with a cache and without."""
    decoder = decoders.make_plain("mega", add_cross_attention=True).float()
    assert "linear_attention" in decoder.config.layer_types[0]  # for Accelerate
    model = EncoderDecoderModel(encoder=ENCODERS[encoder](), decoder=decoder).eval()
    source, mask = luna.tokens([7, 4]).values()
    options = {"decoder_start_token_id": 2, "pad_token_id": 1, "do_sample": False, "max_new_tokens": 4}
    for more in ({}, {"num_beams": 2, "num_return_sequences": 2}):
        inputs = {"inputs": source, "attention_mask": mask, "eos_token_id": None} | options | more
        texts = [model.generate(**inputs, use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*texts)
        assert not torch.equal(texts[0], model.generate(**inputs | {"inputs": source.flip(1)}))
    with pytest.raises(ValueError, match="`cache` must be a MegaSeq2SeqCache, got a EncoderDecoderCache"):
        model.generate(source, **options, cache_implementation="static")
    model.save_pretrained(tmp_path)
    assert torch.equal(EncoderDecoderModel.from_pretrained(tmp_path).generate(**inputs), texts[0])


def test_decoder_of_an_encoder_decoder_model_without_cross_attention():
    decoder = decoders.make_plain("mega").float()
    model = EncoderDecoderModel(encoder=ENCODERS["bert"](), decoder=decoder)
    with pytest.raises(ValueError, match="`config.add_cross_attention` has been changed to True"):
        model.generate(IDS, decoder_start_token_id=2)
    with pytest.raises(ValueError, match="use LunaForConditionalGeneration"):
        decoders.make_plain("luna", add_cross_attention=True)


LANGUAGE_MODELS = [name for name in CLASSES if name.endswith(("decoder", "seq2seq"))]


def filled(model, ids):
    """Return a cache that contains `ids`."""
    return model(**source(model, len(ids)), **target(model, ids), use_cache=True).cache


def generate(model, ids=IDS, mask=None, **options):
    named = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder:
        named = {f"decoder_{name}": value for name, value in named.items()} | source(model, len(ids))
    named = {name: value for name, value in named.items() if value is not None}
    return model.generate(**named, do_sample=False, max_new_tokens=3, **options)


@torch.no_grad()
@pytest.mark.parametrize("case", [name for name in LANGUAGE_MODELS if "seq2seq" not in name])
def test_embeddings_of_a_prompt_in_the_cache(case):
    model = CLASSES[case].make()
    embeddings = model.get_input_embeddings()(IDS)
    with pytest.raises(ValueError, match="contains 5 positions already, and `inputs_embeds` has 5"):
        model.generate(inputs_embeds=embeddings, cache=filled(model, IDS), max_new_tokens=3)


@torch.no_grad()
@pytest.mark.parametrize("case", LANGUAGE_MODELS)
def test_new_tokens_after_a_cache(case):
    """Generation after a cache accepts the complete text, or new tokens with a mask of the complete text."""
    model = CLASSES[case].make(eos_token_id=None)
    expected = generate(model)
    complete = generate(model, cache=filled(model, IDS[:, :3]))
    assert torch.equal(complete, expected)
    if not model.config.is_encoder_decoder:  # for encoder-decoders, transformers puts a start token before new tokens
        new = generate(model, IDS[:, 3:], torch.ones_like(IDS), cache=filled(model, IDS[:, :3]))
        assert torch.equal(new[:, 2:], expected[:, 5:])


@torch.no_grad()
@pytest.mark.parametrize("case, rows", diagonal(LANGUAGE_MODELS, [1, 2]))
def test_right_padding_warns(case, rows, messages):
    """Right padding warns once per call; padding on the left or in a source does not warn."""
    model = CLASSES[case].make()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:rows]
    ids = IDS[:rows].masked_fill(mask == 0, 1)
    calls = [{"mask": mask}] if model.config.is_encoder_decoder or rows == 1 else [{"mask": mask}, {}]
    for given in calls:
        messages.clear()
        generate(model, ids, **given)
        assert len([text for text in messages if "padding_side='left'" in text]) == 1
    messages.clear()
    generate(model, ids.flip(1), mask.flip(1))
    generate(model)
    assert not messages
    if not model.config.is_encoder_decoder:
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, max_new_tokens=2)
        assert len(messages) == 1
