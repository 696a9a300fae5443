"""Small copies of the models, data and files that the pages use, named as on the Hub or in the text.

If the working directory has a folder with the name of a repository on the Hub, transformers and datasets use the
folder.
"""

import shutil
from pathlib import Path

import pandas as pd
import torch

import luna_mega
from tests.convert import mega
from tests.docs.blocks import ROOT
from tests.quickstart import LUNA, MEGA, MEGALODON, make_tokenizer

MASKED = ["luna-base", "luna-base-tied", "USER/NAME", "OUT"]
MASKED_MEGA = ["mnaylor/mega-base-wikitext", "BEE-spoke-data/mega-encoder-small-16k-v1"]


def make_models(folder: Path) -> None:
    tokenizer = make_tokenizer()
    size = {"vocab_size": len(tokenizer)}
    causal = {"is_decoder": True, "use_chunking": True, "chunk_size": 8}
    found = {name: luna_mega.LunaForMaskedLM(luna_mega.LunaConfig(**LUNA, **size)) for name in MASKED}
    found |= {name: luna_mega.MegaForMaskedLM(luna_mega.MegaConfig(**MEGA, **size)) for name in MASKED_MEGA}
    for name in ("wikitext103", "outputs/lm"):
        found[name] = luna_mega.MegaForCausalLM(luna_mega.MegaConfig(**MEGA, **size, **causal))
    translation = luna_mega.MegaSeq2SeqConfig(**MEGA, **size, max_length=8)
    found["wmt16"] = luna_mega.MegaForConditionalGeneration(translation)
    found["megalodon"] = luna_mega.MegalodonForCausalLM(luna_mega.MegalodonConfig(**MEGALODON, **size))
    for name, model in found.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    tokenizer.save_pretrained(folder / "wmt16" / "target")


def make_data(folder: Path) -> None:
    rows = [{"text": text, "label": index % 2} for index, text in enumerate(["so good", "so bad"] * 10)]
    pd.DataFrame(rows).to_csv(folder / "reviews.csv", index=False)
    films, history = pd.DataFrame(rows[:4]), ["the history of a long war , the end of it .", ""] * 60
    tables = {f"stanfordnlp/imdb/{split}": films for split in ("train", "test")}
    sentences = films.rename(columns={"text": "sentence"})
    tables |= {f"stanfordnlp/sst2/{split}": sentences for split in ("train", "validation")}
    words = pd.DataFrame({"text": history})
    tables |= {f"Salesforce/wikitext/wikitext-2-v1/{split}": words for split in ("train", "validation", "test")}
    for name, table in tables.items():
        file = folder / f"{name}-00000-of-00001.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        table.to_parquet(file)
    card = "---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files:\n"
    card += "".join(f"  - split: {split}\n    path: wikitext-2-v1/{split}-*\n" for split in ("train", "validation"))
    (folder / "Salesforce" / "wikitext" / "README.md").write_text(f"{card}---\n", encoding="utf-8")


def make(folder: Path) -> Path:
    """Fill the working directory in which the blocks of the pages run."""
    make_models(folder)
    make_data(folder)
    shutil.copytree(ROOT / "examples" / "recipes", folder / "examples" / "recipes")
    (folder / "FILE").write_text("do_train: true\n", encoding="utf-8")
    torch.save(mega.mega("mega_sc_raw_base", values=True), folder / "checkpoint_best.pt")
    return folder
