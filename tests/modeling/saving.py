"""Models that are saved and loaded again, for the tests of Luna and Mega."""

import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification


def comes_back(folder, model, inputs):
    """Check that the Auto class loads a sharded classifier with equal class, configuration and logits."""
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    loaded, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert type(loaded) is type(model) and loaded.config.to_json_string() == model.config.to_json_string()
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)


def masked_lm_comes_back(folder, model, inputs, words, decoder):
    """The model and its encoder can be loaded and resized; parameters `words` and `decoder` are identical if tied."""
    model.save_pretrained(folder)
    loaded = AutoModelForMaskedLM.from_pretrained(folder, device_map="auto")
    assert (loaded.get_parameter(words) is loaded.get_parameter(decoder)) == model.config.tie_word_embeddings
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    encoder = AutoModel.from_pretrained(folder)
    assert torch.equal(encoder(**inputs).last_hidden_state, model.base_model(**inputs).last_hidden_state)
    loaded.resize_token_embeddings(50)
    assert loaded(**inputs).logits.shape == (2, 9, 50) and loaded.config.vocab_size == 50
    torch.testing.assert_close(loaded(**inputs).logits[..., :40], model(**inputs).logits)
