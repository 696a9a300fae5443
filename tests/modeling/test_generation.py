"""`generate` with decoders of all families: with and without a cache, from any prompt, and its options."""

import copy
import re

import pytest
import torch
from torch import distributed
from transformers import BertConfig, BertModel, CompileConfig, EncoderDecoderModel

from tests.marks import diagonal
from tests.modeling import decoders, luna
from tests.modeling.contract import CLASSES
from tests.modeling.decoders import PLAIN, SOME, TRANSLATING, make, make_plain, padded, prompt, source, target

GREEDY = {"do_sample": False, "eos_token_id": None}
OTHERS = [name for name in decoders.DECODERS if name not in SOME]
OPTIONS = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6}
    | {"early_stopping": True},
    "sampling": {"do_sample": True, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "constrained": {"do_sample": False, "num_beams": 2, "prefix_allowed_tokens_fn": lambda row, ids: [4, 9, 12]},
}


@torch.no_grad()
@pytest.mark.parametrize("name, option", decoders.with_each(SOME + OTHERS, OPTIONS, slow=1, fast=SOME))
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
    if not options["do_sample"]:
        for row in range(2):
            tokens = inputs["input_ids"][row, inputs["attention_mask"][row].bool()][None]
            separate = model.generate(tokens, max_new_tokens=4, **options)
            begun = 0 if model.config.is_encoder_decoder else 7 - tokens.shape[1]
            together = results[0][row * count : (row + 1) * count, begun:]
            assert torch.equal(separate, together[:, : separate.shape[1]])


@torch.no_grad()
@pytest.mark.parametrize(("name", "cached"), diagonal(SOME, [2, 4, 7, 10]))
def test_generate_continues_from_a_cache(name, cached):
    """`generate` continues from a cache of part of a text, the text, or text and output, also a static one."""
    model, (ids, mask) = make(name), padded([7, 3], 7, "left")
    given = source(model, 2)
    ids = ids.scatter(1, mask.argmax(1, keepdim=True), 2)  # the token that starts targets
    complete = model.generate(**given, **target(model, ids, mask), max_new_tokens=8, **GREEDY)
    assert torch.equal(
        complete, model.generate(**given, **target(model, ids, mask), max_new_tokens=8, use_cache=False, **GREEDY)
    )
    mask = torch.cat([mask, mask.new_ones(2, 8)], 1)
    past = model(**given, **target(model, complete[:, :cached], mask[:, :cached]), use_cache=True).cache
    other = copy.deepcopy(past)
    if cached == 10:
        past.make_static(20)
    length = max(cached + 1, 7)
    begun = target(model, complete[:, :length], mask[:, :length])
    found = model.generate(**given, **begun, cache=past, max_new_tokens=15 - length, **GREEDY)
    assert torch.equal(found, complete) and past.get_seq_length() == 14
    if not given and cached < 7:  # new tokens with a mask of all; transformers puts a start token before new targets
        new = {"input_ids": complete[:, cached:7], "attention_mask": mask[:, :7]}
        found = model.generate(**new, cache=other, max_new_tokens=8, **GREEDY)
        assert torch.equal(found, complete[:, cached:])


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
@pytest.mark.parametrize("name", [name for name in decoders.DECODER_ONLY if name in SOME])
def test_prompts_of_decoders(name):
    """Prompts may be chunks or embeddings, and may contain padding tokens under a mask of ones."""
    decoder, (ids, mask) = make(name), padded([7, 3], 7, "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = decoder.generate(ids, **options)
    assert torch.equal(decoder.generate(ids, prefill_chunk_size=3, **options), expected)
    embeddings = decoder.get_input_embeddings()(ids)
    assert torch.equal(decoder.generate(inputs_embeds=embeddings, **options), expected[:, 7:])
    assert torch.equal(decoder.generate(ids, token_type_ids=0 * ids, **options), expected)
    # With a mask of ones, which transformers drops, padding tokens in the prompt still count as tokens.
    ids, mask = torch.tensor([[5, 1, 9, 1, 1, 4], [1, 8, 8, 1, 7, 1]]), torch.ones(2, 6)
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    for options["use_cache"] in (True, False):
        logits = decoder.generate(ids, attention_mask=mask, **options).logits[0]
        torch.testing.assert_close(logits, decoder(ids, mask).logits[:, -1].float(), check_dtype=False)


ASSISTED = "assisted generation is not supported with stateful models"
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
]
ALONE = "is not supported by encoder-decoders; omit the argument"
OF_DECODERS = {"guidance_scale": 1.5, "prefill_chunk_size": 3, "token_healing": True}
PADDING = torch.tensor([[4, 5], [1, 1]])


