"""Mega for images: initialization, inputs, interpolation and export."""

from itertools import product

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageClassification, ViTConfig
from transformers.models.vit.modeling_vit import ViTEmbeddings

from luna_mega import MegaConfig, MegaForImageClassification, MegaModel
from luna_mega.modeling_mega.patches_mega import interpolate_positions, interpolate_raster_bias

SMALL = {
    "hidden_size": 16, "intermediate_size": 24, "nffn_hidden_size": 20, "shared_representation_size": 8,
    "ema_projection_size": 2, "num_hidden_layers": 2, "image_size": 32, "patch_size": 8, "num_labels": 5,
    "drop_path_rate": 0.0,
}  # fmt: skip


@pytest.fixture
def model():
    return MegaForImageClassification(MegaConfig.image_base_patch16_224(**SMALL)).eval()


def test_initialization():
    torch.manual_seed(0)
    model = AutoModelForImageClassification.from_config(MegaConfig.image_tiny_patch16_224(num_hidden_layers=1))
    embeddings, bound = model.mega.embedding_layer, (3 * 16 * 16) ** -0.5
    for weights in embeddings.requires_grad_(False).patch_embeddings.projection.parameters():
        assert 0.9 * bound < weights.abs().max() <= bound
    assert embeddings.position_embeddings.std() == pytest.approx(192**-0.5, rel=0.02)
    head = model.classifier.out_proj.requires_grad_(False)
    assert head.weight.abs().max() == pytest.approx((6 / (192 + 1000)) ** 0.5, rel=1e-3) and not head.bias.any()


def test_images_of_another_size(model):
    """Interpolation does not change images of the configured size and supports any multiple of the patch size."""
    own = torch.randn(2, 3, 32, 32)
    expected = model(pixel_values=own).logits
    torch.testing.assert_close(model(pixel_values=own, interpolate_pos_encoding=True).logits, expected)
    patches = model.mega.get_input_embeddings()(own)
    torch.testing.assert_close(model(None, inputs_embeds=patches).logits, expected)
    mask, dirty = torch.arange(32).view(2, 16) % 5 != 2, own.clone()
    dirty[0, :, :8, 16:24] = dirty[1, 1, 0, 8] = torch.nan  # patches that the mask drops
    masked = [model(pixel_values=x, attention_mask=mask).logits for x in (own, dirty)]
    assert torch.equal(*masked) and not torch.allclose(masked[0], expected)
    for height, width in ((48, 32), (16, 24), (8, 8)):
        pictures = torch.randn(2, 3, height, width, requires_grad=True)
        logits = model(pixel_values=pictures, interpolate_pos_encoding=True).logits
        logits.sum().backward()
        assert logits.shape == (2, 5) and logits.isfinite().all() and pictures.grad.abs().sum() > 0


def test_positions_are_interpolated_as_in_vit():
    vit = ViTEmbeddings(ViTConfig(hidden_size=16, image_size=32, patch_size=8))
    nn.init.normal_(vit.position_embeddings)
    theirs = vit.interpolate_pos_encoding(torch.zeros(1, 31, 16), 48, 40)[:, 1:]
    torch.testing.assert_close(interpolate_positions(vit.position_embeddings[:, 1:], (6, 5)), theirs)


@pytest.mark.parametrize("grid", [(6, 5), (2, 3), (8, 8), (1, 4)])
def test_bias_table_is_interpolated_linearly(grid):
    """The interpolated table equals a loop over all pairs of patches, which interpolates at the scaled offset."""
    side, (rows, columns) = 4, grid
    table = torch.randn(2 * side * side - 1, dtype=torch.float64)

    def read(down, across):
        value = 0.0
        for row, column in product((int(down // 1), int(down // 1) + 1), (int(across // 1), int(across // 1) + 1)):
            share = (1 - abs(down - row)) * (1 - abs(across - column))
            inside = [max(1 - side, min(side - 1, step)) for step in (row, column)]
            value += share * table[side * side - 1 + inside[0] * side + inside[1]]
        return value

    total, count = torch.zeros(2, 2 * rows * columns - 1, dtype=torch.float64)
    for query, key in product(range(rows * columns), repeat=2):
        (row, column), (other_row, other_column) = divmod(query, columns), divmod(key, columns)
        entry = rows * columns - 1 + key - query
        total[entry] += read((other_row - row) * side / rows, (other_column - column) * side / columns)
        count[entry] += 1
    torch.testing.assert_close(interpolate_raster_bias(table, grid), total / count)
    assert interpolate_raster_bias(table, (side, side)) is table


PIXELS = {"pixel_values": torch.zeros(2, 3, 32, 32)}
WRONG = [
    (r"num_channels=3, got \[2, 1, 32, 32\]", {"pixel_values": torch.zeros(2, 1, 32, 32)}),
    ("the batch is empty", {"pixel_values": torch.zeros(0, 3, 32, 32)}),
    ("are 48 x 32, but `image_size` is 32; resize them", {"pixel_values": torch.zeros(2, 3, 48, 32)}),
    ("not a multiple of `patch_size` 8",
     {"pixel_values": torch.zeros(2, 3, 32, 36), "interpolate_pos_encoding": True}),
    ("images do not support padding-free batches", PIXELS | {"position_ids": torch.tensor([[0, 1] * 8] * 2)}),
    (r"`labels` must have the shape \[2\]", PIXELS | {"labels": torch.zeros(3).long()}),
    ("have 9 positions, but images of this model have 16 patches", {"inputs_embeds": torch.zeros(2, 9, 16)}),
]  # fmt: skip


def test_wrong_inputs(model):
    for message, inputs in WRONG:
        with pytest.raises(ValueError, match=message):
            model(**inputs)


def test_image_inputs_need_an_image_model():
    with pytest.raises(ValueError, match="needs input_type='patches', got 'tokens'"):
        MegaForImageClassification(MegaConfig())
    with pytest.raises(ValueError, match="`pixel_values` require input_type='patches', got 'tokens'"):
        MegaModel(MegaConfig())(pixel_values=torch.zeros(2, 3, 32, 32))


@pytest.mark.slow
def test_export(model):
    pictures = torch.randn(2, 3, 32, 32)
    batch = {"pixel_values": {0: torch.export.Dim("batch", min=1)}}
    program = torch.export.export(model, (), {"pixel_values": pictures}, dynamic_shapes=batch).module()
    more = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(program(pixel_values=more).logits, model(pixel_values=more).logits, atol=1e-5, rtol=1e-5)
