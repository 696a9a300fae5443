"""Unsupported teachers and students raise a one-line error with a fix; loading of teachers."""

import json
import re

import pytest
import tokenizers
import torch
import transformers

from luna_mega import LunaConfig, LunaForCausalLM, LunaForMaskedLM, LunaForTokenClassification, MegaConfig
from luna_mega.distillation import (
    Teacher,
    align,
    build_student,
    calibrate,
    check_tokenizer,
    copy_weights,
    distill,
    extend_positions,
    from_teacher,
    load_teacher,
    student_config,
)
from tests.distillation.models import DECODERS, ENCODERS, make_batch, make_model, make_student, make_teacher

OTHERS = {
    "encoder-decoder": (lambda: transformers.T5Config(), "t5 is an encoder-decoder"),
    "relative biases": (lambda: transformers.DebertaV2Config(relative_attention=True), "has relative position biases"),
    "relative keys": (
        lambda: transformers.BertConfig(position_embedding_type="relative_key"),
        "has relative position biases",
    ),
    "real values": (lambda: LunaConfig(input_type="values"), "luna of other inputs than tokens cannot be a teacher"),
    "speech": (lambda: transformers.Wav2Vec2Config(), "wav2vec2 cannot be a teacher; supported are bert"),
    "BERT as a decoder": (lambda: transformers.BertConfig(is_decoder=True), "bert as a decoder cannot be a teacher"),
}


def one_line(error) -> str:
    message = str(error.value)
    assert "\n" not in message and len(message) < 400
    return message


@pytest.mark.parametrize("case", OTHERS)
def test_unsupported_teachers(case, tmp_path):
    config, message = OTHERS[case][0](), OTHERS[case][1]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        load_teacher(str(tmp_path))
    one_line(error)


@pytest.mark.parametrize("load", [load_teacher, from_teacher])
def test_gguf_checkpoints(load, tmp_path):
    file = tmp_path / "model-Q4.gguf"
    file.write_bytes(b"GGUF")
    for name in (tmp_path, file):
        with pytest.raises(ValueError, match="is a GGUF checkpoint; save it once as a folder of transformers") as error:
            load(str(name))
        one_line(error)


def test_weights_that_are_not_finite():
    model = make_model("bert")
    model.bert.encoder.layer[1].output.dense.weight.data[0, 0] = torch.nan
    with pytest.raises(
        ValueError, match=r"not finite in 1 tensors \(bert.encoder.layer.1.output.dense.weight"
    ) as error:
        Teacher(model)
    one_line(error)


@pytest.mark.parametrize(("head", "window"), [(None, 0), ("ForSequenceClassification", 8)])
def test_windows(head, window):
    with pytest.raises(ValueError, match=f"window={window} requires a language model and at least 1 position"):
        Teacher(make_model("bert", head), window)


def test_narrow_embeddings_of_a_mega():
    with pytest.raises(ValueError, match=r"narrower \(8\) than its layers \(16\).*choose a Luna"):
        student_config(make_teacher("electra", embedding_size=8), "mega")


def test_a_decoder_that_classifies():
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification classifies with a decoder"):
        make_teacher("gpt2", "ForSequenceClassification")


STUDENTS = {
    "vocabulary": ({"vocab_size": 41}, "the student's vocab_size is 41 and the teacher's 40"),
    "width": ({"hidden_size": 8}, "the student's hidden_size is 8 and the teacher's 16"),
    "padding": ({"pad_token_id": 3}, "the student's pad_token_id is 3 and the teacher's 1"),
    "end": ({"eos_token_id": 3}, "the student's eos_token_id is 3 and the teacher's 2"),
    "one layer for all": ({"share_layers": True}, "share_layers=False"),
    "decoder": (
        {"is_decoder": True},
        r"the teacher \(bert\) is an encoder and .* is for a decoder; set is_decoder=False",
    ),
}


