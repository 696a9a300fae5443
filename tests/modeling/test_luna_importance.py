"""Luna with the position-aware pack (`pack_method="importance"`), and positions beyond the learned ones."""

import pytest
import torch
from transformers import BertConfig, BertModel

import luna_mega
from luna_mega.kernels.api import use_backend
from luna_mega.modeling_luna.segments_luna import read_segments

from . import luna

IMPORTANCE = {"pack_method": "importance"}
VARIANTS = {
    "tied": {},
    "untied": {"tie_key_value": False},
    "pre-norm": {"pre_norm": True},
    "shared layers": {"share_layers": True},
    "sinusoidal": {"position_embedding_type": "sinusoidal"},
}


def make(head="Model", **fields):
    """Return a model whose salience is large enough to make the rows of P differ."""
    config = luna.tiny_config(**IMPORTANCE | fields)
    return luna.enlarged(luna.HEADS[head], config, lambda name: 0.5 if "salience" in name else 0.1)


def kept(output, inputs):
    return output.last_hidden_state[inputs["attention_mask"].bool()]


def make_bert(**fields):
    """Return a BERT with large weights, and a Luna with the same weights and `fields`."""
    sizes = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 32}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": 48, "pad_token_id": 1}
    bert = luna.enlarged(lambda config: BertModel(config, add_pooling_layer=False), BertConfig(**sizes))
    config = luna_mega.LunaConfig(
        **sizes | IMPORTANCE | {"tie_key_value": False, "first_position": 0, "layer_norm_eps": 1e-12} | fields
    )
    model = luna_mega.LunaModel(config).eval()
    names = {
        "embeddings.LayerNorm": "embeddings.layer_norm",
        "encoder.layer.": "encoder.layers.",
        "attention.self": "attention",
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "attention_layer_norm",
        "intermediate.dense": "fc1",
        "output.dense": "fc2",
        "output.LayerNorm": "final_layer_norm",
    }
    state = {name: tensor.clone() for name, tensor in bert.state_dict().items()}
    state["embeddings.position_embeddings.weight"] += state.pop("embeddings.token_type_embeddings.weight")[0]
    for old, new in names.items():
        state = {name.replace(old, new): tensor for name, tensor in state.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("salience") for name in missing)
    return bert, model