@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_unsupported_inputs_raise(family, with_encoder):
    model, kind = make_plain(family, is_encoder_decoder=with_encoder), "sources" if with_encoder else "prompts"
    inputs = prompt(model, *padded([7, 3], 7, "left"))
    rows = [*UNSUPPORTED, ({"assistant_model": model}, ASSISTED)]
    rows += [({name: value}, ALONE) for name, value in OF_DECODERS.items() if with_encoder]
    rows += [] if with_encoder else [({"guidance_scale": 1.5, "num_beams": 2}, "not supported with num_beams=2")]
    for options in (
        {"input_ids": PADDING[:, :0]},
        {"input_ids": None, "inputs_embeds": torch.zeros(2, 0, 24).double()},
    ):
        rows.append((options | {"attention_mask": None}, f"{kind} have length 0"))
    for mask in (None, torch.tensor([[1, 1], [0, 0]])):
        rows.append(({"input_ids": PADDING, "attention_mask": mask}, f"the {kind} [1] contain only padding"))
    for options, reason in rows:
        given = {name: value for name, value in (inputs | options).items() if value is not None}
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(reason)) as error:
            model.generate(**given, max_new_tokens=5)
        assert "\n" not in str(error.value).strip()
    for unsupported in (model.generate_batch, model.init_continuous_batching):
        with pytest.raises(NotImplementedError, match="continuous batching"):
            unsupported([[4, 5]])


def step(model, input_ids, logits_processor, stopping_criteria, generation_config, **given):
    """Append one token: a loop of a user."""
    inputs = model.prepare_inputs_for_generation(input_ids, **given)
    return torch.cat([input_ids, model(**inputs).logits[:, -1:].argmax(-1)], 1)


@torch.no_grad()
@pytest.mark.parametrize(("family", "with_encoder"), PLAIN)
def test_options_that_this_package_handles(family, with_encoder):
    """Logits of steps, a static cache, an own loop, several processes, and beams that end with a text."""
    model = make_plain(family, is_encoder_decoder=with_encoder)
    inputs = prompt(model, *padded([7, 3], 7, "left"))
    settings = GREEDY | {"max_new_tokens": 5, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **settings, output_logits=True)
    steps = torch.stack(plain.logits, 1)
    if with_encoder:
        complete = model(**inputs, decoder_input_ids=plain.sequences, use_cache=False).logits[:, :-1]
    else:
        mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(2, 5)], 1)
        complete = model(plain.sequences, mask, use_cache=False).logits[:, -6:-1]
    torch.testing.assert_close(steps, complete.to(steps.dtype), atol=1e-5, rtol=1e-5)
    one = model.generate(**inputs, **GREEDY, max_new_tokens=5, custom_generate=step)
    assert torch.equal(one, plain.sequences[:, : one.shape[1]])
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    synced = model.generate(**inputs, **settings, synced_gpus=True)
    distributed.destroy_process_group()
    assert torch.equal(synced.sequences, plain.sequences)
    assert not decoders.own_cache(plain["cache"]).is_static
    for options in ({}, {"max_cache_len": 40}):
        static = model.generate(**inputs, **settings, cache_implementation="static", **options)
        assert torch.equal(static.sequences, plain.sequences) and static["cache"].is_static
    beams = {"num_beams": 3, "early_stopping": True, "eos_token_id": [*range(20)], "max_new_tokens": 5}
    assert torch.equal(*(model.generate(**inputs, **beams, use_cache=use) for use in (True, False)))


