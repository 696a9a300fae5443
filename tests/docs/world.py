"""Small copies of the models, data and files that the pages use, named as on the Hub or in the text.

If the working directory has a folder with the name of a repository on the Hub, transformers and datasets use the
folder.
"""

import shutil
import zipfile
from pathlib import Path

import pandas as pd
import torch

import luna_mega
from tests.convert import mega
from tests.docs.blocks import ROOT
from tests.quickstart import LUNA, make_tokenizer

MEGA = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24, "shared_representation_size": 8}
MEGA |= {"ema_projection_size": 2, "nffn_hidden_size": 16}
MASKED = ["luna-base", "luna-base-tied", "USER/NAME", "OUT"]
MASKED_MEGA = ["mnaylor/mega-base-wikitext", "BEE-spoke-data/mega-encoder-small-16k-v1"]
TINY_RECIPE = {
    "vocab_size: 33300": "vocab_size: 40",
    "hidden_size=192": "hidden_size=16",
    "intermediate_size=384,nffn_hidden_size=384": "intermediate_size=24,nffn_hidden_size=24",
    "[4000,12000]": "[5,9]",
    "max_steps: 1200": "max_steps: 2",
    "save_steps: 300": "save_steps: 2",
    "eval_context: 2048": "eval_context: 256",
}


def make_models(folder: Path) -> None:
    tokenizer = make_tokenizer()
    size = {"vocab_size": len(tokenizer)}
    causal = {"is_decoder": True, "use_chunking": True, "chunk_size": 8}
    found = {name: luna_mega.LunaForMaskedLM(luna_mega.LunaConfig(**LUNA, **size)) for name in MASKED}
    found |= {name: luna_mega.MegaForMaskedLM(luna_mega.MegaConfig(**MEGA, **size)) for name in MASKED_MEGA}
    found["wikitext103"] = luna_mega.MegaForCausalLM(luna_mega.MegaConfig(**MEGA, **size, **causal))
    translation = luna_mega.MegaSeq2SeqConfig(**MEGA, **size, max_length=8)
    found["wmt16"] = luna_mega.MegaForConditionalGeneration(translation)
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "shared_representation_size": 8,
        "value_size": 24,
        "chunk_size": 8,
    }
    sizes |= {"intermediate_size": 16, "ema_projection_size": 2, "norm_num_groups": 4}
    found["megalodon"] = luna_mega.MegalodonForCausalLM(luna_mega.MegalodonConfig(**sizes, **size))
    for name, model in found.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "wmt16" / "target")


def make_data(folder: Path) -> None:
    rows = [{"text": text, "label": index % 2} for index, text in enumerate(["so good", "so bad"] * 10)]
    pd.DataFrame(rows).to_csv(folder / "reviews.csv", index=False)
    films = folder / "stanfordnlp" / "imdb"
    films.mkdir(parents=True)
    for split in ("train", "test"):
        pd.DataFrame(rows[:4]).to_parquet(films / f"{split}-00000-of-00001.parquet")
    sentences = folder / "stanfordnlp" / "sst2"
    sentences.mkdir()
    for split in ("train", "validation"):
        renamed = pd.DataFrame(rows[:4]).rename(columns={"text": "sentence"})
        renamed.to_parquet(sentences / f"{split}-00000-of-00001.parquet")
    words = folder / "Salesforce" / "wikitext"
    (words / "wikitext-2-v1").mkdir(parents=True)
    for split in ("train", "validation", "test"):
        lines = ["the history of a long war , the end of it .", ""] * 60
        pd.DataFrame({"text": lines}).to_parquet(words / "wikitext-2-v1" / f"{split}-00000-of-00001.parquet")
    card = "---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files:\n"
    card += "".join(f"  - split: {split}\n    path: wikitext-2-v1/{split}-*\n" for split in ("train", "validation"))
    (words / "README.md").write_text(f"{card}---\n", encoding="utf-8")


def make_files(folder: Path) -> None:
    """Copy the recipes, one of them reduced in size, and create the download of a checkpoint."""
    shutil.copytree(ROOT / "examples" / "recipes", folder / "examples" / "recipes")
    recipe = folder / "examples" / "recipes" / "clm" / "wikitext2_words_mega_adaptive.yaml"
    text = recipe.read_text(encoding="utf-8")
    for long, short in TINY_RECIPE.items():
        assert long in text, long
        text = text.replace(long, short)
    recipe.write_text(text, encoding="utf-8")
    (folder / "FILE").write_text("do_train: true\n", encoding="utf-8")
    torch.save(mega.mega("mega_sc_raw_base", values=True), folder / "checkpoint_best.pt")
    with zipfile.ZipFile(folder / "mega.sc.zip", "w") as archive:
        archive.write(folder / "checkpoint_best.pt", "mega.sc/base/checkpoint_best.pt")


def make(folder: Path) -> Path:
    """Fill the working directory in which the blocks of the pages run."""
    make_models(folder)
    make_data(folder)
    make_files(folder)
    return folder
