"""Every dropout is an `nn.Dropout`, whose `p` and `training` are read at the call, so that tools find and change it."""

import pytest
import torch
from torch import nn

from . import luna, mega, megalodon_decoders
from .decoders import make, source, target

ALL = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.5)
MEGA = dict.fromkeys(
    *[("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob", "nffn_activation_dropout_prob")], 0.5
)
MEGALODON = dict.fromkeys(("dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.5)
HEAD = {"classifier_dropout": 0.5}
ADAPTIVE = {"adaptive_input_cutoffs": [10, 20], "adaptive_softmax_cutoffs": [10, 20], "adaptive_softmax_dropout": 0.5}
ADAPTIVE |= {"adaptive_input_factor": 2, "adaptive_softmax_factor": 2}
HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForMultipleChoice")
MODELS = {
    **{f"luna {head}": lambda head=head: luna.make(head, **ALL, **HEAD) for head in HEADS},
    **{f"mega {head}": lambda head=head: mega.make(head, **MEGA, **HEAD) for head in HEADS},
    "mega of features": lambda: mega.make("ForSequenceClassification", **MEGA, use_feature_dropout=True),
    "mega stochastic depth": lambda: mega.make("ForSequenceClassification", drop_path_rate=0.5),
    "megalodon": lambda: megalodon_decoders.make("ForSequenceClassification", torch.float32, **MEGALODON),
    "luna words": lambda: make("luna: softplus", word_dropout=0.5).float(),
    "mega adaptive": lambda: make("mega: softmax", **ADAPTIVE).float(),
    "luna seq2seq": lambda: make("luna seq2seq: translation", **ALL).float(),
    "mega seq2seq": lambda: make("mega seq2seq: softmax", **MEGA).float(),
}


def results(model):
    """Return the results of three calls with other random numbers."""
    ids, mask = torch.arange(24).view(2, 12) % 17 + 4, torch.ones(2, 12, dtype=torch.long)
    inputs = {**source(model, 2), **target(model, ids, mask)} if model.config.is_encoder_decoder else {"input_ids": ids}
    if type(model).__name__.endswith("Choice"):
        inputs = {"input_ids": ids[:, None].expand(2, 2, 12)}
    options = {"use_cache": False} if model.config.is_decoder or model.config.is_encoder_decoder else {}
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append(model(**inputs, **options)[0])
    return found


def dropouts(model):
    return [module for module in model.modules() if isinstance(module, nn.Dropout)]


@pytest.mark.parametrize("name", MODELS)
def test_dropouts(name):
    """Monte Carlo dropout, with only the dropouts in training mode, varies as training; without them nothing varies."""
    model = MODELS[name]().eval()
    first, *others = results(model)
    assert all(torch.equal(first, result) for result in others)
    expected = results(model.train())
    assert len({result.flatten()[0].item() for result in expected}) > 1
    model.eval()
    for module in dropouts(model):
        module.train()
    for actual, result in zip(results(model), expected, strict=True):
        torch.testing.assert_close(actual, result)
    for module in dropouts(model.train()):
        module.p = 0.0
    first, *others = results(model)
    assert all(torch.equal(first, result) for result in others)


def batch_norms(model):
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]


def test_batch_norm_with_the_tools_of_pytorch():
    """`momentum=None` is the mean over batches, as in `update_bn`; `convert_sync_batchnorm` keeps masks."""
    model = mega.make("ForSequenceClassification", normalization_type="batchnorm", padded_batch_statistics=False)
    batches = [torch.arange(24).view(2, 12) % 17 + 4, torch.arange(30).view(3, 10) % 13 + 4]
    torch.optim.swa_utils.update_bn(batches, model)
    norm, plain = batch_norms(model)[0], nn.BatchNorm1d(batch_norms(model)[0].num_features, momentum=None).train()
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    norm.reset_running_stats()
    norm.momentum = None
    model.train()
    for batch in batches:
        model(batch)
        plain(seen[-1].flatten(0, 1))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(norm, name), getattr(plain, name))
    ids, mask = luna.tokens([12, 5]).values()
    expected = model.eval()(ids, attention_mask=mask).logits
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert all(module.synchronized for module in batch_norms(converted)) and len(batch_norms(converted)) > 0
    assert torch.equal(converted(ids, attention_mask=mask).logits, expected)