@pytest.mark.parametrize("case", STUDENTS)
def test_incompatible_students(case):
    options, message = STUDENTS[case]
    teacher = make_teacher("bert")
    with pytest.raises(ValueError, match=message) as error:
        build_student(teacher, student_config(teacher, "luna", **options))
    one_line(error)
    config = student_config(teacher, "luna", **options)
    student = (LunaForCausalLM if config.is_decoder else LunaForMaskedLM)(config)
    for stage in (copy_weights, lambda *pair: align(*pair, make_batch(teacher))):
        with pytest.raises(ValueError, match=message):
            stage(teacher, student)


def test_an_encoder_cannot_learn_from_a_decoder():
    teacher = make_teacher("llama")
    with pytest.raises(ValueError, match=r"the teacher \(llama\) is a decoder and .* is for an encoder"):
        build_student(teacher, student_config(teacher, "mega", is_decoder=False))


@pytest.mark.parametrize("head", ["Model", "ForTokenClassification", "ForQuestionAnswering", "ForPreTraining"])
def test_teachers_without_a_head_to_learn_from(head):
    with pytest.raises(ValueError, match=f"Bert{head} has no head to distill") as error:
        make_teacher("bert", head)
    one_line(error)


def test_other_labels_and_other_heads():
    teacher = make_teacher("bert", "ForSequenceClassification", num_labels=3)
    other = make_student(make_teacher("bert", "ForSequenceClassification", num_labels=2), "luna")
    with pytest.raises(ValueError, match="the student's labels are"):
        copy_weights(teacher, other)
    masked = make_student(make_teacher("bert"), "luna")
    with pytest.raises(ValueError, match="must both classify"):
        distill(teacher, masked, make_batch(teacher))
    with pytest.raises(ValueError, match="LunaForTokenClassification cannot be a student"):
        copy_weights(teacher, LunaForTokenClassification(masked.config))
    with pytest.raises(ValueError, match="must be a model of luna_mega or DDP of one, got a Linear"):
        copy_weights(teacher, torch.nn.Linear(2, 2))
    student = make_student(teacher, "luna")
    with pytest.raises(ValueError, match="the student is compiled"):
        copy_weights(teacher, torch.compile(student))
    student.compile()
    with pytest.raises(ValueError, match="the student is compiled"):
        copy_weights(teacher, student)


def test_lengths():
    teacher = make_teacher("bert")
    short, batch = make_student(teacher, "luna", max_position_embeddings=10), make_batch(teacher)
    for stage in (align, distill):
        with pytest.raises(ValueError, match="exceeds the 10 learned positions"):
            stage(teacher, short, batch)
    long = {key: tensor.repeat(1, 2) for key, tensor in batch.items()}
    for stage in (align, distill, lambda teacher, student, batch: calibrate(teacher, student, [batch])):
        with pytest.raises(
            ValueError, match=r"has 24 positions and the teacher supports 20; .* \(teacher.window = 20\)"
        ):
            stage(teacher, make_student(teacher, "luna", max_position_embeddings=30), long)


def test_stages_that_do_not_apply():
    teacher, causal = make_teacher("bert"), make_teacher("gpt2")
    for student in (make_student(causal, "luna"), make_student(causal, "mega")):
        with pytest.raises(ValueError, match="has no pack attention"):
            calibrate(causal, student, [make_batch(causal)])
    with pytest.raises(ValueError, match="set tie_key_value=False"):
        calibrate(teacher, make_student(teacher, "luna", tie_key_value=True), [make_batch(teacher)])
    student, batch = make_student(teacher, "luna"), make_batch(teacher)
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate(teacher, student, [])
    nothing = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.zeros(2, 5)}
    with pytest.raises(ValueError, match="at least one batch with tokens"):
        calibrate(teacher, student, [nothing])
    before = {key: tensor.clone() for key, tensor in student.state_dict().items()}
    for options in ({"gain": -1.0}, {"gain": float("nan")}, {"ridge": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}=.* is out of range") as error:
            calibrate(teacher, student, [batch], **options)
        one_line(error)
    assert all(torch.equal(before[key], tensor) for key, tensor in student.state_dict().items())
    student.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="disable gradient checkpointing and layerdrop"):
        align(teacher, student, batch)
    with pytest.raises(ValueError, match="has no `labels`"):
        distill(teacher, student, make_batch(teacher, labels=False))
    for options in ({"share": 1.5}, {"share": -0.1}, {"temperature": 0.0}, {"temperature": float("inf")}):
        with pytest.raises(ValueError, match="`share` must be from 0 to 1 and `temperature` above 0"):
            distill(teacher, student, batch, **options)


