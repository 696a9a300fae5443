import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import luna_mega

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
SIZES = {"vocab_size": len(SPECIAL) + 256, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
FIELDS = {
    "Luna": {
        "num_attention_heads": 4,
        "num_pack_attention_heads": 2,
        "projection_length": 4,
        "max_position_embeddings": 48,
    },
    "Megalodon": {
        "num_attention_heads": 2,
        "shared_representation_size": 8,
        "value_size": 24,
        "chunk_size": 8,
        "ema_projection_size": 4,
        "norm_num_groups": 4,
        "bos_token_id": 0,
        "pad_token_id": 1,
    },
    "Mega": {"use_chunking": True, "chunk_size": 8, "ema_projection_size": 4},
}


@pytest.fixture(scope="session")
def tokenizer():
    """A byte is a token."""
    symbols = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    names = dict(zip((f"{name}_token" for name in ("bos", "pad", "eos", "unk", "mask")), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, model_input_names=["input_ids", "attention_mask"])


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory):
    """Make a folder with an untrained model of this class."""
    made = {}

    def make(name, **fields):
        if (key := (name, *fields.items())) not in made:
            family = next(family for family in FIELDS if name.startswith(family))
            if name.endswith("ForCausalLM"):
                fields = {"is_decoder": True} | ({"bidirectional": False} if family == "Mega" else {}) | fields
            config = "Seq2SeqConfig" if "Conditional" in name else "Config"
            torch.manual_seed(0)
            model = getattr(luna_mega, name)(getattr(luna_mega, family + config)(**SIZES | FIELDS[family] | fields))
            made[key] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[key])
            tokenizer.save_pretrained(made[key])
        return made[key]

    return make
