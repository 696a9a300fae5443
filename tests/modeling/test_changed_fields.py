"""A field of a configuration that is changed after the construction of the model has its effect, or raises an error."""

import copy
from itertools import product

import pytest
import torch
from transformers import BertConfig, BertModel, EncoderDecoderModel

from . import classes, decoders, luna, mega

IDS = torch.tensor([[2, 5, 6, 7, 8], [2, 8, 7, 6, 5]])
SIZES = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32}
ENCODERS = {
    "bert": lambda: luna.enlarged(BertModel, BertConfig(**SIZES, num_attention_heads=2)),
    "luna": lambda: luna.make("Model"),
    "mega": lambda: mega.make("Model"),
}


@pytest.mark.parametrize(
    ("family", "name"), [*product(decoders.FAMILIES, ("is_decoder", "add_cross_attention")), ("luna", "first_position")]
)
def test_fields_that_determine_the_modules_cannot_be_changed(family, name):
    """`EncoderDecoderModel` sets `add_cross_attention` of a decoder without the modules, which ignored the source."""
    model = copy.deepcopy(decoders.make_plain(family))
    setattr(model.config, name, not getattr(model.config, name) if name != "first_position" else 5)
    with pytest.raises(ValueError, match=f"`config.{name}` has been changed to .*; create it with this value"):
        model(IDS)


@pytest.mark.parametrize("name", ["mega decoder", "mega seq2seq", "megalodon decoder"])
def test_a_changed_chunk(name, tmp_path):
    """It has the same effect in the model, in its encoder and decoder, and in the saved folder."""
    model = classes.DECODERS[name]() if "decoder" in name else classes.SEQ2SEQ[name]()
    inputs = dict.fromkeys(("input_ids", "decoder_input_ids")[: 1 + model.config.is_encoder_decoder], IDS)
    before = model(**inputs).logits
    model.config.update({"use_chunking": True, "chunk_size": 3})
    changed = model(**inputs).logits
    assert not torch.equal(changed, before)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(**inputs).logits, changed)


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
