"""MegaForCausalLM: a cached sequence gives what the whole gives, however it is cut and padded; generation."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments, pipeline

from luna_mega import MegaCache, MegaConfig, MegaForCausalLM, MegaForMaskedLM

SHAPES = {
    "softmax": {},
    "laplace": {"attention_activation": "laplace"},
    "relu2 simple": {"attention_activation": "relu2", "relative_positional_bias": "simple", "max_positions": 40},
    "softmax chunks": {"use_chunking": True, "chunk_size": 4, "relative_positional_bias": "simple"},
    "laplace chunks": {"attention_activation": "laplace", "use_chunking": True, "chunk_size": 5},
    "relu2 chunks of 1": {"attention_activation": "relu2", "use_chunking": True, "chunk_size": 1},
    "truncated": {"truncation": 3, "use_chunking": True, "chunk_size": 4},
}


def make(**fields) -> MegaForCausalLM:
    torch.manual_seed(0)
    config = MegaConfig(
        hidden_size=12,
        intermediate_size=20,
        shared_representation_size=8,
        ema_projection_size=3,
        nffn_hidden_size=16,
        bidirectional=False,
        is_decoder=True,
        initializer_range=0.3,
        **({"vocab_size": 30, "num_hidden_layers": 2} | fields),
    )
    return MegaForCausalLM(config).double().eval()


@pytest.fixture(params=SHAPES)
def model(request):
    return make(**SHAPES[request.param])


def padded(lengths, total, side):
    """Tokens and mask `[B, total]`, with padding on the `side`, or behind the first two tokens."""
    ids, mask = torch.randint(3, 30, (len(lengths), total)), torch.zeros(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, total - length if side == "left" else 0 : total if side == "left" else length] = 1
        if side == "middle":
            mask[row] = torch.cat([mask[row, :2], mask[row, 2:].flip(0)])
    return ids.masked_fill(mask == 0, 1), mask


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1] * 17, [6, 1, 1, 9], [5, 12], [4, 4, 4, 4, 1], [16, 1], [1, 16]], ids=str)
@pytest.mark.parametrize("side", ["none", "left", "right", "middle"])
def test_cached_is_uncached(model, cuts, side):
    ids, mask = padded([17, 17] if side == "none" else [17, 9, 3, 12], 17, side)
    expected = model(ids, mask, use_cache=False)
    assert expected.past_key_values is None
    past, start, logits = None, 0, []
    for index, length in enumerate(cuts):
        end = start + length
        # The mask of the segment, or of all so far, as `generate` gives it.
        given = mask[:, start:end] if index % 2 else mask[:, :end]
        output = model(ids[:, start:end], given, past_key_values=past, use_cache=True)
        past, start = output.past_key_values, end
        logits.append(output.logits)
    assert past.get_seq_length() == 17
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], expected.logits[mask.bool()])


@torch.no_grad()
def test_a_sequence_does_not_depend_on_padding(model):
    ids, mask = padded([11, 17, 4], 17, "left")
    together = model(ids, mask, use_cache=False).logits
    for row, length in enumerate([11, 17, 4]):
        alone = model(ids[row : row + 1, 17 - length :]).logits
        torch.testing.assert_close(together[row : row + 1, 17 - length :], alone)


@torch.no_grad()
def test_no_position_sees_later_ones(model):
    ids, _ = padded([12], 12, "none")
    whole = model(ids).logits
    for length in (1, 4, 5, 11):
        torch.testing.assert_close(model(ids[:, :length]).logits, whole[:, :length])


def test_constant_memory():
    model = make(**SHAPES["laplace chunks"])
    past = MegaCache(model.config)
    sizes = []
    with torch.no_grad():
        for _ in range(4):
            model(torch.randint(3, 30, (2, 7)), past_key_values=past)
            layer = past.layers[0]
            sizes.append([layer.keys.shape, layer.values.shape, layer.mask.shape, layer.average.shape])
            assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 8
    assert sizes[0] == sizes[-1] and past.get_seq_length() == 28
    assert sizes[0][0] == (2, 4, 8)


def test_gradients_flow_through_the_cache(model):
    """Back-propagation through segments gives the gradients of the whole."""
    ids, mask = padded([13, 8], 13, "left")
    model(ids, mask, use_cache=False).logits[mask.bool()].sin().sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    past = MegaCache(model.config)
    parts = [
        model(ids[:, a:b], mask[:, a:b], past_key_values=past, use_cache=True).logits
        for a, b in ((0, 6), (6, 7), (7, 13))
    ]
    torch.cat(parts, 1)[mask.bool()].sin().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "prefill_chunk_size": 3},
    ],
    ids=["greedy", "beams", "sampling", "beam sampling", "chunked prefill"],
)
def test_generate(model, options):
    ids, mask = padded([7, 3], 7, "left")
    results = []
    for use_cache in (True, False):
        if not use_cache:
            options = {name: value for name, value in options.items() if name != "prefill_chunk_size"}
        torch.manual_seed(1)
        results.append(model.generate(ids, attention_mask=mask, max_new_tokens=9, use_cache=use_cache, **options))
    assert torch.equal(*results)
    assert results[0].shape[1] == 16 or (results[0][:, -1] != 0).any()


@pytest.mark.parametrize("cached", [4, 7, 10], ids=["prompt cut", "prompt", "prompt and output"])
def test_generate_continues_from_a_cache(model, cached):
    ids, mask = padded([7, 3], 7, "left")
    options = {"do_sample": False, "eos_token_id": None}
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=8, **options)
    mask = torch.cat([mask, mask.new_ones(2, 8)], 1)
    with torch.no_grad():
        past = model(whole[:, :cached], mask[:, :cached]).past_key_values
    begun = whole[:, : max(cached + 1, 7)]
    length = begun.shape[1]
    options |= {"past_key_values": past, "max_new_tokens": 15 - length}
    assert torch.equal(model.generate(begun, attention_mask=mask[:, :length], **options), whole)
    assert past.get_seq_length() == 14


def test_generate_from_embeddings(model):
    ids, mask = padded([7, 3], 7, "left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **options), model.generate(ids, **options)[:, 7:])


@torch.no_grad()
def test_generate_keeps_the_padding_token_where_the_mask_does(model):
    """transformers drops a mask of ones, `forward` takes the token for padding where there is no mask."""
    ids = torch.tensor([[5, 1, 9, 1, 1, 4], [1, 8, 8, 1, 7, 1]])
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    for options["use_cache"] in (True, False):
        logits = model.generate(ids, attention_mask=mask, **options).logits[0]
        torch.testing.assert_close(logits, model(ids, mask).logits[:, -1].float(), check_dtype=False)


@torch.no_grad()
def test_logits_to_keep(model):
    ids, mask = padded([7, 3], 7, "left")
    whole = model(ids, mask).logits
    for keep, kept in ((0, whole), (1, whole[:, 6:]), (3, whole[:, 4:]), (torch.tensor([5, 0]), whole[:, [5, 0]])):
        torch.testing.assert_close(model(ids, mask, logits_to_keep=keep).logits, kept)
    loss = model(ids, mask, labels=ids[:, 4:], logits_to_keep=3).loss
    torch.testing.assert_close(
        loss, cross_entropy(whole[:, 4:6].flatten(0, 1), ids[:, 5:].flatten()), check_dtype=False
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["softmax", "laplace chunks"])
def test_compile_and_export(name):
    torch.compiler.reset()  # code that was compiled often in this process is refused
    model = make(**SHAPES[name], num_hidden_layers=1)
    ids, mask = padded([17, 5], 17, "left")
    inputs = {"input_ids": ids, "attention_mask": mask}
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**inputs, use_cache=False).logits, model(**inputs).logits)
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    shapes = dict.fromkeys(inputs, shape) | {"use_cache": None}
    exported = torch.export.export(model, (), inputs | {"use_cache": False}, dynamic_shapes=shapes, strict=False)
    for lengths, total in (([17, 5], 17), ([30, 2, 7], 30), ([2], 2)):
        ids, mask = padded(lengths, total, "left")
        logits = exported.module()(input_ids=ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(logits[mask.bool()], model(ids, mask).logits[mask.bool()], atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trains_with_the_defaults(tmp_path, checkpointing):
    """Trainer passes no use_cache; evaluation makes a cache, which must not be gathered."""
    model = make(**SHAPES["laplace chunks"]).float()
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 30, (8, 11))]
    arguments = TrainingArguments(
        output_dir=tmp_path,
        max_steps=3,
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
def test_cache_operations():
    model = make(**SHAPES["truncated"])
    ids, mask = padded([6, 4, 5], 6, "left")
    past = model(ids, mask).past_key_values
    past.reorder_cache(torch.tensor([2, 0, 0]))
    next_ids = torch.tensor([[4], [9], [4]])
    ordered = torch.tensor([2, 0, 0])
    expected = model(torch.cat([ids[ordered], next_ids], 1), torch.cat([mask[ordered], torch.ones(3, 1).long()], 1))
    torch.testing.assert_close(model(next_ids, past_key_values=past).logits[:, -1], expected.logits[:, -1])
    past.batch_repeat_interleave(2)
    assert past.layers[0].batch_size == 6
    past.crop(past.get_seq_length())
    with pytest.raises(ValueError, match="cannot be cropped from 7 to 3"):
        past.crop(3)
    past.reset()
    assert past.get_seq_length() == 0 and past.layers[0].batch_size is None


def test_errors():
    model = make()
    ids = torch.randint(3, 30, (2, 5))
    past = model(ids).past_key_values
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        model(ids[:1], past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        make(num_hidden_layers=1)(ids, past_key_values=past)
    for other in ({"use_chunking": True, "chunk_size": 4}, {"truncation": 3}):
        with pytest.raises(ValueError, match="does not fit this model and batch"):
            make(**other)(ids, past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        model.generate(ids[:1], past_key_values=past)
    with pytest.raises(ValueError, match="length 0"):
        model(ids[:, :0])
    for prompt in ({"input_ids": ids[:, :0]}, {"inputs_embeds": torch.zeros(2, 0, 12).double()}):
        with pytest.raises(ValueError, match="prompts have length 0"):
            model.generate(**prompt)
    padding = {"input_ids": torch.tensor([[4, 5], [1, 1]])}
    for mask in ({}, {"attention_mask": torch.tensor([[1, 1], [0, 0]])}):
        with pytest.raises(ValueError, match=r"nothing but padding in the prompts \[1\]"):
            model.generate(**padding, **mask)
    with pytest.raises(ValueError, match=r"labels must have the shape \[2, 3\] .* got \[2, 5\]"):
        model(ids, labels=ids, logits_to_keep=3)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(ids[:1], prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="must be a MegaCache, got a tuple"):
        model(ids, past_key_values=((),))
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, past_key_values=past, output_attentions=True)
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(ids, cache_implementation="static")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[4, 5]])
    with pytest.raises(ValueError, match="is_decoder=True"):
        MegaForCausalLM(MegaConfig())
    with pytest.raises(ValueError, match="need a decoder"):
        MegaForMaskedLM(MegaConfig(vocab_size=30))(ids, use_cache=True)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="use_cache=False"):
        model.train()(ids, use_cache=True)
