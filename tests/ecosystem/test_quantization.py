"""Linear layers in 8 and 4 bits with torchao, torch and bitsandbytes: which layers change, and how much results do."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BitsAndBytesConfig, TorchAoConfig

import luna_mega
from tests.modeling import luna, mega, megalodon_decoders

# bitsandbytes needs widths that are multiples of its blocks.
WIDTHS = {
    "luna": {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4},
    "mega": {"hidden_size": 128, "intermediate_size": 128, "shared_representation_size": 64, "nffn_hidden_size": 128},
    "megalodon": {"hidden_size": 128, "intermediate_size": 128, "shared_representation_size": 64, "value_size": 128}
    # makes the scores as small as those of the other families
    | {"norm_num_groups": 4, "vocab_size": 40, "initializer": "bert"},
}
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
MODULES = {"luna": luna, "mega": mega, "megalodon": megalodon_decoders}
INPUTS = luna.tokens([9, 5])


@pytest.fixture(params=WIDTHS)
def model(request):
    family = request.param
    torch.manual_seed(0)
    config = MODULES[family].tiny_config(**WIDTHS[family])
    return getattr(luna_mega, f"{family.capitalize()}ForSequenceClassification")(config).eval()


@torch.no_grad()
def check(quantized, model, limit):
    """Check that results change by less than `limit`.

    The difference is relative to the largest score, because families initialize heads with different widths.
    """
    scores = model(**INPUTS).logits
    difference = quantized(**INPUTS).logits.float() - scores
    assert 0 < difference.abs().max() / scores.abs().max() < limit


def test_torchao_int8_weights(model, tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model.save_pretrained(tmp_path)
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    quantized = AutoModelForSequenceClassification.from_pretrained(tmp_path, quantization_config=config)
    linear = [name for name, module in quantized.named_modules() if isinstance(module, torch.nn.Linear)]
    kept = [name for name in linear if type(quantized.get_submodule(name).weight.data) is torch.Tensor]
    assert len(linear) - len(kept) >= 10 and all(name.startswith("classifier") for name in kept)
    check(quantized, model, 0.025)


def test_torch_dynamic(model):
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no int8 kernels for CPUs")
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert not any(type(module) is torch.nn.Linear for module in quantized.modules())
    check(quantized, model, 0.05)


@pytest.mark.parametrize("bits", [8, 4])
def test_bitsandbytes(model, bits, tmp_path):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model.save_pretrained(tmp_path)
    # On a CPU, 4-bit layers need widths that are multiples of the block size; a head of 3 classes is too narrow.
    fields = {"load_in_8bit": True} if bits == 8 else {"load_in_4bit": True} | NF4
    config = BitsAndBytesConfig(**fields, llm_int8_skip_modules=["classifier"])
    quantized = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, quantization_config=config, device_map="cpu"
    )
    kinds = [type(module).__name__ for module in quantized.modules()]
    assert kinds.count("Linear8bitLt" if bits == 8 else "Linear4bit") >= 10
    check(quantized, model, 0.025 if bits == 8 else 0.25)


@pytest.mark.parametrize("family", WIDTHS)
def test_generate_and_train_on_4_bits(family, tmp_path):
    """QLoRA: adapters on 4-bit layers get gradients, and generation uses the cache."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    one_direction = {"bidirectional": False} if family == "mega" else {}
    config = MODULES[family].tiny_config(**WIDTHS[family], is_decoder=True, **one_direction)
    getattr(luna_mega, f"{family.capitalize()}ForCausalLM")(config).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=True, **NF4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    model = peft.prepare_model_for_kbit_training(model)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    ids = INPUTS["input_ids"][:1]
    model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert gradients and all(gradient is not None for gradient in gradients)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    cached = model.eval().generate(input_ids=ids, **options)
    assert cached.shape == (1, 13) and torch.equal(cached, model.generate(input_ids=ids, use_cache=False, **options))
