"""Pipelines need only a folder; a single input has the same result as in a padded batch."""

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForAudioClassification,
    AutoModelForImageClassification,
    BertTokenizer,
    Wav2Vec2FeatureExtractor,
    pipeline,
)

from luna_mega import MegaConfig
from tests.marks import diagonal
from tests.modeling import luna, mega
from tests.modeling.contract import CLASSES
from tests.modeling.decoders import make_plain

# Task -> class without its family, and options of a call.
TASKS = {
    "text-classification": ("ForSequenceClassification", {"top_k": None}),
    "token-classification": ("ForTokenClassification", {"ignore_labels": []}),
    "fill-mask": ("ForMaskedLM", {}),
    "feature-extraction": ("Model", {}),
    "zero-shot-classification": ("ForSequenceClassification", {"candidate_labels": ["w1", "w2"]}),
}
NLI = {"label2id": {"contradiction": 0, "neutral": 1, "entailment": 2}, "type_vocab_size": 2}


@pytest.fixture
def bert():
    """Return a tokenizer of BERT, which returns token types."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *[f"w{number}" for number in range(25)]]
    return BertTokenizer(vocab={word: index for index, word in enumerate(words)}, model_max_length=32)


@pytest.mark.parametrize(("family", "task"), diagonal(["luna", "mega"], TASKS) + [("megalodon", "feature-extraction")])
def test_texts(family, task, bert, tmp_path):
    head, options = TASKS[task]
    labels = NLI if "zero" in task else {}
    CLASSES[f"{family} {head}"].make(torch.float32, pad_token_id=0, vocab_size=len(bert), **labels).save_pretrained(
        tmp_path
    )
    bert.save_pretrained(tmp_path)
    pipe, texts = pipeline(task, model=str(tmp_path)), ["w1 w2 [MASK] w3 w4 w5 w6 w7 w8", "w5 [MASK]"]
    for text, together in zip(texts, pipe(texts, batch_size=2, **options), strict=True):
        found = [together, pipe(text, **options)]
        if task == "feature-extraction":
            found = [np.array(result[0][: len(text.split()) + 2]) for result in found]
        elif task == "zero-shot-classification":
            found = [result["scores"] for result in found]
        else:
            found = [[entry["score"] for entry in result] for result in found]
            assert len(found[0]) == {"text": 3, "token": len(text.split()), "fill": 5}[task.partition("-")[0]]
        np.testing.assert_allclose(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["luna", "mega"])
def test_generated_texts(family, tokenizer):
    tokenizer.padding_side = "left"
    model = make_plain(family, vocab_size=len(tokenizer))
    generator = pipeline("text-generation", model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    prompts = ["w1 w2 w3 w4 w5", "w7", "w8 w9"]
    separate = [generator(text, **options)[0]["generated_text"] for text in prompts]
    assert all(text.strip() for text in separate) and len(set(separate)) > 1
    assert [outputs[0]["generated_text"] for outputs in generator(prompts, batch_size=3, **options)] == separate


@pytest.mark.parametrize("module", [luna, mega], ids=["luna", "mega"])
def test_audio(module, tmp_path):
    """The folder of run_audio.py works with the class and the pipeline for audio."""
    labels = {0: "no", 1: "yes"}
    fields = module.VALUES | {"pooling": "mean", "num_labels": 2, "id2label": labels}
    model = module.make("ForSequenceClassification", **fields)
    extractor = Wav2Vec2FeatureExtractor(sampling_rate=1000, return_attention_mask=True)
    for part in (model, extractor):
        part.save_pretrained(tmp_path)
    assert type(AutoModelForAudioClassification.from_pretrained(tmp_path)) is type(model)
    clip = np.random.default_rng(0).standard_normal(80).astype(np.float32)
    found = pipeline("audio-classification", model=str(tmp_path))(clip)
    scores = model(**extractor(clip, sampling_rate=1000, return_tensors="pt")).logits.softmax(-1)[0]
    expected = {label: pytest.approx(scores[index].item(), abs=1e-6) for index, label in labels.items()}
    assert {part["label"]: part["score"] for part in found} == expected


def test_images():
    Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    from transformers.models.levit import image_processing_pil_levit

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "image_size": 32, "patch_size": 8, "num_labels": 5}
    model = AutoModelForImageClassification.from_config(MegaConfig.image_base_patch16_224(**sizes)).eval()
    processor = image_processing_pil_levit.LevitImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    classify = pipeline("image-classification", model=model, image_processor=processor)
    pictures = [Image.new("RGB", (50, 41), color) for color in ("red", "blue")]
    answers = classify(pictures, top_k=5, batch_size=2)
    logits = model(**processor(images=pictures, return_tensors="pt")).logits
    for answer, row in zip(answers, logits.softmax(-1), strict=True):
        scores = torch.tensor([entry["score"] for entry in answer])
        torch.testing.assert_close(scores, row.sort(descending=True)[0], atol=1e-6, rtol=0)
