import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import warning_once

from luna_mega.modeling_common import generation, masks


@pytest.fixture
def messages():
    """Collect the messages about masks and generation; some are logged once."""
    records, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    warning_once.cache_clear()
    loggers = [masks.logger, generation.logger, logging.getLogger("transformers.generation.utils")]
    for logger in loggers:
        logger.addHandler(handler)
    yield records
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture
def tokenizer():
    """Return a tokenizer with one token per word: w0 to w34 and the special tokens."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(35)), "<mask>"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask")}
    names |= {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names, model_input_names=["input_ids", "attention_mask"])
