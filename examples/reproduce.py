r"""Evaluate a published checkpoint of the authors as the paper does, and compare the scores.

    python examples/reproduce.py enwik8
    python examples/reproduce.py speech --file base
    python examples/reproduce.py lra --task_name image --file cifar10
    python examples/reproduce.py imagenet --checkpoint mega.imagenet.zip --data data/imagenet
    python examples/reproduce.py luna-base --task_name sst2 --checkpoint luna.base.tied.zip --data data/sst2 --bpe gpt2

The script downloads the archive of the authors and the data set, converts the checkpoint,
evaluates the model, and appends a row to results.md in --output_dir. It prints every command. A second run continues an
interrupted download, and reuses the converted model and the prepared data.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import shlex
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from datasets import Dataset
from datasets.exceptions import DatasetsError
from transformers import Wav2Vec2FeatureExtractor

import luna_mega
import luna_mega_cli
from luna_mega import training as lib

MEGA = "https://dl.fbaipublicfiles.com/mega"
ROOM, ENWIK8 = 3, 100_000_000  # times the size of a download that its content needs; bytes of enwik8
LRA = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
TABLE9 = shlex.quote(str(Path(__file__).resolve().parent / "recipes" / "glue" / "table9.yaml"))
LRA_SOURCES = {"text": "stanfordnlp/imdb", "image": "uoft-cs/cifar10"}
HEADER = "| date | checkpoint | source | paper | here | difference | luna-mega, torch, device |\n|" + "---|" * 7 + "\n"


@dataclass(frozen=True)
class Experiment:
    """A published checkpoint and its evaluation."""

    model: str  # class, or the beginning of its name
    script: str
    options: str
    metric: str
    source: str  # table of the paper
    paper: dict[str, float]  # scores by the name that `variant` returns
    archive: str | None = None  # address; None = it requires a browser
    data: str | None = None  # address of the data set; None = the Hub, or --data
    tasks: tuple[str, ...] = ()


LM = "--split test --per_device_eval_batch_size 1 --line_end"
EXPERIMENTS = {
    "enwik8": Experiment(
        "MegaForCausalLM", "eval_lm", f"{LM} newline --eval_context 100000 --chunk_size 4096 --eval_segment 12288",
        "bits_per_token",
        "Mega, Table 5", {"": 1.02}, f"{MEGA}/enwik8.zip", "http://mattmahoney.net/dc/enwik8.zip"),
    "wikitext103": Experiment(
        "MegaForCausalLM", "eval_lm", f"{LM} eos --eval_context 24557 --chunk_size 2048 --eval_segment 4096",
        "perplexity",
        "Mega, Table 5", {"": 18.07}, f"{MEGA}/wt103.zip"),
    "speech": Experiment(
        "MegaForSequenceClassification", "run_audio", "--max_seconds 1.0 --do_predict true", "test_accuracy",
        "Mega, Table 4", {"60": 96.92, "72": 97.30}, f"{MEGA}/mega.sc.zip",
        "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz"),
    "lra": Experiment(
        "MegaForSequence", "lra.run_lra", "--convention mega --do_predict true --task_name {task}", "test_accuracy",
        "Mega, Table 2", dict(zip(LRA, (63.14, 90.43, 91.25, 90.44, 96.01, 97.98), strict=True))
        | dict(zip((f"{task} chunk" for task in LRA), (58.76, 90.19, 90.97, 85.80, 94.41, 93.81), strict=True)),
        f"{MEGA}/mega.lra.zip", tasks=LRA),
    "imagenet": Experiment(
        "MegaForImage", "run_image_classification", "--do_eval true", "eval_accuracy", "Mega, Table 7", {"": 82.31}),
    "luna-base": Experiment(
        "LunaForMaskedLM", "run_glue", f"--recipe {TABLE9} --task_name {{task}}", "eval_accuracy", "Luna, Table 6",
        {"sst2 tied": 94.3, "sst2": 94.6, "qnli tied": 91.5, "qnli": 92.2, "qqp tied": 91.2, "qqp": 91.3},
        tasks=("sst2", "qnli", "qqp")),
}  # fmt: skip


def run(script: str, *options: str) -> Any:
    """Print a command and run it in this process; return the result of a script."""
    if script == "luna-mega":
        lib.say(f"$ {shlex.join([script, *options])}")
        return luna_mega_cli.main(options) and lib.fail(f"{script} {options[0]} has failed, see the line above")
    lib.say(f"$ python examples/{script.replace('.', '/')}.py {shlex.join(options)}")
    return importlib.import_module(script).main([*options])


def check_room(folder: Path, size: int) -> None:
    if (free := shutil.disk_usage(folder).free) < size:
        lib.fail(f"{folder} has {free / 1e9:.1f} GB free, {size / 1e9:.1f} GB are needed; pass another --output_dir")


def download(address: str, folder: Path, option: str) -> Path:
    """Return a downloaded file; a second call continues an interrupted download."""
    file, part = (folder / f"{Path(urlsplit(address).path).name}{suffix}" for suffix in ("", ".part"))
    if file.exists():
        return file
    try:
        with urlopen(Request(address, method="HEAD"), timeout=60) as reply:
            size = int(reply.headers["Content-Length"] or 0)
        start = part.stat().st_size if part.exists() and part.stat().st_size <= size else 0
        check_room(folder, ROOM * size - start)
        lib.say(f"downloading {address}: {size / 1e6:.1f} MB, from byte {start} on")
        request = Request(address, headers={"Range": f"bytes={start}-"} if start else {})
        if start < size or not size:
            with urlopen(request, timeout=60) as reply, part.open("ab" if reply.status == 206 else "wb") as target:
                shutil.copyfileobj(reply, target, 1 << 20)
    except (OSError, HTTPException) as error:
        lib.fail(f"cannot download {address}: {error}; run the command again, or pass a downloaded file with {option}")
    if size and (got := part.stat().st_size) != size:
        lib.fail(f"{address} was interrupted after {got} of {size} bytes; run the command again to continue")
    return part.rename(file)


def check_member(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo:
    """Check a member of an archive just before its extraction, as `tarfile.data_filter` of Python 3.11.4 and later."""
    root, target = os.path.realpath(folder), ""
    if member.issym():
        member.linkname = os.path.normpath(member.linkname)  # or a later link could change the meaning of x/..
        target = os.path.join(os.path.dirname(member.name), member.linkname)
    elif member.islnk():
        target = member.linkname
    places = [os.path.join(root, place) for place in (member.name, target)]
    if not all(Path(os.path.realpath(place)).is_relative_to(root) for place in places):
        raise tarfile.TarError(f"{member.name!r} is outside of the folder of the archive, or links to such a place")
    if not (target or member.isreg() or member.isdir()) or (member.islnk() and os.path.islink(places[1])):
        raise tarfile.TarError(f"{member.name!r} is neither a file nor a folder nor a link to a file or folder")
    member.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)
    member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""  # only root changes owners
    return member


def unpack(archive: Path, folder: Path) -> Path:
    """Return the folder of the content of an archive; other files and folders are returned."""
    if not archive.exists():
        lib.fail(f"{archive}: no such file or folder")
    is_zip = (
        archive.is_file() and archive.suffix != ".pt" and zipfile.is_zipfile(archive)
    )  # torch.save writes zip files
    if archive.is_dir() or not (is_zip or tarfile.is_tarfile(archive)):
        return archive
    if not (content := folder / f"{archive.name}-{archive.stat().st_size}").is_dir():
        with TemporaryDirectory(dir=folder) as new, (zipfile.ZipFile if is_zip else tarfile.open)(archive) as opened:
            sizes = [x.file_size for x in opened.infolist()] if is_zip else [x.size for x in opened.getmembers()]
            check_room(folder, sum(sizes))
            if is_zip:
                opened.extractall(f"{new}/content")
            else:  # Python 3.11.3 and earlier ignore the attribute, but check the members
                opened.extraction_filter = check = getattr(tarfile, "data_filter", check_member)
                opened.extractall(f"{new}/content", (check(x, f"{new}/content") for x in opened.getmembers()))
            Path(new, "content").rename(content)
    return content


def find(what: str, option: str, folder: Path, ending: str, fits: Callable[[Path], object] = Path.exists) -> Path:
    """Return the only file of a folder, at any depth, with a name that ends so, that fits; equal files count once."""
    every = [file for file in [folder, *sorted(folder.rglob("*"))] if file.is_file()]
    found = [file for file in every if file.name.endswith(ending) and fits(file)]
    if len(found) > 1 and sum(file.stat().st_size for file in found) < 1e8:
        found = list({file.read_bytes(): file for file in reversed(found)}.values())
    if len(found) == 1:
        return found[0]
    names = [file.name if file == folder else str(file.relative_to(folder)) for file in sorted(found) or every]
    shown = ", ".join(names[:20]) + (f", ... ({len(names)} files)" if len(names) > 20 else "")
    lib.fail(f"{folder} has {len(found) or 'no'} {what}{'; it contains' if not found else ''}: {shown}; pass {option}")


def inspect(checkpoint: Path, *options: str | Path) -> dict[str, Any] | None:
    """Return the report of a conversion that writes nothing, None if it fails."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        failed = luna_mega_cli.main(["convert", str(checkpoint), "--dry-run", "--json", *map(str, options)])
    return None if failed else json.loads(out.getvalue())


