"""The data of Long Range Arena: generated rows are correct, complete, and reproducible for a seed."""

import io
import wave
from pathlib import Path

import numpy as np
import pytest
from datasets import Audio, ClassLabel, Dataset, Features, load_dataset
from huggingface_hub import DatasetCard
from PIL import Image

from tests.examples import runs

SHORT = ["--min_length", 8, "--max_length", 40]
ROWS = ["--train", 40, "--validation", 8, "--test", 8]


@pytest.fixture
def prepare(script):
    module = script("lra.prepare")
    return lambda *arguments: module.main([*map(str, arguments)])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def value(tokens: list[str]) -> int:
    """Evaluate a ListOps tree with NumPy from its first token, independently of the generator."""
    token = tokens.pop(0)
    if token.isdigit():
        return int(token)
    values = []
    while tokens[0] != "]":
        values.append(value(tokens))
    tokens.pop(0)
    functions = {"[MIN": np.min, "[MAX": np.max, "[MED": np.median, "[SM": lambda numbers: np.sum(numbers) % 10}
    return int(functions[token](values))


def test_listops(prepare, tmp_path):
    """Values are correct, lengths are within their limits, trees are unique, and splits load by name."""
    prepare("listops", "--output_dir", tmp_path, "--processes", 1, *ROWS, *SHORT)
    splits = load_dataset(str(tmp_path))
    assert {name: len(split) for name, split in splits.items()} == {"train": 40, "validation": 8, "test": 8}
    rows = [row for split in splits.values() for row in split]
    assert len({row["source"] for row in rows}) == 56
    for row in rows:
        tokens = row["source"].split()
        assert 8 < len(tokens) < 40 and value(tokens) == row["label"] and not tokens
    card = DatasetCard.load(tmp_path / "README.md")
    assert "| train | 40 |" in card.text and card.data.tags == ["long-range-arena", "listops"]
    assert [row["split"] for row in card.data.configs[0]["data_files"]] == ["train", "validation", "test"]


def test_trees_that_repeat(prepare, tmp_path):
    """Further batches replace trees that occur twice."""
    options = ["--train", 180, "--validation", 0, "--test", 0, "--processes", 1, "--min_length", 3, "--max_length", 5]
    prepare("listops", "--output_dir", tmp_path, *options)
    assert len(set(load_dataset(str(tmp_path))["train"]["source"])) == 180


def test_shape_of_the_trees(script):
    """Trees are within the benchmark's limits for depth, arguments, and length."""
    listops = script("lra.listops")
    trees = listops.trees(0, listops.Shape())
    for source in [next(trees)["source"].split() for _ in range(20)]:
        depth, deepest, arguments = [], 0, []
        for token in source:
            if depth and token != "]":
                depth[-1] += 1
            if token in listops.OPERATIONS:
                depth.append(0)
            elif token == "]":
                arguments.append(depth.pop())
            deepest = max(deepest, len(depth))
        assert 500 < len(source) < 2000 and deepest <= 9 and 2 <= min(arguments) and max(arguments) <= 10


