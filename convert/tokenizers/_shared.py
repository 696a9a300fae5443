"""Parts that several tokenizers share."""

from tokenizers import Regex, pre_tokenizers

# What Python's `str.split()`, and so fairseq, takes for white space: also the four separators before the space.
_WHITE_SPACE = r"[\s\x1c-\x1f]+"

# Options of every tokenizer that is not a class of transformers for GPT-2 or RoBERTa.
OPTIONS = {
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "model_input_names": ["input_ids", "attention_mask"],
}


def split_at_white_space() -> pre_tokenizers.PreTokenizer:
    """Return the step that splits a text into words as fairseq does."""
    return pre_tokenizers.Split(Regex(_WHITE_SPACE), behavior="removed")
