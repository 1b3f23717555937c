"""FID's Inception beside torchvision's, whose pools are changed here as the TensorFlow graph has them."""

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.inception import FIDInception, resize
from siamesenorm.tasks.fidelity.inception_weights import load_inception


@pytest.fixture(scope="module")
def torchvision_inception():
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    model = models.inception_v3(weights=None, num_classes=1008, aux_logits=False, init_weights=False).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.05, 0.3)  # keeps the signal alive through forty untrained layers
            module.weight.data.uniform_(0.5, 1.5)
    return model


def test_names_and_shapes_are_those_of_torchvision(torchvision_inception):
    expected = {name: tensor.shape for name, tensor in torchvision_inception.state_dict().items()}
    assert {name: tensor.shape for name, tensor in FIDInception().state_dict().items()} == expected


def test_features_are_those_of_torchvision_with_the_pools_of_the_graph(torchvision_inception, monkeypatch):
    other, seen, last = torchvision_inception, {}, []

    def graph_pool(x, kernel_size, stride, padding):
        if last:
            return F.max_pool2d(x, kernel_size, stride, padding)
        return torch._C._nn.avg_pool2d(x, kernel_size, stride, padding, count_include_pad=False)

    other.Mixed_7c.register_forward_pre_hook(lambda module, inputs: last.append(True))
    other.Mixed_7c.register_forward_hook(lambda module, inputs, out: last.clear())
    other.avgpool.register_forward_hook(lambda module, inputs, out: seen.update(pool=out.flatten(1)))
    other.Mixed_6d.branch1x1.register_forward_hook(lambda module, inputs, out: seen.update(conv=out))
    images = torch.randint(0, 256, (1, 3, 299, 299), generator=torch.Generator().manual_seed(1)).float()
    ours = FIDInception()
    ours.load_state_dict(other.state_dict())
    with torch.inference_mode():
        found = ours(images)
        monkeypatch.setattr("torchvision.models.inception.F.avg_pool2d", graph_pool)
        logits = other((images - 128) / 128)
    assert seen["pool"].std() > 0.01
    torch.testing.assert_close(found.pool, seen["pool"], rtol=1e-4, atol=1e-5)
    # ADM flattens (images, 17, 17, 7): place by place, so that its files of statistics and ours agree.
    assert found.spatial.shape == (1, 2023)
    by_place = found.spatial.reshape(1, 17, 17, 7)
    torch.testing.assert_close(by_place, seen["conv"][:, :7].movedim(1, -1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.logits, logits - other.fc.bias, rtol=1e-4, atol=1e-4)


def test_images_are_resized_with_corners_at_the_origin():
    image = torch.arange(12.0).reshape(1, 1, 3, 4)
    found = resize(image, 5)
    assert found.shape == (1, 1, 5, 5)
    for i in range(5):
        for j in range(5):
            y, x = i * 3 / 5, j * 4 / 5
            assert float(found[0, 0, i, j]) == pytest.approx(4 * min(y, 2) + min(x, 3), abs=1e-5)
    same = torch.rand(1, 3, 299, 299)
    assert torch.equal(resize(same), same)


def test_weights_load_from_both_kinds_of_file_and_name_themselves(tmp_path):
    torch.manual_seed(0)
    weights = {name: tensor for name, tensor in FIDInception().state_dict().items() if "tracked" not in name}
    torch.save(weights, tmp_path / "inception.pth")
    save_file(weights, tmp_path / "inception.safetensors")
    one, other = load_inception(tmp_path / "inception.pth"), load_inception(tmp_path / "inception.safetensors")
    assert one.fingerprint == other.fingerprint
    weights["fc.bias"] += 1
    torch.save(weights, tmp_path / "inception.pth")
    assert load_inception(tmp_path / "inception.pth").fingerprint != one.fingerprint


def test_a_missing_damaged_or_other_file_is_refused_with_the_name_of_the_right_one(tmp_path):
    (tmp_path / "damaged.pth").write_bytes(b"nothing")
    (tmp_path / "damaged.safetensors").write_bytes(b"nothing")
    torch.save({"fc.weight": torch.zeros(2)}, tmp_path / "other.pth")
    torch.save([1], tmp_path / "list.pth")
    torch.save(FIDInception(), tmp_path / "pickled.pth")
    for name in ("missing.pth", "damaged.pth", "damaged.safetensors", "other.pth", "list.pth", "pickled.pth"):
        with pytest.raises(DataError, match=r"pt_inception-2015-12-05-6726825d\.pth"):
            load_inception(tmp_path / name)
