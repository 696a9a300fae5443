"""Small Luna models and inputs for the tests, partly shared with Mega."""

import torch

import luna_mega

HEADS = {
    name: getattr(luna_mega, f"Luna{name}")
    for name in (
        "Model",
        "ForMaskedLM",
        "ForSequenceClassification",
        "ForSequencePairClassification",
        "ForMultipleChoice",
        "ForTokenClassification",
        "ForQuestionAnswering",
    )
}
SIZES = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32, "num_labels": 3}
POOLINGS = ("cls", "last", "mean", "packed_max", "packed_mean", "packed_attention")
VARIANTS = {
    "tied": {},
    "untied, other pack heads": {"tie_key_value": False, "num_pack_attention_heads": 2},
    "sinusoidal": {"position_embedding_type": "sinusoidal"},
    "no positions, no embedding norm": {"position_embedding_type": "none", "embedding_norm": False},
    "pre-norm": {"pre_norm": True},
    "fixed length": {"dynamic_projection_length": False},
    "shared layers": {"share_layers": True},
    "P not contextual": {"contextual_projection": False},
}
VALUES = {"input_type": "values", "position_embedding_type": "sinusoidal"}
NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0}


def tiny_config(**overrides):
    fields = {
        "num_attention_heads": 4,
        "projection_length": 6,
        "max_position_embeddings": 48,
        "classifier_hidden_size": 20,
        "initializer_range": 0.02,  # of the weights and outputs in surface.json
    }
    config = luna_mega.LunaSeq2SeqConfig if overrides.get("is_encoder_decoder") else luna_mega.LunaConfig
    return config(**SIZES | fields | overrides)


def enlarged(model_class, config, size=lambda name: 0.1):
    """Return a model whose weights are large enough that every parameter affects the result.

    `size` maps the name of a parameter to the scale of the noise that is added to it.
    """
    torch.manual_seed(0)
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(size(name) * torch.randn_like(parameter))
    return model


def make(head, **overrides):
    return enlarged(HEADS[head], tiny_config(**overrides))


def tokens(lengths, side="right", width=None, seed=0):
    """Return `input_ids` and `attention_mask` of sequences of these lengths.

    A sequence of a given length has the same tokens in every batch.
    """
    width = width or max(lengths)
    ids, mask = torch.ones(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(seed + length)
        place = slice(width - length, None) if side == "left" else slice(None, length)
        ids[row, place] = torch.randint(4, 40, (length,), generator=generator)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


def head_inputs(head, lengths, side="right", width=None):
    """Return the inputs of a head without labels; multiple choice gets two options per sequence."""
    inputs = tokens(lengths, side, width)
    if head == "ForSequencePairClassification":
        pair = tokens(lengths[::-1], side, width, seed=100)
        return inputs | {f"pair_{name}": value.flip(0) for name, value in pair.items()}
    if head == "ForMultipleChoice":
        other = tokens(lengths, side, width, seed=50)
        return {name: torch.stack([value, other[name]], dim=1) for name, value in inputs.items()}
    return inputs


def labels(head, inputs):
    batch, length = inputs["input_ids"].shape[0], inputs["input_ids"].shape[-1]
    if head == "ForQuestionAnswering":
        return {"start_positions": torch.zeros(batch, dtype=torch.long), "end_positions": torch.full((batch,), 1)}
    if head in ("ForMaskedLM", "ForTokenClassification"):
        return {"labels": torch.arange(batch * length).reshape(batch, length) % 3}
    return {} if head == "Model" else {"labels": torch.arange(batch) % 2}
