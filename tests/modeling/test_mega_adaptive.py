"""Adaptive embeddings and softmax: probabilities, loss, tied weights, errors."""

import pytest
import torch

from luna_mega import MegaConfig, MegaForCausalLM

BANDS = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20]}
KINDS = {
    "tied": BANDS,
    "tied with projections": BANDS | {"tie_adaptive_projections": True, "adaptive_input_factor": 2},
    "tied, wider embedding": BANDS | {"embedding_size": 24},
    "untied": {
        "adaptive_input_cutoffs": [10],
        "adaptive_softmax_cutoffs": [15, 25],
        "tie_word_embeddings": False,
        "adaptive_softmax_factor": 2,
    },
    "only softmax": {"adaptive_softmax_cutoffs": [15], "tie_word_embeddings": False},
}


def make(**fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 20}
    decoder = {"bidirectional": False, "is_decoder": True, "initializer_range": 0.3, "scale_embedding": True}
    decoder |= {"add_lm_hidden_dense_layer": False}
    return MegaForCausalLM(MegaConfig(**sizes, **decoder, **fields)).double().eval()


@pytest.fixture(params=KINDS)
def model(request):
    return make(**KINDS[request.param])


def test_probabilities_and_loss(model):
    ids = torch.randint(3, 40, (2, 12))
    labels = ids.clone()
    labels[0, 3:6] = -100
    log_probabilities = model(ids).logits
    torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(2, 12).double())
    output = model(ids, labels=labels)
    assert output.logits is None
    counted = labels[:, 1:] != -100
    chosen = log_probabilities[:, :-1].gather(2, ids[:, 1:, None])[..., 0][counted]
    torch.testing.assert_close(output.loss, -chosen.mean())
    halved = model(ids, labels=labels, num_items_in_batch=2 * counted.sum()).loss
    torch.testing.assert_close(2 * halved, output.loss)


def test_original_omits_one_word_of_a_tail():
    model, legacy = make(**BANDS), make(**BANDS, legacy_adaptive_loss=True)
    legacy.load_state_dict(model.state_dict())
    # 11 and 21 are entry 1 of their bands. The original omits entry 1 of each band, because the padding token is 1.
    ids = torch.tensor([[5, 11, 12, 21, 22, 7]])
    log_probabilities = model(ids).logits
    head = model.lm_head.score_head(model.mega(ids).last_hidden_state[0], model.mega.get_input_embeddings())
    classes = head.log_softmax(-1)
    left_out = sum(log_probabilities[0, t, word] - classes[t, 10 + tail] for t, word, tail in ((0, 11, 0), (2, 21, 1)))
    difference = 5 * (model(ids, labels=ids).loss - legacy(ids, labels=ids).loss)
    torch.testing.assert_close(difference, -left_out)


def test_tied_words_have_one_set_of_weights(model, tmp_path):
    names = [name for name, _ in model.named_parameters() if "lm_head" in name]
    assert any("words" in name for name in names) == (not model.config.tie_word_embeddings)
    model.save_pretrained(tmp_path)
    again, report = MegaForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float64)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.randint(3, 40, (2, 5))
    torch.testing.assert_close(again.eval()(ids).logits, model(ids).logits)
    ids, words = ids[:, :3], again.generate(ids[:, :3], max_new_tokens=4, do_sample=False)
    assert torch.equal(words[:, :3], ids)


def test_every_parameter_gets_a_gradient(model):
    ids = torch.arange(3, 40)[None]
    model(ids, labels=ids).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_no_resizing():
    with pytest.raises(NotImplementedError, match="cannot be resized"):
        make(**BANDS).resize_token_embeddings(50)
