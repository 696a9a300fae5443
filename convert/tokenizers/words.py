"""Dictionaries of whitespace-separated symbols (words, characters, pixel values, operators) as a fast tokenizer."""

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import TokenizersBackend

from luna_mega.convert.dictionary import Dictionary, vocabulary

# What Python's `str.split()`, and so fairseq, takes for white space: also the four separators before the space.
WHITE_SPACE = r"[\s\x1c-\x1f]+"


def word_tokenizer(dictionary: Dictionary, cls_token: str, prepend_cls: bool, max_length: int) -> TokenizersBackend:
    """Splits text at white space and looks every symbol up, as fairseq-preprocess does.

    A sequence ends with `</s>` and, with `prepend_cls`, starts with `cls_token`. Special tokens are recognised as
    whole symbols only.

    Args:
        dictionary: the vocabulary of the model.
        cls_token: the symbol that fairseq appends.
        prepend_cls: whether the model was trained with it in front.
        max_length: positions of the model.
    """
    vocab = vocabulary(dictionary.symbols, cls_token)
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(WHITE_SPACE), behavior="removed")
    single = f"{cls_token} $A </s>" if prepend_cls else "$A </s>"
    backend.post_processor = processors.TemplateProcessing(
        single=single,
        pair=f"{single} {single.replace('$A', '$B')}",
        special_tokens=[(token, vocab[token]) for token in (cls_token, "</s>")],
    )
    return TokenizersBackend(
        tokenizer_object=backend,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        sep_token="</s>",
        unk_token="<unk>",
        cls_token=cls_token,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        split_special_tokens=True,
    )