def test_short_texts_are_full_attention():
    """A text of at most l tokens has the states of BERT with the same weights, for any salience."""
    bert, model = make_bert(projection_length=21)
    inputs = luna.tokens([21, 1, 5, 13])
    expected = kept(bert(**inputs), inputs)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.attention.salience.normal_()
    for fields in ({}, {"unpad_inputs": True}, {"_attn_implementation": "eager"}):
        for name, value in fields.items():
            setattr(model.config, name, value)
        torch.testing.assert_close(kept(model(**inputs), inputs), expected, atol=1e-5, rtol=1e-5)
    short = luna.tokens([40, 21, 3])  # the same lengths in a batch with a text of more than l tokens
    states = model(**short).last_hidden_state
    for row, length in ((1, 21), (2, 3)):
        expected = bert(short["input_ids"][row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(states[row, :length], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequencePairClassification", "ForMultipleChoice"])
def test_padding_and_batch_have_no_effect(head):
    luna.check_invariance(head, make(head, pooling="mean"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_layouts_agree(variant):
    """Outputs and gradients agree for padding on either side, gaps, padding-free batches and all backends."""
    model = make(**VARIANTS[variant]).double()
    lengths = [21, 1, 13]
    results = {}
    for name, inputs in layouts(lengths).items():
        model.config.unpad_inputs = name == "unpadded"
        model.zero_grad()
        with use_backend("reference" if name == "reference" else "auto"):
            output = model(**inputs)
        states = output.last_hidden_state
        mask = inputs.get("attention_mask")
        states = states[0] if mask is None else states[mask.bool()]
        states.sin().sum().backward()
        gradients = [x.grad for x in model.parameters() if x.grad is not None]
        rows = output.packed_last_hidden_state[output.packed_mask.bool()]
        results[name] = [states, rows, *gradients]
    expected = results.pop("right")
    for name, actual in results.items():
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: f"{name}: {text}")


def layouts(lengths):
    right = luna.tokens(lengths)
    gapped = {name: torch.zeros(len(lengths), 34, dtype=torch.long) for name in right}
    columns = torch.rand(len(lengths), 34, generator=torch.Generator().manual_seed(0)).argsort(dim=1)
    for row, length in enumerate(lengths):
        place = columns[row, :length].sort().values
        gapped["input_ids"][row, place] = right["input_ids"][row, :length]
        gapped["attention_mask"][row, place] = 1
    flat = right["input_ids"][right["attention_mask"].bool()][None]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {
        "right": right,
        "left": luna.tokens(lengths, "left", 30),
        "gaps": gapped,
        "unpadded": right,
        "reference": right,
        "cu_seq_lens_q": {"input_ids": flat, "cu_seq_lens_q": bounds, "max_length_q": max(lengths)},
        "position_ids": {"input_ids": flat, "position_ids": positions},
    }


def test_half_precision():
    model, inputs, dtype, tolerance = make(projection_length=13), luna.tokens([13, 9]), torch.float16, 0.02
    expected = kept(model(**inputs), inputs)
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(kept(model(**inputs), inputs).float(), expected, atol=tolerance, rtol=tolerance)
    actual = kept(model.to(dtype)(**inputs), inputs)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("fields", [{"layerdrop": 0.5}, {"dropout": 0.3, "attention_dropout": 0.3}])
def test_training(fields):
    """Checkpointing has no effect on gradients, and every parameter has a gradient."""
    model = make("ForMaskedLM", **fields).train()
    inputs, gradients = luna.tokens([21, 9]), []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        model.zero_grad()
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append({name: x.grad for name, x in model.named_parameters()})
    for name, gradient in gradients[0].items():
        if gradient is not None or "layerdrop" not in fields:
            torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_outputs():
    model, inputs = make(), luna.tokens([13, 4])
    output = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert output.packed_mask.tolist() == [[1] * 6, [1] * 4 + [0] * 2]
    assert output.packed_last_hidden_state.shape == (2, 6, 24)
    assert len(output.hidden_states) == 3 and len(output.packed_hidden_states) == 2
    assert torch.equal(output.packed_hidden_states[-1], output.packed_last_hidden_state)
    # For a text of at most l tokens, the rows of P are the states that the layer reads.
    torch.testing.assert_close(output.packed_last_hidden_state[1, :4], output.hidden_states[1][1, :4])
    for weights in output.attentions:
        assert weights.shape == (2, 4, 13, 6)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 4, 13))
        assert (weights[1, :, :, 4:] == 0).all()


def test_parameters(tmp_path):
    """Salience is initialized to zero; the learned P, its projections and its norms do not exist."""
    model = luna_mega.LunaModel(luna.tiny_config(**IMPORTANCE, pre_norm=True))
    names = set(model.state_dict())
    assert not any("pack" in name for name in names)
    assert all((layer.attention.salience == 0).all() for layer in model.encoder.layers)
    assert {f"encoder.layers.{i}.attention.salience" for i in range(2)} <= names
    make().save_pretrained(tmp_path)
    loaded, inputs = luna_mega.LunaModel.from_pretrained(tmp_path), luna.tokens([13, 4])
    torch.testing.assert_close(kept(loaded(**inputs), inputs), kept(make()(**inputs), inputs))


def test_local_initialization_reads_neighbors():
    fields = {"initialization": "local", "initialization_options": {"strength": 12.0, "offsets": [-1, 1]}}
    config = luna.tiny_config(**IMPORTANCE | fields, hidden_size=64, projection_length=32, num_hidden_layers=1)
    for tied in (True, False):
        config.tie_key_value = tied
        torch.manual_seed(0)
        model = luna_mega.LunaModel(config).eval()
        torch.nn.init.zeros_(model.embeddings.word_embeddings.weight)
        weights = model(**luna.tokens([32]), output_attentions=True).attentions[0][0]
        for head in range(4):
            offset = [-1, 1][head % 2]
            read = weights[head, 2:-2].argmax(dim=-1) - torch.arange(2, 30)
            assert read.median() == offset, (tied, head, read)


def place(index, length, extension):
    """Return the position in a table of 10 entries for token `index` of a text of `length` tokens."""
    if extension == "wrap":
        return index if index < 10 else 1 + (index - 1) % 9
    return index * min(1.0, 9 / max(length - 1, 1))


@pytest.mark.parametrize("extension, pack_method", [("interpolate", "attention"), ("wrap", "importance")])
def test_position_extension(extension, pack_method):
    """The positions of each text depend only on its own length, in every layout."""
    fields = {"position_extension": extension, "pack_method": pack_method}
    model = make(max_position_embeddings=10, **fields).double()
    table = model.embeddings.position_embeddings.weight[2:]
    seen = []
    model.embeddings.layer_norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    for name, inputs in layouts([21, 1, 10]).items():
        model.config.unpad_inputs = name == "unpadded"
        model(**inputs)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
        ids = inputs["input_ids"][mask]
        positions = (seen[-1][0] if name in ("unpadded",) else seen[-1][mask]) - model.embeddings.word_embeddings(ids)
        places = [place(index, length, extension) for length in (21, 1, 10) for index in range(length)]
        for actual, number in zip(positions, places, strict=True):
            low = min(int(number), 8)
            expected = torch.lerp(table[low], table[low + 1], number - low)
            torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("table", [6, 16])
def test_table_of_another_size(table, tmp_path):
    """`max_position_embeddings` limits the length; `position_table_size` is the number of learned positions."""
    fields = {"max_position_embeddings": 10, "position_extension": "interpolate" if table < 10 else None}
    model = make(position_table_size=table, **fields)
    assert len(model.embeddings.position_embeddings.weight) == 2 + table
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    unlimited = make(max_position_embeddings=table, position_extension="interpolate")
    unlimited.load_state_dict(model.state_dict())
    for length in (table // 2, 10):
        ids = luna.tokens([length])["input_ids"]
        expected = unlimited(ids).last_hidden_state
        torch.testing.assert_close(model(ids).last_hidden_state, expected)
        torch.testing.assert_close(loaded(ids).last_hidden_state, expected)
    with pytest.raises(ValueError, match="the sequence length 11 exceeds the .*10"):
        model(luna.tokens([11])["input_ids"])


def test_position_ids_beyond_the_table():
    ids = torch.full((1, 12), 7)
    for extension, limit in ((None, 10), ("wrap", 12)):
        model = make(position_extension=extension, max_position_embeddings=10)
        with pytest.raises(ValueError, match=f"from 0 to 12; .* less than the {limit}" if extension else "length 12"):
            model(ids, position_ids=torch.arange(1, 13)[None] - torch.eye(12, dtype=torch.long)[:1])


def test_arguments_for_the_packed_sequence():
    model, inputs = make(), luna.tokens([13, 4])
    packed = torch.zeros(2, 6, 24)
    for arguments in ({"packed_states": packed}, {"packed_mask": packed[..., 0]}, {"output_packed_attentions": True}):
        with pytest.raises(ValueError, match=f"`{next(iter(arguments))}` is not supported with pack_method"):
            model(**inputs, **arguments)
    with pytest.raises(ValueError, match="`read_segments` requires an encoder with pack_method='attention'"):
        next(read_segments(model, inputs["input_ids"], segment_length=4))
