"""MegaForConditionalGeneration: a target cut anyhow, either side padded anyhow, gives what the whole gives alone."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModel,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from luna_mega import (
    MegaCache,
    MegaConfig,
    MegaForCausalLM,
    MegaForConditionalGeneration,
    MegaModel,
    MegaSeq2SeqModel,
)

SIMPLE = {"relative_positional_bias": "simple", "max_positions": 24, "decoder_max_positions": 30}
SHAPES = {
    "softmax": {},
    "laplace simple post-norm": SIMPLE
    | {
        "attention_activation": "laplace",
        "normalize_before_mega": False,
        "normalize_before_ffn": False,
        "embedding_norm": True,
        "scale_embedding": True,
    },
    "relu2 chunks": {"attention_activation": "relu2", "use_chunking": True, "chunk_size": 4, "final_norm": True},
    "softmax simple, two vocabularies, other decoder": SIMPLE
    | {
        "decoder_vocab_size": 23,
        "num_decoder_layers": 1,
        "decoder_intermediate_size": 14,
        "decoder_nffn_hidden_size": 10,
        "decoder_shared_representation_size": 6,
        "decoder_ema_projection_size": 2,
        "decoder_chunk_size": 5,
    },
    "truncated": {"truncation": 3, "tie_word_embeddings": False, "attention_activation": "laplace"},
}


def make(**fields) -> MegaForConditionalGeneration:
    torch.manual_seed(0)
    config = MegaConfig(
        hidden_size=12,
        intermediate_size=20,
        shared_representation_size=8,
        ema_projection_size=3,
        nffn_hidden_size=16,
        is_encoder_decoder=True,
        initializer_range=0.3,
        **({"vocab_size": 30, "num_hidden_layers": 2} | fields),
    )
    return MegaForConditionalGeneration(config).double().eval()


@pytest.fixture(params=SHAPES)
def model(request):
    return make(**SHAPES[request.param])


def padded(lengths, total, side, high=23):
    """Tokens and mask `[B, total]`, with padding on the `side`."""
    ids, mask = torch.randint(3, high, (len(lengths), total)), torch.zeros(len(lengths), total, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, total - length if side == "left" else 0 : total if side == "left" else length] = 1
    return ids.masked_fill(mask == 0, 1), mask


def batch(source_side="right", target_side="right"):
    source, source_mask = padded([13, 4, 9], 13, source_side)
    target, target_mask = padded([11, 17, 6], 17, target_side)
    names = ("input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask")
    return dict(zip(names, (source, source_mask, target, target_mask), strict=True))


@torch.no_grad()
@pytest.mark.parametrize("source_side", ["left", "right"])
@pytest.mark.parametrize("target_side", ["left", "right"])
def test_a_pair_does_not_depend_on_its_batch(model, source_side, target_side):
    inputs = batch(source_side, target_side)
    masks = [inputs["attention_mask"].bool(), inputs["decoder_attention_mask"].bool()]
    together = model(**inputs, use_cache=False).logits
    unmasked = {name: inputs[name] for name in ("input_ids", "decoder_input_ids")}
    torch.testing.assert_close(model(**unmasked).logits[masks[1]], together[masks[1]])
    for row in range(3):
        source, target = (inputs[name][row, mask[row]][None] for name, mask in zip(unmasked, masks, strict=True))
        alone = model(source, decoder_input_ids=target).logits[0]
        torch.testing.assert_close(together[row, masks[1][row]], alone)


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[1] * 17, [6, 1, 1, 9], [5, 12], [1, 16]], ids=str)
@pytest.mark.parametrize("sides", [("right", "right"), ("left", "left"), ("right", "left")], ids="-".join)
def test_cached_is_uncached(model, cuts, sides):
    inputs = batch(*sides)
    ids, mask = inputs.pop("decoder_input_ids"), inputs.pop("decoder_attention_mask")
    expected = model(**inputs, decoder_input_ids=ids, decoder_attention_mask=mask, use_cache=False)
    assert expected.past_key_values is None
    encoded = {"encoder_outputs": (expected.encoder_last_hidden_state,), "attention_mask": inputs["attention_mask"]}
    past, start, logits = None, 0, []
    for index, length in enumerate(cuts):
        end = start + length
        given = mask[:, start:end] if index % 2 else mask[:, :end]
        target = {"decoder_input_ids": ids[:, start:end], "decoder_attention_mask": given}
        output = model(**encoded, **target, past_key_values=past, use_cache=True)
        past, start = output.past_key_values, end
        logits.append(output.logits)
    assert isinstance(past, EncoderDecoderCache) and past.get_seq_length() == 17
    torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], expected.logits[mask.bool()], atol=1e-9, rtol=1e-7)


@torch.no_grad()
def test_weights_are_those_of_the_output(model):
    """Asking for attention takes another path through cross-attention."""
    inputs = batch("left", "left")
    keep = inputs["decoder_attention_mask"].bool()
    plain, recorded = (
        model(**inputs),
        model(**inputs, output_attentions=True, output_hidden_states=True, use_cache=False),
    )
    torch.testing.assert_close(plain.logits[keep], recorded.logits[keep])
    decoder = model.config.decoder_config
    assert len(recorded.cross_attentions) == len(recorded.decoder_attentions) == decoder.num_hidden_layers
    assert len(recorded.encoder_attentions) == model.config.num_hidden_layers
    assert len(recorded.decoder_hidden_states) == decoder.num_hidden_layers + 1
    assert len(recorded.encoder_hidden_states) == model.config.num_hidden_layers + 1
    for weights in recorded.cross_attentions:
        assert weights.shape == (3, 1, 17, 13)
        assert (weights.permute(0, 3, 1, 2)[inputs["attention_mask"] == 0] == 0).all()
        if decoder.attention_activation == "softmax":
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 17).double())


@torch.no_grad()
def test_a_source_of_padding_is_nothing(model):
    inputs = batch()
    inputs["attention_mask"][1] = 0
    logits = model(**inputs).logits
    assert logits.isfinite().all()
    inputs["input_ids"][1] = 7
    torch.testing.assert_close(model(**inputs).logits, logits)


def test_gradients(model):
    """The same with and without a cache, and for every parameter."""
    inputs, gradients = batch("left", "left"), []
    mask = inputs["decoder_attention_mask"]
    for cuts in ([17], [6, 1, 10]):
        model.zero_grad()
        past, parts, start = None, [], 0
        encoded = model.mega.encoder(inputs["input_ids"], inputs["attention_mask"])
        for length in cuts:
            given = slice(start, start + length)
            output = model(
                encoder_outputs=encoded,
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=inputs["decoder_input_ids"][:, given],
                decoder_attention_mask=mask[:, given],
                past_key_values=past,
                use_cache=len(cuts) > 1,
            )
            past, start = output.past_key_values, start + length
            parts.append(output.logits)
        torch.cat(parts, 1)[mask.bool()].sin().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=lambda text, name=name: f"{name}: {text}")
        # Of squared ReLU, scores below 0 have none.
        assert expected.abs().max() > 0 or model.config.attention_activation == "relu2", name


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
        {"do_sample": True, "num_return_sequences": 2},
        {"do_sample": True, "num_beams": 3},
        {"do_sample": False, "num_beams": 2, "prefix_allowed_tokens_fn": lambda row, ids: [4, 5 + row, 2]},
    ],
    ids=["greedy", "beams", "sampling", "beam sampling", "constrained"],
)
def test_generate(model, options):
    """With and without a cache, with the sources padded on either side, and (without chance) alone."""
    source, mask = padded([13, 4, 9], 13, "left")
    right = torch.stack([row.roll(int(keep.sum()) - 13) for row, keep in zip(source, mask, strict=True)])
    results = []
    for ids, given, use_cache in (
        (source, mask, True),
        (source, mask, False),
        (source, None, True),
        (right, None, True),
    ):
        torch.manual_seed(1)
        given = {} if given is None else {"attention_mask": given}
        results.append(model.generate(ids, **given, max_new_tokens=11, use_cache=use_cache, **options))
    assert all(torch.equal(result, results[0]) for result in results)
    assert (results[0][:, 0] == 2).all() and len(results[0]) == 3 * options.get("num_return_sequences", 1)
    if "prefix_allowed_tokens_fn" in options:
        for row, ids in enumerate(results[0].tolist()):
            assert set(ids) <= {1, 2, 4, 5 + row}
    elif not options["do_sample"]:
        count = options.get("num_return_sequences", 1)
        for row in range(3):
            alone = model.generate(source[row, mask[row].bool()][None], max_new_tokens=11, **options)
            torch.testing.assert_close(alone, results[0][row * count : (row + 1) * count, : alone.shape[1]])


@torch.no_grad()
def test_generate_goes_on_from_a_cache_and_from_left_padded_targets(model):
    source, mask = padded([13, 4], 13, "right")
    options = {"do_sample": False, "eos_token_id": None, "attention_mask": mask}
    whole = model.generate(source, max_new_tokens=12, **options)
    past = model(source, mask, whole[:, :6]).past_key_values
    begun = model.generate(source, decoder_input_ids=whole[:, :8], past_key_values=past, max_new_tokens=5, **options)
    assert torch.equal(begun, whole)
    prompt, prompt_mask = padded([5, 2], 5, "left")
    prompt = prompt.scatter(1, prompt_mask.argmax(1, keepdim=True), 2)
    given = {"decoder_input_ids": prompt, "decoder_attention_mask": prompt_mask, "max_new_tokens": 4}
    together = model.generate(source, **options, **given)
    options["attention_mask"] = mask[1:]
    alone = model.generate(source[1:], **options, decoder_input_ids=prompt[1:, 3:], max_new_tokens=4)
    assert torch.equal(together[1:, 3:], alone)


@torch.no_grad()
def test_cache_operations():
    model, inputs = make(**SHAPES["truncated"]), batch("left", "left")
    past = model(**inputs).past_key_values
    order, token = torch.tensor([2, 0, 0]), torch.tensor([[4], [9], [4]])
    past.reorder_cache(order)
    expected = {name: value[order] for name, value in inputs.items()}
    expected["decoder_input_ids"] = torch.cat([expected["decoder_input_ids"], token], 1)
    expected["decoder_attention_mask"] = torch.cat([expected["decoder_attention_mask"], torch.ones_like(token)], 1)
    # The decoder alone does without the source, which the cache has.
    states = model.mega.decoder(token, past_key_values=past).last_hidden_state
    torch.testing.assert_close(model.lm_head(states)[:, -1], model(**expected).logits[:, -1])
    past.batch_repeat_interleave(2)
    assert len(past.cross_attention_cache.layers[0].keys) == past.self_attention_cache.layers[0].batch_size == 6
    past.batch_select_indices(torch.tensor([1, 4]))
    assert len(past.cross_attention_cache.layers[1].mask) == 2
    with pytest.raises(ValueError, match="cannot be cropped from 18 to 3"):
        past.crop(3)
    past.reset()
    assert past.get_seq_length() == past.cross_attention_cache.get_seq_length() == 0
    torch.testing.assert_close(model(**inputs, past_key_values=past).logits, model(**inputs).logits)


def test_loss_and_labels(model):
    labels, _ = padded([5, 3], 5, "right")
    labels = labels.masked_fill(labels == 1, -100)
    source, _ = padded([6, 4], 6, "right")
    output = model(source, labels=labels)
    torch.testing.assert_close(output.loss, cross_entropy(output.logits.transpose(1, 2), labels), check_dtype=False)
    shifted = model.prepare_decoder_input_ids_from_labels(labels)
    assert shifted.tolist() == [[2, *labels[0, :4].tolist()], [2, *labels[1, :3].tolist(), 1]]
    # Padding on the left puts the start before the first label, not at the edge of the batch.
    left = torch.stack([labels[0], labels[1].roll(2)])
    assert model.prepare_decoder_input_ids_from_labels(left).tolist()[1] == [1, 1, 2, *labels[1, :2].tolist()]
    torch.testing.assert_close(model(source, labels=left).loss, output.loss)
    kept = model(source, decoder_input_ids=shifted, labels=labels[:, 3:], logits_to_keep=2)
    torch.testing.assert_close(kept.logits, output.logits[:, 3:])


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"label_smoothing_factor": 0.1}], ids=str)
def test_trains(tmp_path, options, tokenizer):
    model = make(**SHAPES["relu2 chunks"], vocab_size=len(tokenizer)).float()
    rows = torch.randint(5, len(tokenizer), (8, 11)).tolist()
    data = [{"input_ids": row[: 4 + i], "labels": row[i:]} for i, row in enumerate(rows)]
    arguments = Seq2SeqTrainingArguments(
        output_dir=tmp_path,
        max_steps=10,
        learning_rate=1e-2,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=9,
        **options,
    )
    collator = DataCollatorForSeq2Seq(tokenizer, model)
    trainer = Seq2SeqTrainer(model, arguments, collator, data, data)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.9 * before
    assert trainer.predict(data).predictions.shape[0] == 8


@pytest.mark.parametrize("name", SHAPES)
def test_save_and_load(tmp_path, name):
    model, inputs = make(**SHAPES[name]), batch()
    shared = model.config.shares_embeddings
    source, target = (side.get_input_embeddings().weight for side in (model.mega.encoder, model.mega.decoder))
    assert (source is target) is shared
    assert (model.lm_head.weight is target) is model.config.tie_word_embeddings
    model.save_pretrained(tmp_path)
    loaded, loading = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()) and type(loaded) is MegaForConditionalGeneration
    assert loaded.config.to_json_string() == model.config.to_json_string()
    torch.testing.assert_close(loaded.eval()(**inputs).logits, model(**inputs).logits)
    body = AutoModel.from_pretrained(tmp_path)
    assert type(body) is type(AutoModel.from_config(model.config)) is MegaSeq2SeqModel
    torch.testing.assert_close(body(**inputs).last_hidden_state, model.mega(**inputs).last_hidden_state)
    assert type(AutoModel.from_config(MegaConfig())) is MegaModel
    if model.config.decoder_vocab_size is not None:
        with pytest.raises(NotImplementedError, match="vocabularies of 30 and 23"):
            model.resize_token_embeddings(40)
        return
    for resized in (model, body):
        resized.resize_token_embeddings(40)
        assert resized.config.decoder_config.vocab_size == 40
    target = model.mega.decoder.get_input_embeddings().weight
    assert len(target) == 40 and (target is model.mega.encoder.get_input_embeddings().weight) is shared
    assert (model.lm_head.weight is target) is model.config.tie_word_embeddings
    assert model(**inputs).logits.shape[-1] == 40 and body(**inputs).last_hidden_state.isfinite().all()


def test_bad_input():
    model, inputs = make(**SHAPES["laplace simple post-norm"]), batch()
    source, mask, target = (inputs[name] for name in ("input_ids", "attention_mask", "decoder_input_ids"))
    past = model(**inputs).past_key_values
    with pytest.raises(ValueError, match="sources have length 0"):
        model.generate(source[:, :0])
    with pytest.raises(ValueError, match="batch is empty: 3 sequences of length 0"):
        model(source[:, :0], decoder_input_ids=target)
    for given in ({}, {"attention_mask": torch.ones(2, 3).long().index_fill(0, torch.tensor([1]), 0)}):
        with pytest.raises(ValueError, match=r"nothing but padding in the sources \[1\]"):
            model.generate(torch.tensor([[4, 5, 6], [1, 1, 1]]), **given)
    with pytest.raises(ValueError, match="serves at most 24 positions, got 25"):
        model(torch.full((1, 25), 4), decoder_input_ids=target[:1])
    with pytest.raises(ValueError, match="max_length=32 needs 31 positions of the decoder, whose bias serves 30"):
        model.generate(source, max_length=32)
    with pytest.raises(ValueError, match="past_key_values does not fit this model and batch"):
        model.generate(source, decoder_input_ids=target.repeat(1, 2)[:, :18], past_key_values=past, num_beams=2)
    with pytest.raises(ValueError, match=r"another source.*\(3, 5, 8\)"):
        model(source[:, :5], mask[:, :5], target, past_key_values=past)
    with pytest.raises(ValueError, match="has 17 positions already, and the target 1"):
        model.generate(source, attention_mask=mask, past_key_values=past)
    with pytest.raises(ValueError, match="of another batch or model"):
        make(num_hidden_layers=1)(**inputs, past_key_values=past)
    with pytest.raises(ValueError, match="does not fit this model and batch"):
        make(truncation=3)(**inputs, past_key_values=past)
    for other in (
        MegaCache(model.config),
        ((),),
        EncoderDecoderCache(MegaCache(model.config), MegaCache(model.config)),
    ):
        with pytest.raises(ValueError, match="must be a MegaSeq2SeqCache"):
            model(**inputs, past_key_values=other)
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        model.generate(source[:1], prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        model.generate(source, cache_implementation="static")
    with pytest.raises(NotImplementedError, match="continuous batching"):
        model.generate_batch([[4, 5]])
    with pytest.raises(ValueError, match="exactly one of decoder_input_ids and decoder_inputs_embeds"):
        model(source)
    with pytest.raises(ValueError, match=r"labels must have the shape \[3, 2\] .* got \[3, 17\]"):
        model(**inputs, labels=target, logits_to_keep=2)
    with pytest.raises(ValueError, match="output_attentions"):
        model(**inputs, past_key_values=past, output_attentions=True)
    with pytest.raises(ValueError, match=r"encoder_attention_mask must have the shape \[3, 13\], got \[3, 12\]"):
        model(**inputs | {"encoder_outputs": BaseModelOutput(torch.zeros(3, 13, 12)), "attention_mask": mask[:, 1:]})
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="use_cache=False"):
        model.train()(**inputs, use_cache=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_start_token_id": 1}, "are both 1"),
        ({"decoder_start_token_id": 30}, r"decoder_start_token_id \(30\).*\(0 to 29\)"),
        ({"is_decoder": True, "bidirectional": False}, "leave is_decoder"),
        ({"input_type": "values"}, "needs input_type='tokens'"),
        ({"adaptive_input_cutoffs": [9], "adaptive_softmax_cutoffs": [9]}, "no adaptive vocabulary"),
        ({"embedding_size": 7}, "needs embedding_size=12"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, got 0"),
        ({"decoder_shared_representation_size": 5}, "even shared_representation_size, got 5"),
        ({"decoder_vocab_size": 23, "share_encoder_decoder_embeddings": True}, "decoder_vocab_size=23"),
        ({"tie_word_embeddings": False, "share_encoder_decoder_embeddings": True}, "tie_word_embeddings=False"),
    ],
    ids=str,
)
def test_bad_configurations(fields, message):
    with pytest.raises(Exception, match=message):
        make(**fields)


def test_classes_and_configurations_that_do_not_fit():
    config = make().config
    with pytest.raises(ValueError, match="one side only"):
        MegaModel(config)
    with pytest.raises(ValueError, match="needs a configuration with is_decoder=True"):
        MegaForCausalLM(config)
    for cls in (MegaSeq2SeqModel, MegaForConditionalGeneration):
        with pytest.raises(ValueError, match="is_encoder_decoder=True"):
            cls(MegaConfig())
    with pytest.raises(ValueError, match="encoder_hidden_states need a decoder"):
        MegaModel(config.encoder_config)(torch.tensor([[4]]), encoder_hidden_states=torch.zeros(1, 2, 12))
    decoder = MegaModel(config.decoder_config)
    with pytest.raises(ValueError, match=r"needs encoder_hidden_states \[B, S, d\]"):
        decoder(torch.tensor([[4]]))
    for shape in ((2, 3, 12), (1, 3, 11), (1, 0, 12)):
        with pytest.raises(ValueError, match=r"shape \[1, S, 12\]"):
            decoder(torch.tensor([[4]]), encoder_hidden_states=torch.zeros(shape))
