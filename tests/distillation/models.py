"""Tiny teachers of every family, and their students."""

from typing import Any

import torch
import transformers

from luna_mega.distillation import Teacher, build_student, student_config

_SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_HEADS = {"num_key_value_heads": 1, "head_dim": 8}
_GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_inner": 24, "n_positions": 18}
_DISTIL = {"dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 24}
_MODERN = {"cls_token_id": 0, "sep_token_id": 2, "local_attention": 8}
# Name -> (stem of the classes, fields of the configuration).
ENCODERS = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"max_position_embeddings": 20, "type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "camembert": ("Camembert", {"type_vocab_size": 1}),
    "distilbert": ("DistilBert", _DISTIL),
    "electra": ("Electra", {"embedding_size": 16}),
    "modernbert": ("ModernBert", _MODERN),
}
DECODERS = {
    "gpt2": ("GPT2", _GPT2),
    "llama": ("Llama", _HEADS),
    "mistral": ("Mistral", _HEADS),
    "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3", _HEADS),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 1}),
}
PLAIN = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra")  # Luna has their layers


def make_model(name: str, head: str | None = None, scale: float = 0.3, **fields: Any) -> transformers.PreTrainedModel:
    """Return a random model whose weights are large enough for its layers to matter."""
    torch.manual_seed(0)
    stem, own = (ENCODERS | DECODERS)[name]
    suffix = head or ("ForMaskedLM" if name in ENCODERS else "ForCausalLM")
    suffix = "LMHeadModel" if name == "gpt2" and head is None else suffix
    config = getattr(transformers, f"{stem}Config")(**_SIZES | own | fields)
    model = getattr(transformers, stem + suffix)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return model


def make_teacher(name: str, head: str | None = None, **fields: Any) -> Teacher:
    return Teacher(make_model(name, head, **fields))


def make_student(teacher: Teacher, kind: str, **options: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    if kind == "luna":
        options = {"projection_length": 6} | options
    return build_student(teacher, student_config(teacher, kind, **options)).eval()


def make_batch(teacher: Teacher, length: int = 12, labels: bool = True) -> dict[str, torch.Tensor]:
    """Return three sequences: one unpadded, one padded, one of a single token; every third token is predicted."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, teacher.config.vocab_size, (3, length), generator=generator)
    mask = torch.arange(length) < torch.tensor([[length], [length - 4], [1]])
    ids = ids.masked_fill(~mask, 1)
    batch = {"input_ids": ids, "attention_mask": mask.long()}
    if teacher.is_classifier:
        return batch | {"labels": torch.tensor([0, 1, 2])}
    chosen = mask if teacher.family.is_decoder else mask & (torch.arange(length) % 3 == 1)
    return batch | ({"labels": ids.masked_fill(~chosen, -100)} if labels else {})