@pytest.mark.parametrize(
    "size, count",
    [
        (32, 1),
        pytest.param(32, 8, marks=pytest.mark.slow),
        pytest.param(128, 2, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_pathfinder(script, size, count):
    """Labels match the geometry used to draw the image, and can be determined from the image."""
    pathfinder = script("lra.pathfinder")
    from tests.examples import snakes  # requires the folder of the examples in sys.path

    sizes = script("lra.drawing").find_drawing(size)
    for index in range(count):
        image = pathfinder.draw_image(np.random.default_rng([7, index]), sizes)
        ends = [(snake[0].tolist(), snake[-1].tolist()) for snake in image.snakes]
        assert image.label == (tuple(image.discs.tolist()) in ends)
        assert image.snakes.shape == (2, sizes.contour_length + 1, 2)
        assert image.pixels.shape == (size, size) and image.pixels.min() == 0 and image.pixels.max() == 255
        assert snakes.follow(image.pixels, sizes) == image.label


@pytest.mark.parametrize(
    "task, options", [("listops", SHORT), pytest.param("pathfinder", ["--contour_length", 6], marks=pytest.mark.slow)]
)
def test_rows_do_not_depend_on_processes(prepare, tmp_path, task, options):
    options = [task, *options, "--train", 70, "--validation", 3, "--test", 5]
    for processes in (1, 2):
        prepare(*options, "--processes", processes, "--output_dir", tmp_path / str(processes))
    assert files(tmp_path / "1") == files(tmp_path / "2") and len(files(tmp_path / "1")) == 3
    assert load_dataset(str(tmp_path / "1"))["train"].num_rows == 70


def test_released_listops(prepare, script, tmp_path):
    """All brackets are kept. A copy without brackets, a wrong value, or a missing file raises an error."""
    source, output = tmp_path / "listops-1000", tmp_path / "out"
    source.mkdir()
    line = "( ( ( ( [MAX 2 ) ( ( ( [MIN 4 ) 7 ) ] ) ) 0 ) ] )\t4"
    for name in ("train", "val", "test"):
        (source / f"basic_{name}.tsv").write_text(f"Source\tTarget\n{line}\n", encoding="utf-8")
    prepare("listops", "--source", source, "--output_dir", output)
    (row,) = load_dataset(str(output))["test"]
    assert row == {"source": "[MAX 2 [MIN 4 7 ] 0 ]", "label": 4}
    for harm, message in [
        (("] ", ""), "line 2: .* lost its brackets"),
        (("\t4", "\t5"), "evaluates to 4, but Target is 5"),
    ]:
        (source / "basic_val.tsv").write_text(f"Source\tTarget\n{line.replace(*harm)}\n", encoding="utf-8")
        with pytest.raises(SystemExit, match=message):
            prepare("listops", "--source", source, "--output_dir", tmp_path / harm[0].strip())
    (source / "basic_val.tsv").unlink()
    with pytest.raises(SystemExit, match="No such file .*basic_val.tsv"):
        prepare("listops", "--source", source, "--output_dir", tmp_path / "absent")


def test_released_pathfinder(prepare, tmp_path, capsys):
    source = tmp_path / "curv_contour_length_14"
    (source / "metadata").mkdir(parents=True)
    (source / "imgs" / "0").mkdir(parents=True)
    lines = [f"imgs/0 sample_{index}.png {index} {index % 2} 1.0 14" for index in range(20)]
    (source / "metadata" / "0.npy").write_text("\n".join(lines), encoding="utf-8")
    for index in range(20):
        Image.fromarray(np.full((32, 32), index, np.uint8)).save(source / "imgs" / "0" / f"sample_{index}.png")
    (source / "imgs" / "0" / "sample_3.png").write_bytes(b"")
    prepare("pathfinder", "--source", source, "--output_dir", tmp_path / "out")
    assert "skipped, it is empty" in capsys.readouterr().out
    rows = [row for split in load_dataset(str(tmp_path / "out")).values() for row in split]
    assert len(rows) == 19 and all(np.asarray(row["image"])[0, 0] % 2 == row["label"] for row in rows)
    with pytest.raises(SystemExit, match="has 32 x 32 pixels, not 128 x 128"):
        prepare("pathx", "--source", source, "--output_dir", tmp_path / "large")
    (source / "metadata" / "0.npy").write_text(lines[0].replace(" 0 0 ", " 0 2 "), encoding="utf-8")
    with pytest.raises(SystemExit, match="the label is '2', not 0 or 1"):
        prepare("pathfinder", "--source", source, "--output_dir", tmp_path / "label")


def test_text_and_image(prepare, tmp_path):
    """Validation rows are taken from the training rows; the test rows keep their order."""
    for name, size in (("train", 10), ("test", 3)):
        rows = [{"text": f"{name} {index}", "label": index % 2} for index in range(size)]
        runs.write(rows, tmp_path / "reviews" / f"{name}-00000-of-00001.parquet")
        image = Image.fromarray(np.full((32, 32, 3), (255, 0, 0), np.uint8))
        Dataset.from_list([{"img": image, "label": index} for index in range(size)]).to_parquet(
            tmp_path / "objects" / f"{name}-00000-of-00001.parquet"
        )
    prepare("text", "--source", tmp_path / "reviews", "--output_dir", tmp_path / "text", "--validation", 4)
    splits = load_dataset(str(tmp_path / "text"))
    assert [row["text"] for row in splits["test"]] == ["test 0", "test 1", "test 2"]
    assert sorted([*splits["train"]["text"], *splits["validation"]["text"]]) == [
        f"train {index}" for index in range(10)
    ]
    assert len(splits["validation"]) == 4
    prepare("image", "--source", tmp_path / "objects", "--output_dir", tmp_path / "image", "--validation", 5)
    first = load_dataset(str(tmp_path / "image"))["test"][1]
    assert first["label"] == 1 and np.asarray(first["image"]).tolist() == [[76] * 32] * 32
    with pytest.raises(SystemExit, match="--validation 10 must be below the 10 training rows"):
        prepare("text", "--source", tmp_path / "reviews", "--output_dir", tmp_path / "none", "--validation", 10)
    with pytest.raises(SystemExit, match="no split train with the columns img, label"):
        prepare("image", "--source", tmp_path / "reviews", "--output_dir", tmp_path / "none")


def test_retrieval(prepare, tmp_path):
    source = tmp_path / "tsv_data"
    source.mkdir()
    for name in ("train", "eval", "test"):
        (source / f"new_aan_pairs.{name}.tsv").write_text('1.0\tA1\tB1\ta "quoted" text\tanother\n', encoding="utf-8")
    prepare("retrieval", "--source", source, "--output_dir", tmp_path / "out")
    (row,) = load_dataset(str(tmp_path / "out"))["validation"]
    assert row == {"text1": 'a "quoted" text', "text2": "another", "label": 1}
    (source / "new_aan_pairs.test.tsv").write_text("2.0\tA1\tB1\ta\tb\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="new_aan_pairs.test.tsv, line 1: two texts and the label 0 or 1 are needed"):
        prepare("retrieval", "--source", source, "--output_dir", tmp_path / "label")


def test_speech(prepare, tmp_path):
    source = tmp_path / "speech_commands"
    for word in ("yes", "no"):
        (source / word).mkdir(parents=True)
        for index in range(3):
            with wave.open(str(source / word / f"{index}.wav"), "wb") as clip:
                clip.setparams((1, 2, 16_000, 0, "NONE", None))
                clip.writeframes(np.arange(index + 1, dtype="<i2").tobytes())
    (source / "validation_list.txt").write_text("yes/1.wav\nno/1.wav\n", encoding="utf-8")
    (source / "testing_list.txt").write_text("yes/2.wav\nno/2.wav\n", encoding="utf-8")
    options = ["speech", "--source", source, "--words", "yes", "no"]
    prepare(*options, "--output_dir", tmp_path / "out")
    rows = load_dataset(str(tmp_path / "out"))["test"]
    assert [np.frombuffer(row["audio"], "<i2").tolist() for row in rows] == [[0, 1, 2]] * 2
    assert rows["label"] == [0, 1] and rows.features["label"].names == ["yes", "no"]
    for more, message in (
        (["--sampling_rate", 8000], "has 1 channels of 2 bytes at 16000 Hz, not 1, 2 and 8000"),
        (["--words", "maybe"], "has no clips of the word 'maybe'"),
    ):
        with pytest.raises(SystemExit, match=message):
            prepare(*options, *more, "--output_dir", tmp_path / more[0])
    (source / "yes" / "0.wav").write_bytes(b"half")
    with pytest.raises(SystemExit, match="0.wav is not a WAV file"):
        prepare(*options, "--output_dir", tmp_path / "half")
    with wave.open(str(source / "yes" / "0.wav"), "wb") as clip:
        clip.setparams((1, 2, 16_000, 0, "NONE", None))
    with pytest.raises(SystemExit, match="0.wav has no samples"):
        prepare(*options, "--output_dir", tmp_path / "empty")


def test_speech_in_parquet_files(prepare, tmp_path):
    """Parquet files in the format of the Hub, with one unused word, are read; a second call updates the folder."""
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setparams((1, 2, 16_000, 0, "NONE", None))
        clip.writeframes(np.arange(4, dtype="<i2").tobytes())
    kinds = Features({"audio": Audio(decode=False), "label": ClassLabel(names=["bird", "no", "yes"])})

    def write(name: str, audio: bytes = file.getvalue()) -> Path:
        rows = {"audio": [{"bytes": audio, "path": None}] * 4, "label": ["yes", "bird", "no", "yes"]}
        for split in ("train", "validation", "test"):
            Dataset.from_dict(rows).cast(kinds).to_parquet(str(tmp_path / name / f"{split}.parquet"))
        return tmp_path / name

    options = ["speech", "--words", "yes", "no", "--source"]
    prepare(*options, write("hub"), "--output_dir", tmp_path / "once")
    prepare(*options, tmp_path / "once", "--output_dir", tmp_path / "twice")
    once, twice = (load_dataset(str(tmp_path / name))["validation"] for name in ("once", "twice"))
    assert once["label"] == [0, 1, 0] and once.features["label"].names == ["yes", "no"]
    assert [np.frombuffer(row["audio"], "<i2").tolist() for row in once] == [[0, 1, 2, 3]] * 3
    assert once.to_list() == twice.to_list()
    for folder, more, message in (
        (write("broken", b"no clip"), [], "broken, train, row 0 is not a WAV file"),
        (write("empty", b""), [], "empty, train, row 0 is not a WAV file"),
        (tmp_path / "hub", ["--sampling_rate", 8000], "row 0 has 1 channels of 2 bytes at 16000 Hz, not 1, 2 and 8000"),
        (tmp_path / "once", ["--sampling_rate", 8000], "row 0 is not a WAV file at 8000 Hz"),
        (tmp_path / "hub", ["--words", "yes", "maybe"], "has no clips of the word 'maybe' in the split train"),
    ):
        with pytest.raises(SystemExit, match=message):
            prepare(*options, folder, *more, "--output_dir", folder / "out")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["pathfinder", "--size", 48], "no Pathfinder of 48 x 48 pixels .*: sizes are 32, 64, 128, 256"),
        (["pathfinder", "--contour_length", 5], "contours 6, 9, 14"),
        (["listops", "--max_length", 400], "more than 500 and less than 400 tokens"),
        (["listops", "--train", -1], "--train -1 must be at least 0"),
        (["listops", "--seed", -1], "--seed -1 must be at least 0"),
    ],
)
def test_invalid_options(prepare, tmp_path, arguments, message):
    with pytest.raises(SystemExit, match=message):
        prepare(*arguments, "--output_dir", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_folder(prepare, tmp_path):
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    with pytest.raises(SystemExit, match="contains other files; choose another --output_dir"):
        prepare("listops", "--output_dir", tmp_path, *ROWS, *SHORT)
