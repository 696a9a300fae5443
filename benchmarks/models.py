"""Models of equal size from this package and from transformers: about 23 million parameters, and two image models.

By default they have a width of 512 and a vocabulary of 8,000. The width of the feed-forward layers is chosen so that
the sizes are equal. Dropout is 0 unless stated otherwise; all other options have the defaults of each model.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
)

from luna_mega import (
    LunaConfig,
    LunaForCausalLM,
    LunaModel,
    MegaConfig,
    MegaForCausalLM,
    MegaForImageClassification,
    MegaForSequenceClassification,
    MegalodonConfig,
    MegalodonForCausalLM,
    MegaModel,
)

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_BERT = {"num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 2048, **_NO_DROPOUT}
_LUNA = {"num_attention_heads": 8, "intermediate_size": 1792, "dropout": 0.0, "attention_dropout": 0.0}
_MEGA = {"normalization_type": "layernorm", "use_chunking": True, "dropout_prob": 0.0, **_NO_DROPOUT}
_MEGA |= {"intermediate_size": 1024, "nffn_hidden_size": 1024, "shared_representation_size": 128}
_MEGA |= {"nffn_activation_dropout_prob": 0.0}
VOCABULARY = 8000
_SIZE = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 6}

# Fields of the models of bytes, about 3.2 million parameters.
_BYTES = {"vocab_size": 262, "hidden_size": 256, "num_hidden_layers": 4}
# Fields of classifiers with about 1.8 million parameters, trained with the dropout of their configurations.
_SMALL = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4}


def luna(n, **fields):
    return LunaModel(LunaConfig(**{**_SIZE, **_LUNA, "max_position_embeddings": n, **fields}))


def luna_base(n):
    return LunaModel(LunaConfig.base_512(max_position_embeddings=n, dropout=0.0, attention_dropout=0.0))


def mega(n, **fields):
    return MegaModel(MegaConfig(**{**_SIZE, **_MEGA, "nffn_hidden_size": 896, **fields}), add_pooling_layer=False)


def encoder(kind, n, model=None, **fields):
    """Return an encoder of transformers for n positions, with arguments `model` of the model itself."""
    config = AutoConfig.for_model(kind, **{**_SIZE, **_BERT, "pad_token_id": 1, "max_position_embeddings": n, **fields})
    return AutoModel.from_config(config, **model or {})


def roberta(n, **fields):
    # Position ids start after the padding id.
    model = {"attn_implementation": "sdpa", "add_pooling_layer": False}
    return encoder("roberta", n + 2, model, type_vocab_size=1, **fields)


def roberta_base(n):
    return roberta(
        n, vocab_size=50265, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072
    )


def modernbert(n, **fields):
    """Return a ModernBERT: every third layer attends to all positions, the others to 64 on either side."""
    special = {"cls_token_id": 0, "sep_token_id": 2, "bos_token_id": 0, "eos_token_id": 2}
    sizes = {"intermediate_size": 1344, **special, **fields}
    return encoder("modernbert", n, {"attn_implementation": "sdpa"}, **sizes)


def luna_lm(n, **fields):
    fields = {**_SIZE, **_LUNA, "max_position_embeddings": n, "projection_length": 32, "is_decoder": True, **fields}
    return LunaForCausalLM(LunaConfig(**fields))


def mega_lm(n, **fields):
    fields = {**_SIZE, **_MEGA, "chunk_size": 512, "is_decoder": True, "add_lm_hidden_dense_layer": False, **fields}
    return MegaForCausalLM(MegaConfig(**fields))


def megalodon_lm(n, **fields):
    sizes = {"num_attention_heads": 1, "shared_representation_size": 128, "value_size": 1024, "intermediate_size": 1184}
    fields = {**_SIZE, **sizes, "chunk_size": 512, "tie_word_embeddings": True, **fields}
    return MegalodonForCausalLM(MegalodonConfig(**fields))


def luna_bytes(n, **fields):
    return luna_lm(n, **{**_BYTES, "num_attention_heads": 4, "intermediate_size": 896, **fields})


def mega_bytes(n, **fields):
    sizes = {"intermediate_size": 512, "nffn_hidden_size": 448, "shared_representation_size": 64, "chunk_size": 128}
    return mega_lm(n, **{**_BYTES, **sizes, **fields})


def megalodon_bytes(n, **fields):
    sizes = {"intermediate_size": 592, "value_size": 512, "shared_representation_size": 64, "chunk_size": 128}
    return megalodon_lm(n, **{**_BYTES, **sizes, **fields})


def mega_small(n, **fields):
    """Return a classifier that attends to all positions."""
    sizes = {"intermediate_size": 256, "nffn_hidden_size": 128, "shared_representation_size": 64}
    fields = {**_SMALL, **sizes, "normalization_type": "layernorm", "max_positions": n, **fields}
    return MegaForSequenceClassification(MegaConfig(**fields))


def bert_small(n, **fields):
    sizes = {"num_attention_heads": 2, "intermediate_size": 512, "max_position_embeddings": n}
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **{**_SMALL, **sizes, **fields}))


def decoder(kind, **fields):
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**_SIZE, "tie_word_embeddings": True, **fields})
    )


def llama(n, **fields):
    sizes = {"num_attention_heads": 8, "intermediate_size": 1376, "max_position_embeddings": n}
    return decoder("llama", **{**sizes, **fields})


def gpt2(n, **fields):
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = {"bos_token_id": 0, "eos_token_id": 2}
    return decoder("gpt2", **{**dropouts, **special, "n_head": 8, "n_positions": n, **fields})


def mega_image(**fields):
    return MegaForImageClassification(MegaConfig.image_base_patch16_224(**{"drop_path_rate": 0.0, **fields}))


def vit(**fields):
    config = AutoConfig.for_model("vit", num_labels=1000, **fields)
    return AutoModelForImageClassification.from_config(config, attn_implementation="sdpa")


def count_parameters(model):
    """Count parameters without tables of positions, of which each position reads one row."""
    unused = ("position_embeddings", "wpe.")
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in unused))