@pytest.mark.parametrize("layers", [[0], [0, 1, 3], [0, 1, -1]])
def test_layers_missing_from_the_teacher(layers):
    teacher = make_teacher("bert")
    with pytest.raises(ValueError, match="must name one of the teacher's 3 layers"):
        copy_weights(teacher, make_student(teacher, "luna"), layers)


def test_options():
    teacher = make_teacher("bert")
    with pytest.raises(ValueError, match="got 'megalodon'; no norm or layer of a Megalodon corresponds"):
        student_config(make_teacher("llama"), "megalodon")
    with pytest.raises(ValueError, match="a student is 'luna' or 'mega', got 'lstm'$"):
        student_config(teacher, "lstm")
    with pytest.raises(ValueError, match="`how` must be 'windows', 'copy', 'mirror' or 'interpolate', got 'sinusoids'"):
        extend_positions(torch.ones(3, 4), 5, "sinusoids")
    with pytest.raises(ValueError, match="at least 1, got 0"):
        extend_positions(torch.ones(3, 4), 0)


def make_tokenizer(**tokens) -> transformers.PreTrainedTokenizerFast:
    words = {word: index for index, word in enumerate(["<s>", "<pad>", "</s>", "<mask>", "a", "b"])}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **tokens)


def test_tokenizers():
    encoder, decoder = make_teacher("bert"), make_teacher("llama")
    check_tokenizer(encoder, make_tokenizer(mask_token="<mask>", pad_token="<pad>"))
    check_tokenizer(decoder, make_tokenizer())
    with pytest.raises(ValueError, match="no mask token"):
        check_tokenizer(encoder, make_tokenizer())
    with pytest.raises(ValueError, match="pads with 0 and the teacher with 1"):
        check_tokenizer(encoder, make_tokenizer(mask_token="<mask>", pad_token="<s>"))
    with pytest.raises(ValueError, match="has token id 5, but the teacher's vocab_size is 5"):
        check_tokenizer(make_teacher("bert", vocab_size=5), make_tokenizer(mask_token="<mask>"))
    check_tokenizer(make_teacher("bert", vocab_size=6), make_tokenizer(mask_token="<mask>"))
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 6}, unk_token="a"))  # an id without a token
    with pytest.raises(ValueError, match="has token id 6"):
        check_tokenizer(
            make_teacher("llama", vocab_size=6), transformers.PreTrainedTokenizerFast(tokenizer_object=model)
        )


@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_states_are_those_that_transformers_records(name):
    teacher = make_teacher(name)
    batch = make_batch(teacher)
    observed, kept = teacher.show(batch), batch["attention_mask"].bool()
    expected = teacher.model(**teacher.inputs(batch), output_hidden_states=True).hidden_states
    assert len(observed.states) == 4 and len(observed.attended) == 3
    for got, reference in zip(observed.states[:3], expected[:3], strict=True):
        assert torch.equal(got[kept], reference[kept]) and not got[~kept].any()
    last = teacher.module("last_norm")
    assert torch.equal((observed.states[3] if last is None else last(observed.states[3]))[kept], expected[3][kept])
    # The hooks that are left are those of transformers' own recording.
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in teacher.model.modules()]
    teacher.show(batch)
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in teacher.model.modules()]


@pytest.mark.parametrize(
    ("name", "head"), [("bert", None), ("roberta", "ForSequenceClassification"), ("gpt2", None), ("modernbert", None)]
)
def test_a_folder_is_loaded_with_its_head(name, head, tmp_path):
    model = make_model(name, head)
    model.save_pretrained(tmp_path)
    teacher = load_teacher(str(tmp_path))
    assert type(teacher.model) is type(model) and not teacher.model.training
    assert all(torch.equal(*pair) for pair in zip(teacher.model.parameters(), model.parameters(), strict=True))