NEGATIVE = torch.tensor([[1, 8], [9, 7]])


@torch.no_grad()
@pytest.mark.parametrize("family", ["luna", "mega", "megalodon"])
@pytest.mark.parametrize(("prompts", "kept"), [(None, None), (NEGATIVE + 2, None), (NEGATIVE, (NEGATIVE > 1).long())])
def test_guidance_by_negative_prompts(family, prompts, kept):
    model, (ids, mask) = make_plain(family), padded([7, 3], 7, "left")
    options = GREEDY | {"max_new_tokens": 5, "return_dict_in_generate": True, "guidance_scale": 1.5}
    options |= {"negative_prompt_ids": prompts, "negative_prompt_attention_mask": kept}
    guided = model.generate(ids, attention_mask=mask, **options, output_scores=True, output_logits=True)
    before = ids[:, -1:] if prompts is None else prompts
    kept = torch.ones_like(before) if kept is None else kept
    bare, mask = torch.cat([before, guided.sequences[:, -5:-1]], 1), torch.cat([kept, kept.new_ones(2, 4)], 1)
    without, given = model(bare, mask).logits[:, -5:].log_softmax(-1), torch.stack(guided.logits, 1).log_softmax(-1)
    expected = (1.5 * (given - without) + without).float()
    torch.testing.assert_close(torch.stack(guided.scores, 1).float(), expected, atol=1e-5, rtol=1e-5)


BERT = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}


@torch.no_grad()
def test_decoder_of_an_encoder_decoder_model(tmp_path):
    """`generate` of transformers' `EncoderDecoderModel` has the same results with a cache and without."""
    decoder = make_plain("mega", add_cross_attention=True).float()
    assert "linear_attention" in (kind := decoder.config.layer_types[0]) and "cp_size" in repr(kind)  # for Accelerate
    model = EncoderDecoderModel(encoder=luna.enlarged(BertModel, BertConfig(**BERT)), decoder=decoder).eval()
    ids, mask = luna.tokens([7, 4]).values()
    options = GREEDY | {"decoder_start_token_id": 2, "pad_token_id": 1, "max_new_tokens": 4}
    for more in ({}, {"num_beams": 2, "num_return_sequences": 2}):
        inputs = {"inputs": ids, "attention_mask": mask} | options | more
        texts = [model.generate(**inputs, use_cache=use_cache) for use_cache in (True, False)]
        assert torch.equal(*texts)
        assert not torch.equal(texts[0], model.generate(**inputs | {"inputs": ids.flip(1)}))
    with pytest.raises(ValueError, match="`cache` must be a MegaSeq2SeqCache, got a EncoderDecoderCache"):
        model.generate(ids, **options, cache_implementation="static")
    model.save_pretrained(tmp_path)
    assert torch.equal(EncoderDecoderModel.from_pretrained(tmp_path).generate(**inputs), texts[0])
    model = EncoderDecoderModel(encoder=model.encoder, decoder=make_plain("mega").float())
    with pytest.raises(ValueError, match="`config.add_cross_attention` has been changed to True"):
        model.generate(ids, **options)


@torch.no_grad()
@pytest.mark.parametrize(
    "case, rows", diagonal([name for name in CLASSES if name.endswith(("decoder", "seq2seq"))], [1, 2])
)
def test_right_padding_warns(case, rows, messages):
    """Right padding warns once per call; padding on the left or in a source does not warn."""
    model = CLASSES[case].make()
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:rows]
    ids = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 7, 6, 5]])[:rows].masked_fill(mask == 0, 1)

    def count(ids, mask):
        messages.clear()
        text = {name: x for name, x in target(model, ids, mask).items() if x is not None}
        model.generate(**source(model, rows), **text, do_sample=False, max_new_tokens=3)
        return len([text for text in messages if "padding_side='left'" in text])

    assert count(ids, mask) == 1 and count(ids.flip(1), mask.flip(1)) == 0
    if not model.config.is_encoder_decoder:
        assert rows == 1 or count(ids, None) == 1
        messages.clear()
        model.generate(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, max_new_tokens=2)
        assert len(messages) == 1