def is_done(folder: Path, stamp: str) -> bool:
    """Return whether a step has completed with this stamp; exit if its folder has another content."""
    complete = (mark := folder / "done").exists() and mark.read_text(encoding="utf-8-sig") == stamp
    if folder.exists() and not complete:
        lib.fail(f"{folder} is of another or an interrupted run; remove it, or pass another --output_dir")
    return complete


def convert(arguments: argparse.Namespace, experiment: Experiment, folder: Path) -> Path:
    """Convert the checkpoint, and return the folder of the model."""
    archive = Path(arguments.checkpoint or download(experiment.archive or "", folder, "--checkpoint"))
    content, model = unpack(archive, folder), folder / "model"

    def fits(file: Path) -> bool:
        report = inspect(file) if (arguments.file or "") in str(file)[len(str(content)) :] else None
        return report is not None and report["model_class"].startswith(experiment.model)

    file = find(f"checkpoints for {experiment.model}", "--file PART_OF_ITS_PATH", content, ".pt", fits)
    options = ["--bpe", arguments.bpe] if arguments.bpe else []
    if (inspect(file) or {})["sizes"]["input_type"] == "tokens":
        reads = partial(inspect, file, "--dict")
        words = arguments.dict or find("fitting dictionaries", "--dict FILE", content, ".txt", reads)
        options += ["--dict", str(words)]
    stamp = shlex.join([str(file.resolve()), str(file.stat().st_size), *options])
    if not is_done(model, stamp):
        run("luna-mega", "convert", str(file), "--output", str(model), *options)
        if arguments.name == "speech":
            Wav2Vec2FeatureExtractor(sampling_rate=16_000, return_attention_mask=True).save_pretrained(model)
        (model / "done").write_text(stamp, encoding="utf-8")
    return model