def test_folders_of_this_package_as_teachers(tmp_path):
    LunaForMaskedLM(
        LunaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    assert type(load_teacher(str(tmp_path)).model) is LunaForMaskedLM


def write_pickles(model, folder, how):
    """Save a model as transformers did before safetensors."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    tensors, name = model.state_dict(), "pytorch_model.bin"
    if how == "shards":
        names = [f"pytorch_model-0000{index}-of-00002.bin" for index in (1, 2)]
        places = {key: names[index % 2] for index, key in enumerate(tensors)}
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))
        for name in names:
            torch.save({key: tensors[key] for key, place in places.items() if place == name}, folder / name)
        return
    if how == "old names":  # of models that began as TensorFlow's
        tensors = {
            re.sub("LayerNorm.weight$", "LayerNorm.gamma", re.sub("LayerNorm.bias$", "LayerNorm.beta", key)): tensor
            for key, tensor in tensors.items()
        }
        assert any(key.endswith("gamma") for key in tensors)
    torch.save(tensors, folder / name, _use_new_zipfile_serialization=how != "legacy")


@pytest.mark.parametrize("how", ["zip", "legacy", "shards", "old names"])
@pytest.mark.parametrize(("name", "head"), [("bert", None), ("roberta", "ForSequenceClassification"), ("gpt2", None)])
def test_weights_of_a_bin_file(name, head, how, tmp_path):
    model = make_model(name, head).half()
    write_pickles(model, tmp_path, "zip" if how == "old names" and name == "gpt2" else how)
    teacher = load_teacher(str(tmp_path), dtype="auto")
    assert type(teacher.model) is type(model) and teacher.model.dtype == torch.float16
    loaded = teacher.model.state_dict()
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, loaded[key]) for key, tensor in model.state_dict().items())
    assert load_teacher(str(tmp_path), dtype=torch.float32).model.dtype == torch.float32


class Payload:
    """An object that creates a file when it is unpickled by an ordinary unpickler."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return open, (str(self.file), "w")


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_bin_file_is_not_run(zipped, tmp_path):
    model = make_model("bert")
    model.config.save_pretrained(tmp_path)
    state = {**model.state_dict(), "a": Payload(tmp_path / "ran")}
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match="pytorch_model.bin: not loaded, nothing was executed: .*open") as error:
        load_teacher(str(tmp_path))
    one_line(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no weights in model.safetensors or pytorch_model.bin; pass a checkpoint"),
        ({"pytorch_model.bin": "version https://git-lfs"}, "pytorch_model.bin: not a checkpoint"),
        ({"pytorch_model.bin.index.json": "{}"}, "weight_map must name files of this folder, got None"),
        ({"pytorch_model.bin.index.json": '{"weight_map": {"a": 1}}'}, "must name files of this folder"),
    ],
)
def test_weights_that_cannot_be_read(files, message, tmp_path):
    make_model("bert").config.save_pretrained(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_teacher(str(tmp_path))
    one_line(error)


def test_code_in_the_folder_of_a_teacher_is_not_run(tmp_path):
    with pytest.raises(ValueError, match="trust_remote_code=True runs code"):
        load_teacher(str(tmp_path), trust_remote_code=True)


def test_missing_head(tmp_path):
    make_model("bert").bert.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks .* weights of BertForMaskedLM") as error:
        load_teacher(str(tmp_path))
    one_line(error)


@pytest.mark.parametrize("kind", ["luna", "mega"])
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS])
def test_a_student_is_saved_and_loaded(name, kind, tmp_path):
    """A configuration derived from a teacher's can be serialized."""
    teacher = make_teacher(name)
    config = student_config(teacher, kind)
    config.save_pretrained(tmp_path)
    loaded = (LunaConfig if kind == "luna" else MegaConfig).from_pretrained(tmp_path)
    assert loaded.to_diff_dict() == config.to_diff_dict()
    assert loaded.vocab_size == 40 and loaded.is_decoder == (name in DECODERS)
