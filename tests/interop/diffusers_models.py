"""Tiny models of diffusers, made here with random weights."""

import torch


def tiny_autoencoder(folder, **changes):
    """An AutoencoderKL that halves images once, saved in a folder."""
    from diffusers import AutoencoderKL

    settings = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
        "sample_size": 8,
        "scaling_factor": 0.25,
    }
    torch.manual_seed(0)
    model = AutoencoderKL(**{**settings, **changes}).eval()
    model.save_pretrained(folder)
    return model