def split_enwik8(source: Path, output: Path) -> None:
    """Write the first 90, the next 5 and the last 5 million bytes as lines; characters at a border are omitted."""
    file = find(f"files of {ENWIK8} bytes", "--data FILE", source, "", lambda x: x.stat().st_size == ENWIK8)
    for name, start, end in (("train", 0, 90), ("validation", 90, 95), ("test", 95, 100)):
        text = file.read_bytes()[ENWIK8 * start // 100 : ENWIK8 * end // 100].decode(errors="ignore").removesuffix("\n")
        Dataset.from_dict({"text": text.split("\n")}).to_parquet(output / f"{name}.parquet")


def prepare(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Prepare the data, and return the options of the evaluation for it."""
    name, given, task = arguments.name, arguments.data, arguments.task_name
    if name == "wikitext103" and not given:
        return ["--dataset_name", "Salesforce/wikitext", "--dataset_config", "wikitext-103-v1"]
    if name in ("imagenet", "luna-base"):
        return ["--dataset_path", given]
    if name == "lra" and not (given := given or LRA_SOURCES.get(task)):
        lib.fail(f"--task_name {task} requires --data, its folder in the unpacked lra_release.gz of Long Range Arena")
    output, source = folder / "data", folder
    if arguments.prepare:
        output, source = folder, folder.with_name(f"{folder.name}-source")
    if not is_done(output, stamp := f"{name} {task} {given}"):
        source.mkdir(parents=True, exist_ok=True)
        if name == "lra":
            run("lra.prepare", task, "--source", given, "--output_dir", str(output))
        else:
            content = unpack(Path(given or download(EXPERIMENTS[name].data or "", source, "--data")), source)
            if name == "enwik8":
                split_enwik8(content, output)
            elif name == "wikitext103":
                file = find("files wiki.test.tokens", "--data FILE", content, "wiki.test.tokens")
                output.mkdir()
                shutil.copyfile(file, output / "test.txt")
            else:
                lists = find("files testing_list.txt", "--data FOLDER", content, "testing_list.txt")
                run("lra.prepare", "speech", "--source", str(lists.parent), "--output_dir", str(output))
        (output / "done").write_text(stamp, encoding="utf-8")
    return ["--dataset_path", str(output)]


def variant(arguments: argparse.Namespace, config: dict[str, Any]) -> str:
    """Return the name of the score of the paper."""
    own = {"speech": config.get("hidden_size"), "imagenet": ""}.get(arguments.name, arguments.task_name or "")
    suffix = {"lra": " chunk" * config.get("use_chunking", 0), "luna-base": " tied" * config.get("tie_key_value", 0)}
    return f"{own}{suffix.get(arguments.name, '')}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help=" | ".join(EXPERIMENTS))
    parser.add_argument("--checkpoint", help="archive, folder or .pt file of the authors, instead of the download")
    parser.add_argument("--file", help="part of the path of the checkpoint, if the archive has several")
    parser.add_argument("--dict", help="dictionary of the checkpoint, if the archive has none or several")
    parser.add_argument("--bpe", help="folder with the files of GPT-2's BPE, for luna-base")
    parser.add_argument("--data", help="archive, file or folder with the data set, instead of the download")
    parser.add_argument("--task_name", help="task of lra or luna-base")
    parser.add_argument("--prepare", action="store_true", help="only prepare the data, in the output folder")
    parser.add_argument("--output_dir", help="folder for downloads and results; default: outputs/reproduce/NAME")
    arguments = parser.parse_args(argv)
    if (name := arguments.name) not in EXPERIMENTS:
        lib.fail(f"{name or 'no name'}: pass one of {', '.join(EXPERIMENTS)}")
    if arguments.task_name not in (tasks := EXPERIMENTS[name].tasks or (None,)):
        lib.fail(
            f"--task_name {arguments.task_name}: {name} has {', '.join(filter(None, tasks)) or 'no tasks; omit it'}"
        )
    if name in ("imagenet", "luna-base") and not (arguments.checkpoint and arguments.data):
        lib.fail(f"{name} requires --checkpoint and --data, because their addresses require a browser or a login")
    if arguments.prepare and name not in ("enwik8", "speech", "lra"):
        lib.fail(f"--prepare: the data of {name} need no preparation")
    return arguments


def main(argv: list[str] | None = None) -> float | None:
    arguments = parse(argv)
    experiment = EXPERIMENTS[arguments.name]
    folder = Path(arguments.output_dir or f"outputs/reproduce/{arguments.name}")
    with lib.one_line("", DatasetsError, zipfile.BadZipFile, tarfile.TarError):
        data = prepare(arguments, folder)
        if arguments.prepare:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        model = convert(arguments, experiment, folder)
        config = json.loads((model / "config.json").read_text(encoding="utf-8-sig"))
        options = shlex.split(experiment.options.format(task=arguments.task_name))
        options += ["--model_name_or_path", str(model), *data, "--output_dir", str(folder / "scores")]
        metrics = run(experiment.script, *options)
    here = (metrics[0] if experiment.script == "eval_lm" else metrics)[experiment.metric]
    here *= 100 if "accuracy" in experiment.metric else 1
    name = f"{arguments.name} {variant(arguments, config)}".strip()
    paper = experiment.paper.get(variant(arguments, config), math.nan)  # another model than those of the paper
    scores = f"{paper:g}", f"{here:.4g}", f"{here - paper:+.3g}"
    shown = f"paper {scores[0]} ({experiment.source}), here {scores[1]}, difference {scores[2]}"
    lib.say(f"{name}, {experiment.metric}: {shown}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    where = f"{luna_mega.__version__}, {torch.__version__}, {device}"
    row = " | ".join([f"{datetime.now(UTC):%Y-%m-%d}", name, experiment.source, *scores, where])
    before = table.read_text(encoding="utf-8-sig") if (table := folder / "results.md").exists() else HEADER
    table.write_text(f"{before}| {row} |\n", encoding="utf-8")
    return here


if __name__ == "__main__":
    main()
