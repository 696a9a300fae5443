"""The contract of a model folder: it works with and without the package, and a damaged one is one sentence.

`test_contract.py` checks a row per way to make a folder and per class, `test_damage.py` damages a folder at random. A
new way to write a folder is a row of `WAYS`.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from huggingface_hub import ModelCard
from hypothesis import strategies as st
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_imports, get_relative_import_files
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

import luna_mega_cli
from luna_mega._register import CONFIGS, auto_classes
from luna_mega.modeling_common.configuration import CODE_FOLDER
from luna_mega.saved_code import GENERATED, model_code
from tests.convert.folders import edit
from tests.hub import client as on_client
from tests.hub.client import Client, check_outputs, lists
from tests.hub.server import metadata_errors
from tests.modeling.samples import make_inputs
from tests.quickstart import LUNA, MEGA, MEGALODON

REMOTE = {"trust_remote_code": True}
SMALL = {"luna": LUNA, "luna_seq2seq": LUNA, "mega": MEGA, "mega_seq2seq": MEGA, "megalodon": MEGALODON}
FIELDS = {model_type: {"vocab_size": 40, **fields} for model_type, fields in SMALL.items()}
IMAGES = {"vocab_size": None, "input_type": "patches", "image_size": 8, "patch_size": 4}
VALUES = {"vocab_size": None, "input_type": "values", "pooling": "mean"}
MEGA_LM = {"is_decoder": True, "bidirectional": False, "use_chunking": True, "chunk_size": 4}
MEGA_LM |= {"adaptive_input_cutoffs": [8], "adaptive_softmax_cutoffs": [8]}
OTHER_FIELDS = {
    ("luna", "AutoModel"): {"type_vocab_size": 2},
    ("luna", "AutoModelForCausalLM"): {"is_decoder": True},
    ("luna", "AutoModelForSequenceClassification"): {"tie_key_value": False, "pooling": "packed_attention"},
    ("luna", "AutoModelForAudioClassification"): VALUES,
    ("mega", "AutoModelForCausalLM"): MEGA_LM,
    ("mega", "AutoModelForSequenceClassification"): VALUES
    | {"normalization_type": "batchnorm", "use_chunking": True, "chunk_size": 3},
    ("mega", "AutoModelForImageClassification"): IMAGES,
}
CLASSES = [(model_type, name) for model_type, config in CONFIGS.items() for name in auto_classes(config)]
MASKED_LM, SEQUENCES = "AutoModelForMaskedLM", "AutoModelForSequenceClassification"


def make(model_type: str, auto_class: str = MASKED_LM) -> PreTrainedModel:
    """Return a small model of a type and an Auto class."""
    fields = FIELDS[model_type] | OTHER_FIELDS.get((model_type, auto_class), {})
    config = CONFIGS[model_type](**{name: value for name, value in fields.items() if value is not None})
    return auto_classes(CONFIGS[model_type])[auto_class](config).eval()


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    files = filter(Path.is_file, folder.rglob("*"))
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def bundle(*arguments: object) -> int:
    """Run `luna-mega bundle`; return its exit status."""
    return luna_mega_cli.main(["bundle", *map(str, arguments)])


class Place(NamedTuple):
    """A folder with a saved model and its tokenizer, and two processes, for the functions that make folders."""

    saved: Path
    auto_class: str
    client: Client
    stranger: Client

    def next_to(self, name: str) -> Path:
        """Return the path of another folder, next to the saved one."""
        return self.saved.with_name(name)


def bundled(place: Place) -> Path:
    """Write the bundle of a folder that was saved without code to another folder."""
    shutil.rmtree(place.saved / CODE_FOLDER)
    edit(place.saved, auto_map=None)
    assert bundle(place.saved, "--output", place.next_to("bundle")) == 0
    return place.next_to("bundle")


def bundled_over_old_code(place: Place) -> Path:
    """Bundle a folder with the code of earlier versions, which was next to the weights."""
    for name in ("modeling_luna.py", f"{CODE_FOLDER}/modeling_luna.py", f"{CODE_FOLDER}/gone_luna.py"):
        (place.saved / name).write_text(f"{GENERATED}0.0.1\n", encoding="utf-8")
    assert bundle(place.saved) == 0
    return place.saved


def bundle_of_shards(place: Place) -> Path:
    """Bundle shards, whose names only the index contains, into a new folder without the shards of another save."""
    folder = place.next_to("shards")
    shutil.copytree(place.saved, folder)
    (folder / SAFE_WEIGHTS_NAME).unlink()
    getattr(transformers, place.auto_class).from_pretrained(place.saved).save_pretrained(folder, max_shard_size="5KB")
    content = json.loads((index := folder / SAFE_WEIGHTS_INDEX_NAME).read_text(encoding="utf-8"))
    for name in (names := set(content["weight_map"].values())):
        (folder / name).rename(folder / name.replace("model-", "part-"))
    index.write_text(json.dumps(content).replace("model-", "part-"), encoding="utf-8")
    (folder / "model-00001-of-00009.safetensors").write_text("of another save", encoding="utf-8")
    assert len(names) > 2 and bundle(folder, "--output", place.next_to("bundle")) == 0
    assert not list(place.next_to("bundle").glob("model-*"))
    return place.next_to("bundle")


def saved_twice(place: Place) -> Path:
    """Save another model in shards to the folder; a single file takes precedence over their index."""
    make("luna").save_pretrained(place.saved, max_shard_size="5KB")
    assert bundle(place.saved, "--output", place.next_to("bundle")) == 0
    assert [file.name for file in place.next_to("bundle").glob("*.safetensors*")] == [SAFE_WEIGHTS_NAME]
    return place.next_to("bundle")


def saved_by_stranger(place: Place) -> Path:
    """Save the model again in a process without the package; its code is saved with it and with a new one."""
    folders = place.next_to("again"), place.next_to("new")
    place.stranger(on_client.save_again, place.saved, place.auto_class, *folders)
    code, *others = (contents(folder / CODE_FOLDER) for folder in (place.saved, *folders))
    assert all(other == code for other in others)
    for file in place.saved.glob("tokenizer*"):
        shutil.copy(file, folders[0])
    return folders[0]


def pushed_during_training(place: Place) -> str:
    """Train with a push of each checkpoint, which has no sub-folders; the code of the last one is complete."""
    place.client(on_client.train, place.saved, place.next_to("run"), "tester/run", always=True)
    check_code(place.next_to("run") / "checkpoint-4", "luna")
    return "tester/run"


def pushed_by_trainer(place: Place) -> str:
    place.client(on_client.train, place.saved, place.next_to("run"), "tester/run", script=False)
    return "tester/run"


def pushed_by_script(place: Place) -> str:
    """Push as the training scripts do; the card names the dataset and the license, and no folder."""
    place.client(on_client.train, place.saved, output := place.next_to("run"), "tester/run")
    card = (output / "README.md").read_text(encoding="utf-8")
    data = ModelCard(card).data
    assert (data.datasets, data.license, data.license_name) == (["nyu-mll/glue"], "other", "my-license")
    assert data.base_model is None and data.tags == ["luna", "generated_from_trainer", "luna-mega"]
    assert str(output.parent) not in card and (output / "checkpoint-2").exists()
    return "tester/run"


def pushed(place: Place) -> str:
    """Push model and tokenizer to a repository that has a card, which keeps its text."""
    place.client(on_client.push, place.saved, "tester/small", place.auto_class)
    return "tester/small"


class Way(NamedTuple):
    """A row: type and class of the model, a function that returns the folder or repository, and words of its card."""

    model_type: str
    auto_class: str
    make: Callable[[Place], Path | str]
    card: str = ""


WAYS = {
    "saved": Way("mega", "AutoModelForCausalLM", lambda place: place.saved),
    "bundled over old code": Way("luna", MASKED_LM, bundled_over_old_code, "Weights: mit."),
    "bundled to a folder": Way("megalodon", "AutoModelForCausalLM", bundled, "Weights: mit."),
    "bundle of shards": Way("luna", MASKED_LM, bundle_of_shards, "Weights: mit."),
    "saved twice": Way("luna", MASKED_LM, saved_twice),
    "saved by a stranger": Way("luna", MASKED_LM, saved_by_stranger),
    "pushed during training": Way("luna", SEQUENCES, pushed_during_training),
    "pushed by Trainer": Way("luna", SEQUENCES, pushed_by_trainer, "Weights: not stated; set"),
    "pushed by a script": Way("luna", SEQUENCES, pushed_by_script, "fine-tuned from `saved` on the nyu-mll/glue"),
    "pushed": Way("mega_seq2seq", "AutoModelForSeq2SeqLM", pushed, "Weights: mit."),
}


def check_loads(client: Client, stranger: Client, source: Path | str, auto_class: str, model: PreTrainedModel) -> None:
    """Check that a model loaded by the package, and by its own code, has the outputs of the saved model."""
    inputs = make_inputs(model, [9, 3], side="left", gaps=auto_class != "AutoModelForCausalLM")
    call = source, auto_class, lists(inputs)
    for options in ({}, REMOTE):
        check_outputs(client(on_client.outputs, *call, **options), model, inputs, package=True)
    check_outputs(stranger(on_client.outputs, *call, **REMOTE), model, inputs)
    assert "trust_remote_code=True" in stranger.error(on_client.outputs, *call, trust_remote_code=False)
    if auto_class == "AutoModelForCausalLM":
        settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "use_cache": True}
        written = model.generate(**inputs, **settings).tolist()
        assert stranger(on_client.generate, *call, settings, **REMOTE) == written


def check_card(client: Client, stranger: Client, card: str, name: str, source: Path | str) -> None:
    """Check that the Hub accepts a card, and that its code loads the model with and without the package."""
    assert metadata_errors(card) == []
    blocks = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    with_package, without = (block.replace(json.dumps(name), json.dumps(str(source))) for block in blocks)
    assert with_package.startswith("import luna_mega") and "trust_remote_code" not in with_package
    assert ("AutoTokenizer" in with_package) == ("AutoTokenizer" in without)
    assert client(on_client.run_code, with_package).startswith("luna_mega.")
    assert stranger(on_client.run_code, without).startswith("transformers_modules.")


def check_code(folder: Path, model_type: str) -> None:
    """Check that the code is that of the package, complete and small, and named for every Auto class.

    The file in `auto_map` imports all others, which require no other packages, and none of another family.
    """
    texts, auto_map = model_code(model_type)
    assert contents(folder / CODE_FOLDER) == {f"{name}.py": text.encode() for name, text in texts.items()}
    assert sum(map(len, texts.values())) < 1_000_000
    assert auto_map.keys() == {"AutoConfig", *auto_classes(CONFIGS[model_type])}
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["auto_map"] == auto_map
    (entry,) = {folder / f"{name.partition('.')[0]}.py" for name in auto_map.values()}
    files = set((folder / CODE_FOLDER).iterdir())
    assert {entry, *map(Path, get_relative_import_files(entry))} == files and not list(folder.glob("*.py"))
    required = {name for file in files for name in get_imports(file)} - sys.stdlib_module_names
    assert required <= {"huggingface_hub", "packaging", "torch", "transformers"}
    family = model_type.removesuffix("_seq2seq")
    unread = {"luna": "gated_attention|recurrence|mega", "mega": "luna|timestep_norm|megalodon"}
    others = re.compile(unread.get(family, "luna|adaptive|mega(?!lodon)"))
    assert not [file.name for file in files if others.search(file.name)]
    assert f"kernels_{'luna_attention' if family == 'luna' else 'recurrence'}_triton_ops" in texts
    assert "try:\n    import triton\nexcept ImportError:\n    raise\n" in texts["kernels_common_triton_launch"]


EVIL = """import os
os.mkdir(os.path.join(os.path.dirname(__file__), "executed"))
"""
LONG = "long " * 999
ODD = [None, True, -1, 5, 10**18, 10**19, 0.5, "", "x", "a\0b", "\udcff", "\x1b[31m", "../x", LONG, [], [[]], {}]
VALUES_OF_JSON = st.recursive(
    st.sampled_from(ODD),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.sampled_from(["a", "AutoModel"]), values),
    max_leaves=3,
)
CODE = st.sampled_from(["evil.X", "gone.X", "a/b--c.D", "auto_luna.LunaModel", f"{CODE_FOLDER}/auto_luna.X"])
AUTO_MAPS = st.dictionaries(
    st.sampled_from(["AutoModel", MASKED_LM, "AutoConfig", "AutoTokenizer", "x"]),
    CODE | st.tuples(CODE, st.none() | CODE) | VALUES_OF_JSON,
)
FIELD_NAMES = [
    *("model_type", "architectures", "hidden_size", "vocab_size", "num_hidden_layers", "id2label", "dtype", "pooling"),
    *("max_position_embeddings", "embedding_norm", "dropout", "auto_map", "other"),
]
PLACES = st.sampled_from(
    ["model.safetensors", "../outside.safetensors", "/etc/passwd", "..\\x", "a/../b", "..", "a\0b"]
)
# Contents that are not a JSON object.
NOT_OBJECTS = [b"", b"{", b"[1]", b"null", b"\0\xff", b"\\", b"[" * 100_000, b'{"a": ' * 50_000]
NOT_OBJECTS.append(b'{"model_type": ' + b"9" * 5000 + b"}")
# Kind -> its values: a field of config.json; a file and its content, a share of it, or None; the index; a link.
DAMAGES = {
    "field": st.tuples(st.sampled_from(FIELD_NAMES), VALUES_OF_JSON),
    "content": st.tuples(
        st.sampled_from(["config.json", "generation_config.json", "README.md", "tokenizer.json", SAFE_WEIGHTS_NAME]),
        st.sampled_from([*NOT_OBJECTS, 0.3, 0.9, None, b"---\n[\n---\n"]) | st.binary(max_size=5),
    ),
    "auto_map": st.tuples(st.just("auto_map"), AUTO_MAPS),
    "index": st.dictionaries(st.sampled_from("xy"), PLACES | VALUES_OF_JSON) | VALUES_OF_JSON,
    "link": st.sampled_from(["config.json", "README.md", "tokenizer.json", SAFE_WEIGHTS_NAME, "target", "1_Pooling"]),
}


def damage(folder: Path, kind: str, value: Any) -> None:
    """Damage a folder in one way; next to it is a folder `elsewhere` with the same files."""
    if kind in ("field", "auto_map"):
        edit(folder, **dict([value]))
    elif kind == "content":
        file, new = folder / value[0], value[1]
        content = file.read_bytes()
        file.unlink()
        if new is not None:
            file.write_bytes(content[: int(new * len(content))] if isinstance(new, float) else new)
    elif kind == "index":
        (folder / SAFE_WEIGHTS_NAME).unlink()
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps({"weight_map": value}), encoding="utf-8")
    else:
        (folder / value).unlink(missing_ok=True)
        elsewhere = folder.with_name("elsewhere")
        (folder / value).symlink_to(elsewhere / value if (elsewhere / value).exists() else elsewhere)
