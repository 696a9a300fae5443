"""Luna's decoders: a cached sequence gives what the whole gives, however it is cut and padded; generation."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, pipeline

from luna_mega import LunaCache, LunaConfig, LunaForCausalLM, LunaForMaskedLM, LunaModel
from tests.modeling.luna_decoders import DECODERS, make, new_cache, padded, source, target


@pytest.fixture(params=DECODERS)
def model(request):
    return make(**DECODERS[request.param])


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1] * 17, [6, 1, 1, 9], [16, 1], [1, 16]], ids=str)
@pytest.mark.parametrize("side", ["none", "left", "right", "middle"])
def test_cached_is_uncached(model, cuts, side):
    ids, mask = padded([17] * 2 if side == "none" else [17, 9, 3, 12], 17, side)
    given = source(model, len(ids), "left" if side == "right" else "right")
    expected = model(**given, **target(model, ids, mask), use_cache=False)
    assert expected.past_key_values is None
    past, start, logits = None, 0, []
    for index, length in enumerate(cuts):
        end = start + length
        # The mask of the segment, or of all so far, as `generate` gives it. What came of the source is in the cache.
        segment = target(model, ids[:, start:end], mask[:, start:end] if index % 2 else mask[:, :end])
        output = model(**given if index % 3 == 0 else {}, **segment, past_key_values=past, use_cache=True)
        past, start = output.past_key_values, end
        logits.append(output.logits)
    assert past.get_seq_length() == 17
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], expected.logits[mask.bool()])


@torch.no_grad()
def test_a_sequence_does_not_depend_on_padding_and_batch_mates(model):
    lengths = [11, 17, 4]
    ids, mask = padded(lengths, 17, "left")
    given, other = source(model, 3), source(model, 3, "left")
    together = model(**given, **target(model, ids, mask)).logits
    torch.testing.assert_close(model(**other, **target(model, ids, mask)).logits[mask.bool()], together[mask.bool()])
    for row, length in enumerate(lengths):
        row_source = {name: value[row : row + 1, : given["attention_mask"][row].sum()] for name, value in given.items()}
        alone = model(**row_source, **target(model, ids[row : row + 1, 17 - length :])).logits
        torch.testing.assert_close(together[row : row + 1, 17 - length :], alone)


@torch.no_grad()
def test_no_position_sees_later_ones(model):
    ids, _ = padded([12], 12, "none")
    given = source(model, 1)
    whole = model(**given, **target(model, ids)).logits
    for length in (1, 4, 11):
        torch.testing.assert_close(model(**given, **target(model, ids[:, :length])).logits, whole[:, :length])


def test_constant_memory(model):
    past, sizes = new_cache(model), []
    with torch.no_grad():
        for _ in range(4):
            ids = padded([7, 7], 7, "none")[0]
            model(**source(model, 2), **target(model, ids), past_key_values=past, use_cache=True)
            layers = past.layers if isinstance(past, LunaCache) else past.self_attention_cache.layers
            tensors = layers[0].tensors.values()
            sizes.append([tensor.shape for tensor in tensors])
            assert sum(x.untyped_storage().nbytes() for x in tensors) < 2 * sum(x.nbytes for x in tensors)
        assert sizes[0] == sizes[-1] and past.get_seq_length() == 28


def test_gradients_flow_through_the_cache(model):
    """Back-propagation through segments gives the gradients of the whole, also of the encoder."""
    ids, mask = padded([13, 8], 13, "left")
    given = source(model, 2)
    model(**given, **target(model, ids, mask)).logits[mask.bool()].sin().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    past, logits = new_cache(model), []
    for index, (a, b) in enumerate(((0, 6), (6, 7), (7, 13))):
        segment = target(model, ids[:, a:b], mask[:, a:b], past_key_values=past, use_cache=True)
        logits.append(model(**{} if index else given, **segment).logits)
    torch.cat(logits, 1)[mask.bool()].sin().sum().backward()
    unused = [name for name, gradient in expected.items() if gradient is None]
    assert all("packed_layer_norm" in name for name in unused)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_and_eager_attention_change_nothing(model, checkpointing):
    ids, mask = padded([13, 8], 13, "left")
    inputs = source(model, 2) | target(model, ids, mask)
    gradients = []
    for changed in (False, True):
        if changed:
            model.gradient_checkpointing_enable() if checkpointing else model.set_attn_implementation("eager")
        model.zero_grad()
        model.train(checkpointing)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif hasattr(module, "pack_query"):
                module.dropout = 0.0
        model(**inputs, use_cache=False).logits[mask.bool()].sin().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.6},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
        {"num_beams": 2, "prefix_allowed_tokens_fn": lambda batch, ids: [3 + len(ids) % 5, 9, 12]},
    ],
    ids=["greedy", "beams", "sampling", "beam sampling", "prefix-constrained"],
)
def test_generate(model, options):
    ids, mask = padded([7, 3], 7, "left")
    inputs = source(model, 2) or {"input_ids": ids, "attention_mask": mask}
    results = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        results.append(model.generate(**inputs, max_new_tokens=9, eos_token_id=None, use_cache=use_cache, **options))
    assert torch.equal(*results) and results[0].shape[1] == (10 if model.config.is_encoder_decoder else 16)


@torch.no_grad()
def test_generate_after_a_prefix_of_the_target():
    model = make(**DECODERS["encoder-decoder: translation"])
    ids, mask = padded([5, 3], 5, "left")
    ids[0, 0] = ids[1, 2] = model.config.decoder_start_token_id
    given, options = source(model, 2), {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    prefix = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    both = model.generate(**given, **prefix, **options)
    assert torch.equal(both, model.generate(**given, **prefix, use_cache=False, **options))
    one = {name: value[1:] for name, value in given.items()}
    alone = model.generate(**one, decoder_input_ids=ids[1:, 2:], **options)
    assert torch.equal(both[1, 2:], alone[0])


@torch.no_grad()
@pytest.mark.parametrize("cached", [2, 4])
def test_generate_goes_on_from_a_target_in_a_cache(cached):
    model = make(**DECODERS["encoder-decoder: translation"])
    ids, _ = padded([5, 5], 5, "right")
    ids[:, 0] = model.config.decoder_start_token_id
    given, options = source(model, 2), {"do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    whole = model.generate(**given, decoder_input_ids=ids, **options)
    past = model(**given, decoder_input_ids=ids[:, :cached], use_cache=True).past_key_values
    assert torch.equal(model.generate(**given, decoder_input_ids=ids, past_key_values=past, **options), whole)


@torch.no_grad()
def test_chunked_prefill():
    model = make()
    ids, mask = padded([7, 3], 7, "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, prefill_chunk_size=3, **options), model.generate(ids, **options))


@torch.no_grad()
@pytest.mark.parametrize("cached", [4, 7, 10], ids=["prompt cut", "prompt", "prompt and output"])
def test_generate_continues_from_a_cache(cached):
    model = make()
    ids, mask = padded([7, 3], 7, "left")
    options = {"do_sample": False, "eos_token_id": None}
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=8, **options)
    mask = torch.cat([mask, mask.new_ones(2, 8)], 1)
    past = model(whole[:, :cached], mask[:, :cached], use_cache=True).past_key_values
    begun = whole[:, : max(cached + 1, 7)]
    length = begun.shape[1]
    options |= {"past_key_values": past, "max_new_tokens": 15 - length}
    assert torch.equal(model.generate(begun, attention_mask=mask[:, :length], **options), whole)
    assert past.get_seq_length() == 14


def test_generate_from_embeddings():
    model = make()
    ids, mask = padded([7, 3], 7, "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **options), model.generate(ids, **options)[:, 7:])


@torch.no_grad()
def test_generate_keeps_the_padding_token_where_the_mask_does():
    """transformers drops a mask of ones, `forward` takes the token for padding where there is no mask."""
    model = make()
    ids = torch.tensor([[5, 1, 9, 1, 1, 4], [1, 8, 8, 1, 7, 1]])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    for options["use_cache"] in (True, False):
        logits = model.generate(ids, attention_mask=mask, **options).logits[0]
        torch.testing.assert_close(logits, model(ids, mask).logits[:, -1].float(), check_dtype=False)


@torch.no_grad()
def test_prefix_as_projection():
    """`packed_states` takes the place of the learned P, in every layer, also with a cache and in `generate`."""
    model = make()
    reader = LunaModel(make(is_encoder_decoder=True).config.encoder_config).double().eval()
    read = reader(*padded([8, 3], 8, "right"))
    prefix = {"packed_states": read.packed_last_hidden_state, "packed_mask": read.packed_mask}
    ids, mask = padded([7, 3], 7, "left")
    whole = model(ids, mask, **prefix).logits
    assert (whole - model(ids, mask).logits).abs().max() > 0.01
    first = model(ids[:, :4], mask[:, :4], **prefix, use_cache=True)
    second = model(ids[:, 4:], mask, past_key_values=first.past_key_values)
    cached = torch.cat([first.logits, second.logits], 1)
    torch.testing.assert_close(cached[mask.bool()], whole[mask.bool()])
    alone = model(ids[1:, 4:], packed_states=read.packed_last_hidden_state[1:, :3]).logits
    torch.testing.assert_close(whole[1:, 4:], alone)
    options = {"attention_mask": mask, "max_new_tokens": 6, "num_beams": 3, **prefix}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))


@torch.no_grad()
def test_logits_to_keep(model):
    ids, mask = padded([7, 3], 7, "left")
    inputs = source(model, 2) | target(model, ids, mask)
    whole = model(**inputs).logits
    for keep, kept in ((0, whole), (1, whole[:, 6:]), (3, whole[:, 4:]), (torch.tensor([5, 0]), whole[:, [5, 0]])):
        torch.testing.assert_close(model(**inputs, logits_to_keep=keep).logits, kept)
    shift = 0 if model.config.is_encoder_decoder else 1
    loss = model(**inputs, labels=ids[:, 4:], logits_to_keep=3).loss
    expected = cross_entropy(whole[:, 4 : 7 - shift].flatten(0, 1), ids[:, 4 + shift :].flatten())
    torch.testing.assert_close(loss, expected, check_dtype=False)
    with pytest.raises(ValueError, match=r"labels must have the shape \[2, 3\] .* got \[2, 7\]"):
        model(**inputs, labels=ids, logits_to_keep=3)


@torch.no_grad()
def test_attentions():
    """In one go and with a cache; a row of P that is not in use has no weight."""
    model = make()
    ids, mask = padded([7, 3], 7, "left")
    prefix = {
        "packed_states": torch.randn(2, 4, 24).double(),
        "packed_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    whole = model(ids, mask, **prefix, output_attentions=True)
    torch.testing.assert_close(whole.logits, model(ids, mask, **prefix).logits)
    first = model(ids[:, :4], mask[:, :4], **prefix, output_attentions=True, use_cache=True)
    second = model(ids[:, 4:], mask, past_key_values=first.past_key_values, output_attentions=True)
    for weights, *parts in zip(whole.attentions, first.attentions, second.attentions, strict=True):
        assert weights.shape == (2, 4, 7, 4) and (weights[1, :, :, 2:] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 7).double())
        torch.testing.assert_close(
            torch.cat(parts, dim=2)[mask[:, None].expand(2, 4, 7).bool()], weights[mask[:, None].expand(2, 4, 7).bool()]
        )


def test_shift_labels():
    model = make()
    ids, mask = padded([7, 3], 7, "left")
    shifted = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], 1)
    torch.testing.assert_close(model(ids, mask, shift_labels=shifted).loss, model(ids, mask, labels=ids).loss)


@torch.no_grad()
@pytest.mark.parametrize("name", ["decoder: softplus", "encoder-decoder: translation"])
def test_compile_and_export(name):
    torch.compiler.reset()  # code that was compiled often in this process is refused
    model = make(**DECODERS[name] | {"num_hidden_layers": 1})
    inputs = source(model, 2) | target(model, *padded([17, 5], 17, "left"))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs, use_cache=False).logits, model(**inputs).logits)
    shapes = {key: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for key in inputs} | {"use_cache": None}
    exported = torch.export.export(model, (), inputs | {"use_cache": False}, dynamic_shapes=shapes, strict=False)
    for lengths, total in (([17, 5], 17), ([30, 2, 7], 30)):
        ids, mask = padded(lengths, total, "left")
        inputs = source(model, len(ids)) | target(model, ids, mask)
        logits = exported.module()(**inputs, use_cache=False).logits
        torch.testing.assert_close(logits[mask.bool()], model(**inputs).logits[mask.bool()], atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trains_with_the_defaults(tmp_path, checkpointing):
    """Trainer passes no use_cache; evaluation makes a cache, which must not be gathered."""
    model = make(torch.float32)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 30, (8, 11))]
    arguments = TrainingArguments(
        output_dir=tmp_path,
        max_steps=5,
        learning_rate=1e-3,
        gradient_checkpointing=checkpointing,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.predict(data).predictions.shape == (8, 11, 30)
    assert trainer.evaluate()["eval_loss"] < before


def test_text_generation_pipeline(tokenizer):
    """A prompt alone and in a batch with longer ones gives the same text."""
    tokenizer.padding_side = "left"
    generator = pipeline("text-generation", make(vocab_size=len(tokenizer)), tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    prompts = ["w1 w2 w3 w4 w5", "w7", "w8 w9"]
    alone = [generator(prompt, **options)[0]["generated_text"] for prompt in prompts]
    assert all(text.strip() for text in alone) and len(set(alone)) > 1
    assert [outputs[0]["generated_text"] for outputs in generator(prompts, batch_size=3, **options)] == alone


@torch.no_grad()
def test_cache_operations(model):
    ids, mask = padded([6, 4, 5], 6, "left")
    given = source(model, 3)
    past = model(**given, **target(model, ids, mask), use_cache=True).past_key_values
    order = torch.tensor([2, 0, 0])
    past.reorder_cache(order)
    next_ids = torch.tensor([[4], [9], [4]])
    ids, mask = torch.cat([ids[order], next_ids], 1), torch.cat([mask[order], torch.ones(3, 1).long()], 1)
    expected = model(**{name: value[order] for name, value in given.items()}, **target(model, ids, mask))
    output = model(**target(model, next_ids), past_key_values=past, use_cache=True)
    torch.testing.assert_close(output.logits[:, -1], expected.logits[:, -1])
    past.batch_repeat_interleave(2)
    past.batch_select_indices(torch.tensor([0, 3, 4, 5]))
    layers = past.layers if isinstance(past, LunaCache) else past.self_attention_cache.layers
    assert layers[0].batch_size == 4
    past.crop(past.get_seq_length())
    with pytest.raises(ValueError, match="cannot be cropped from 7 to 3"):
        past.crop(3)
    past.reset()
    assert past.get_seq_length() == 0 and layers[0].batch_size is None


def test_errors(model):
    config = model.config
    ids = torch.randint(3, 30, (2, 5))
    given, inputs = source(model, 2), source(model, 2) | target(model, ids)
    past = model(**inputs, use_cache=True).past_key_values
    one = {name: value[:1] for name, value in inputs.items() if value is not None}
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        model(**one, past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        make(is_encoder_decoder=config.is_encoder_decoder, num_hidden_layers=3)(**inputs, past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch|has 5 positions already"):
        model.generate(**(given or {"input_ids": ids}), past_key_values=past, num_beams=2)
    with pytest.raises(ValueError, match="length 0"):
        model(**given, **target(model, ids[:, :0]))
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(
            **({name: x[:1] for name, x in given.items()} or {"input_ids": ids[:1]}), prompt_lookup_num_tokens=2
        )
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(**(given or {"input_ids": ids}), cache_implementation="static")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[4, 5]])
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="use_cache=False"):
        model.train()(**inputs, use_cache=True)


def test_errors_of_a_decoder_alone():
    model = make()
    ids = torch.randint(3, 30, (2, 5))
    for prompt in ({"input_ids": ids[:, :0]}, {"inputs_embeds": torch.zeros(2, 0, 24).double()}):
        with pytest.raises(ValueError, match="prompts have length 0"):
            model.generate(**prompt)
    padding = {"input_ids": torch.tensor([[4, 5], [1, 1]])}
    for mask in ({}, {"attention_mask": torch.tensor([[1, 1], [0, 0]])}):
        with pytest.raises(ValueError, match=r"nothing but padding in the prompts \[1\]"):
            model.generate(**padding, **mask)
    with pytest.raises(ValueError, match="must be a LunaCache, got a tuple"):
        model(ids, past_key_values=((),))
    with pytest.raises(ValueError, match=r"packed_states must have the shape \[2, rows, 24\], got \[1, 3, 24\]"):
        model(ids, packed_states=torch.zeros(1, 3, 24).double())
    with pytest.raises(ValueError, match=r"packed_mask must have the shape \[2, 3\] .* got \[2, 4\]"):
        model(ids, packed_states=torch.zeros(2, 3, 24).double(), packed_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="packed_mask is the mask of packed_states"):
        model(ids, packed_mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match="is_decoder=True"):
        LunaForCausalLM(LunaConfig())
    with pytest.raises(ValueError, match="need a decoder"):
        LunaForMaskedLM(LunaConfig(vocab_size=30))(ids, use_cache=True)
    with pytest.raises(StrictDataclassError, match="contextual_projection=True needs an encoder"):
        LunaConfig(is_decoder=True, contextual_projection=True)
    with pytest.raises(ValueError, match="sequences of length 45 exceed the 40 learned positions"):
        make(position_embedding_type="learned")(torch.randint(3, 30, (1, 45)))
