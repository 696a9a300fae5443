"""The plan of a checkpoint, by its layout."""

from luna_mega.convert.plan import Plan
from luna_mega.convert.plan_luna_bert import plan_luna_bert
from luna_mega.convert.plan_luna_lra import plan_luna_lra
from luna_mega.convert.plan_luna_seq2seq import plan_luna_seq2seq
from luna_mega.convert.plan_mega_lm import plan_mega_lm
from luna_mega.convert.plan_mega_lra import plan_mega_lra
from luna_mega.convert.plan_mega_seq2seq import plan_mega_seq2seq
from luna_mega.convert.source_detect import Source

_PLANS = {
    "luna_lra": plan_luna_lra,
    "luna_seq2seq": plan_luna_seq2seq,
    "mega_lra": plan_mega_lra,
    "mega_lm": plan_mega_lm,
    "mega_seq2seq": plan_mega_seq2seq,
}


def make_plan(source: Source, tensors: dict, args: dict, head: str | None = None) -> Plan:
    """The plan for a file of any layout; `head`: name of the classification head of a luna_bert file to convert.

    Raises:
        ConversionError: args and tensors contradict each other, or the file has no head `head`.
    """
    if source.layout == "luna_bert":
        return plan_luna_bert(source, tensors, args, head)
    return _PLANS[source.layout](source, tensors, args)
